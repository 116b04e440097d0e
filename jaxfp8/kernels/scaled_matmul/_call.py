"""The arguments of a backend of the scaled matmul, and its operands as matrices."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxfp8._geometry import Geometry, OperandAxes
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType
from jaxfp8.kernels._on_mesh import write_in_order
from jaxfp8.numerics._per_block import PerBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """One matmul: its axes and its options. Hashable.

    A backend is a function `(lhs, rhs, call, *, add_to=None)` of two `QuantizedTensor`s. `add_to`
    is an array of the result's shape, and the product is added to it. A new option is a new field
    here. A backend that cannot do it raises `NotImplementedError`.
    """

    geometry: Geometry
    out_dtype: DType
    fast_accumulation: bool = False  # may tensor cores keep about 14 bits of each partial sum?
    out_sharding: Any = None  # as in `jax.lax.dot_general`; None outside of Explicit meshes
    # For lhs and rhs, whether a kernel wrote the operand with the contracted axis last in memory,
    # although that is not its last axis. cuDNN then reads it without a transposition. XLA writes an
    # array in the order of its axes, and transposes it afterwards.
    written_transposed: tuple[bool, bool] = (False, False)

    @property
    def in_float32(self) -> "MatmulCall":
        """The same call with a result in float32, which is not rounded yet."""
        return dataclasses.replace(self, out_dtype=jnp.dtype(jnp.float32))

    @property
    def sums_rows(self) -> bool:
        """For a grouped matmul: whether it sums over the rows of a group, as wgrad does."""
        return self.geometry.lhs.contracted == (0,)


# Operands of any rank, and their scales, as the matrices that kernels multiply.
#
# Letters: B batch, M N K the axes of a matmul, S values along K that share a scale.


def as_matrix(x: Array, axes: OperandAxes, *, tile: int = 1) -> Array:
    """x [...] as [B, M, K]; an array of rhs as [B, N, K]. K is padded with zeros to whole tiles."""
    pads = [(0, -x.shape[a] % tile if a == axes.contracted[-1] else 0) for a in range(x.ndim)]
    x = jnp.pad(x, pads) if any(after for _, after in pads) else x
    return x.transpose(axes.order).reshape(axes.matrix_shape(x.shape))


def xla_transposes(sides: Iterable[OperandAxes], written: Iterable[bool]) -> tuple[bool, ...]:
    """For each operand, whether XLA has to transpose it for a kernel that reads K last."""
    return tuple(
        axes.contracted[-1] < max(axes.kept, default=-1) and not done
        for axes, done in zip(sides, written, strict=True)
    )


def transpose_last(values: Iterable[Array], transposed: Iterable[bool]) -> list[Array]:
    """Values [B, M, K]. XLA casts those that it transposes in the order of their axes."""
    pairs = zip(values, transposed, strict=True)
    return [write_in_order(x.mT).mT if was else x for x, was in pairs]


def repeat_scale(operand: QuantizedTensor, scale: Array, inner: int, values: int) -> Array:
    """A scale for each S values along the axis `inner`, and for each value along other axes.

    The operand [...] is in tiles, whose side along `inner` is a multiple of S. The result has the
    shape of the operand, with ceil(size / S) along `inner`. `scale` has the shape of the operand's
    scale.
    """
    shape, sides = list(operand.shape), list(operand.granularity.along(operand.ndim))
    shape[inner] = -(-shape[inner] // values)
    sides[inner] //= values
    if all(side == 1 for side in sides):
        return scale
    return jnp.broadcast_to(PerBlock(tuple(sides)).expand(scale, tuple(shape)), shape)
