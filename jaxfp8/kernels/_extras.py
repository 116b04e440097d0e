"""CastExtras: what a cast kernel returns besides the copies, because it reads the array anyway."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxfp8._typing import Array
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._per_block import PerBlock

_SIDE = 128
"""The side of the square tiles for which kernels return one amax each: T of `mosaic/_tiles.py`."""


class CastExtras(NamedTuple):
    """Extra results of a cast kernel. A field is None if the kernel did not compute it.

    Attributes:
      largest: an array [...] that has the same amax as x.
      column_sums: float32 [..., C, K] of x [..., M, K]. Each entry is the sum of some rows. Their
        sum along C is the sum of x along M.

    Example:
      >>> CastExtras().largest is None
      True
    """

    largest: Array | None = None
    column_sums: Array | None = None

    def or_else(self, other: "CastExtras") -> "CastExtras":
        """These results, and those of another kernel for the fields that are None.

        Example:
          >>> CastExtras().or_else(CastExtras(largest=1.0)).largest
          1.0
        """
        return CastExtras(
            *(mine if mine is not None else its for mine, its in zip(self, other, strict=True))
        )

    @classmethod
    def of(cls, x: Array, like: "CastExtras") -> "CastExtras":
        """The results that a kernel gives for x [..., M, K], as XLA computes them.

        Args:
          x: what was cast.
          like: the types of the kernel's results.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> like = CastExtras(column_sums=jax.ShapeDtypeStruct((2, 3), jnp.float32))
          >>> CastExtras.of(jnp.ones((256, 3)), like).column_sums
          Array([[256., 256., 256.],
                 [  0.,   0.,   0.]], dtype=float32)
        """
        largest = sums = None
        if like.largest is not None:
            cells = PerBlock((_SIDE, _SIDE))
            largest = amax(x, cells).astype(like.largest.dtype)
        if like.column_sums is not None:
            sums = jnp.sum(x, -2, jnp.float32, keepdims=True)
            # A kernel sums some rows into each of C entries. Here the first entry is the whole
            # sum, and the others are zero.
            unused = like.column_sums.shape[-2] - 1
            sums = jnp.pad(sums, [(0, 0)] * (x.ndim - 2) + [(0, unused), (0, 0)])
        return cls(largest, sums)
