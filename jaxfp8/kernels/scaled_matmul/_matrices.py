"""Operands of any rank, and their scales, as the matrices that kernels multiply.

Letters: B batch, M N K the axes of a matmul, S values along K that share a scale.
"""

from collections.abc import Iterable

import jax.numpy as jnp

from jaxfp8._geometry import OperandAxes
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._in_order import in_order
from jaxfp8.numerics._per_block import PerBlock


def as_matrix(x: Array, axes: OperandAxes, *, tile: int = 1) -> Array:
    """x [...] as [B, M, K]; an array of rhs as [B, N, K].

    The innermost contracted axis is padded with zeros to whole tiles.
    """
    pads = [(0, -x.shape[a] % tile if a == axes.contracted[-1] else 0) for a in range(x.ndim)]
    x = jnp.pad(x, pads) if any(after for _, after in pads) else x
    return x.transpose(axes.order).reshape(axes.matrix_shape(x.shape))


def left_to_xla(sides: Iterable[OperandAxes], written: Iterable[bool]) -> tuple[bool, ...]:
    """For each operand, whether XLA has to transpose it for a kernel that reads K last.

    Args:
      sides: the axes of each operand.
      written: see `MatmulCall.written_transposed`.
    """
    return tuple(
        axes.contracted[-1] < max(axes.kept, default=-1) and not done
        for axes, done in zip(sides, written, strict=True)
    )


def transposed_last(values: Iterable[Array], transposed: Iterable[bool]) -> list[Array]:
    """Values [B, M, K]. XLA casts those that it transposes in the order of their axes."""
    pairs = zip(values, transposed, strict=True)
    return [in_order(x.mT).mT if was else x for x, was in pairs]


def repeated_scale(operand: QuantizedTensor, scale: Array, inner: int, values: int) -> Array:
    """A scale for each S values along the axis `inner`, and for each value along other axes.

    Args:
      operand: [...] in tiles. Their side along `inner` is a multiple of S.
      scale: the operand's scale, or another array of that shape.
      inner: an axis of the operand.
      values: S.

    Returns:
      The shape of the operand, with ceil(size / S) along `inner`.
    """
    shape, sides = list(operand.shape), list(operand.granularity.along(operand.ndim))
    shape[inner] = -(-shape[inner] // values)
    sides[inner] //= values
    if all(side == 1 for side in sides):
        return scale
    return jnp.broadcast_to(PerBlock(tuple(sides)).expand(scale, tuple(shape)), shape)
