"""Copies of a tensor as residuals: what is saved for the backward pass, and under which name."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Matmul, Tensor
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.ops._checkpoint_policies import named_copy
from jaxfp8.quantizers._base import Operand
from jaxfp8.recipes._recipe import PlannedCast
from jaxfp8.sharding._amax import manual_axes


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["operand"], meta_fields=["readers", "row"]
)
@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy of a tensor, and the matmuls that read it.

    The state has a stored scale in every pass, so a copy does not carry it. A loop over layers
    would save it as one more residual, with a kernel that writes it and one that reads it.

    Attributes:
      operand: the copy. Its scale is None if it is a stored one.
      readers: the matmuls that read it.
      row: the row of the state that has the stored scale; None if the copy has its scale.
    """

    operand: Operand
    readers: tuple[Matmul, ...]
    row: int | None = None

    @classmethod
    def of(
        cls,
        operand: Operand,
        readers: tuple[Matmul, ...],
        planned: PlannedCast,
        stored: KnownScale | None,
    ) -> "Copy":
        """A copy that was made with this stored scale, or with another one."""
        if (
            stored is None
            or not isinstance(operand, QuantizedTensor)
            # Of an unset row, and of a quantizer of the user's, the scale may be another one.
            or operand.scale is not stored.scale
        ):
            return cls(operand, readers)
        none: Any = None
        return cls(dataclasses.replace(operand, scale=none), readers, planned.row)

    def whole(self, known: Array | None) -> Operand:
        """The copy with its scale, which may be one of `QuantizerArrays.known`."""
        if self.row is None:
            return self.operand
        assert isinstance(self.operand, QuantizedTensor)
        assert known is not None
        return dataclasses.replace(self.operand, scale=known[1, self.row])


def readable(x: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
    """Arrays as the backward pass reads them, so that XLA casts them there, and not before.

    Without the barrier XLA would find that both passes cast the same arrays. It would keep the FP8
    copies from one to the other, beside the arrays.

    Args:
      x: the arrays [...].
      gradient: the gradient of the result, which the cast has to wait for.
    """
    if manual_axes():  # after a barrier of both, each would vary over the mesh axes of both
        return lax.optimization_barrier(x)
    return lax.optimization_barrier((x, gradient))[0]


def named(copies: list[Copy], tensor: Tensor) -> tuple[list[Copy], list[Copy]]:
    """The same copies with the names of residuals, twice: for this pass and the backward pass.

    A copy for fprop alone has no name. If remat runs fprop again, it casts such a copy again.
    Otherwise it would save two copies of a tensor, which are as large as the tensor in bfloat16.

    FP8 values are saved as bytes. If an array is both saved and read in the forward pass,
    `jax.checkpoint` applies a `lax.reduce_precision` to it. That operation treats E4M3FN as an
    IEEE format with infinities, so values above 240 would become NaN.
    """

    def one(leaf: Array) -> tuple[Array, Array]:
        if not leaf.dtype.name.startswith("float8"):
            leaf = named_copy(leaf, tensor)
            return leaf, leaf
        values = named_copy(lax.bitcast_convert_type(leaf, jnp.uint8), tensor)
        now, later = (lax.bitcast_convert_type(values, leaf.dtype) for _ in range(2))
        return now, later

    def both(copy: Copy) -> tuple[Copy, Copy]:
        if copy.readers == ("fprop",):
            return copy, copy
        leaves, structure = jax.tree.flatten(copy)
        now, later = zip(*map(one, leaves), strict=True)
        return jax.tree.unflatten(structure, now), jax.tree.unflatten(structure, later)

    now, later = zip(*map(both, copies), strict=True)
    return list(now), list(later)
