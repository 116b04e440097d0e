"""Operands of any rank as the matrices that kernels multiply.

Letters: B batch, M N K matmul.
"""

import math
from typing import TypeAlias

import jax.numpy as jnp

from jaxfp8._typing import Array, Axes, DotDimensionNumbers

Shape: TypeAlias = tuple[Axes, Axes, Axes]
"""Sizes of the batch, kept and contracted axes."""


def axes_of(ndim: int, dimension_numbers: DotDimensionNumbers, side: int) -> tuple[Axes, Axes, Axes]:
    """The batch, kept and contracted axes of lhs (side 0) or rhs (side 1), an array of `ndim` axes."""
    contracted, batch = (tuple(pair[side]) for pair in dimension_numbers)
    return batch, tuple(a for a in range(ndim) if a not in batch + contracted), contracted


def matrix_shape(shape: Axes, dimension_numbers: DotDimensionNumbers, side: int) -> Shape:
    """The same of an array of this shape, their sizes."""
    batch, kept, contracted = (
        tuple(shape[axis] for axis in axes) for axes in axes_of(len(shape), dimension_numbers, side)
    )
    return batch, kept, contracted


def as_matrix(x: Array, dimension_numbers: DotDimensionNumbers, side: int, *, tile: int = 1) -> Array:
    """x [...] as [B, M, K] (of rhs [B, N, K]), the innermost contracted axis padded with zeros to whole tiles."""
    batch, kept, contracted = axes_of(x.ndim, dimension_numbers, side)
    pads = [(0, -x.shape[a] % tile if a == contracted[-1] else 0) for a in range(x.ndim)]
    x = jnp.pad(x, pads) if any(after for _, after in pads) else x
    sizes = (math.prod(x.shape[a] for a in axes) for axes in (batch, kept, contracted))
    return x.transpose(batch + kept + contracted).reshape(*sizes)
