"""MatmulCall: the arguments of a backend of the scaled matmul, besides its operands."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxfp8._geometry import Geometry
from jaxfp8._typing import DType


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """One matmul: its axes and its options. Hashable.

    A backend is a function `(lhs, rhs, call, *, add_to=None)`. `lhs` and `rhs` are
    `QuantizedTensor`s. `add_to` is an array of the result's shape, and the product is added to it.
    A new option is a new field here. A backend that cannot do it raises `NotImplementedError`.

    Attributes:
      geometry: the axes.
      out_dtype: the dtype of the result.
      fast_accumulation: whether tensor cores may keep about 14 bits of each partial sum.
      out_sharding: as in `jax.lax.dot_general`; None outside of Explicit meshes.
      written_transposed: for lhs and rhs, whether a kernel wrote the operand with the contracted
        axis last in memory, although that is not its last axis. cuDNN then reads it without a
        transposition. XLA writes an array in the order of its axes, and transposes it afterwards.

    Example:
      >>> import jax.numpy as jnp
      >>> geometry = Geometry.of((((1,), (0,)), ((), ())), 2, 2)
      >>> call = MatmulCall(geometry=geometry, out_dtype=jnp.dtype("bfloat16"))
      >>> call.in_float32.out_dtype
      dtype('float32')
    """

    geometry: Geometry
    out_dtype: DType
    fast_accumulation: bool = False
    out_sharding: Any = None
    written_transposed: tuple[bool, bool] = (False, False)

    @property
    def in_float32(self) -> "MatmulCall":
        """The same call with a result in float32, which is not rounded yet."""
        return dataclasses.replace(self, out_dtype=jnp.dtype(jnp.float32))

    @property
    def sums_rows(self) -> bool:
        """For a grouped matmul: whether it sums over the rows of a group, as wgrad does."""
        return self.geometry.lhs.contracted == (0,)

    @property
    def in_auto_mesh(self) -> "MatmulCall":
        """The same call inside an Auto mesh, where no type says how the result is split."""
        return dataclasses.replace(self, out_sharding=None)
