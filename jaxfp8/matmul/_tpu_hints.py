"""What XLA for TPUs is told about operands: how they lie in memory, and which is made first.

On other platforms these functions change nothing.
"""

import dataclasses

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxfp8._geometry import OperandAxes
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.quantizers._base import Operand
from jaxfp8.sharding._amax import manual_axes


def row_major(array: Array) -> Array:
    """The same array, row-major in memory on a TPU."""
    if array.dtype.itemsize > 4:  # XLA for TPUs rewrites 64-bit types, and cannot in a constraint
        return array

    def constrained(array: Array) -> Array:
        return with_layout_constraint(array, Layout(tuple(range(array.ndim))))

    return lax.platform_dependent(array, tpu=constrained, default=lambda array: array)


def row_major_copy(operand: Operand, axes: OperandAxes) -> Operand:
    """The same operand. If it is an FP8 copy, its values are row-major in memory on a TPU."""
    # XLA for TPUs may choose a transposed copy of an activation or a gradient. In a scan it keeps
    # what it saves row-major, so it would transpose each copy in both passes. With several axes of
    # features, such as heads, its own layout is faster: it tiles tokens and features.
    if not isinstance(operand, QuantizedTensor) or len(axes.contracted) != 1:
        return operand
    return dataclasses.replace(operand, values=row_major(operand.values))


def weight_first(w: Operand, wgrad: Operand) -> tuple[Operand, Operand]:
    """The copy of w for dgrad, and that of g for wgrad. On a TPU the first is made before wgrad."""
    # XLA for TPUs fuses an optimizer's step into the matmul of wgrad, in place. If a weight were
    # cast after that, for instance in a remat of its block, XLA would copy it before the step.
    if not (isinstance(w, QuantizedTensor) and isinstance(wgrad, QuantizedTensor)):
        return w, wgrad
    if manual_axes():  # after a barrier, each would vary over the mesh axes of both
        return w, wgrad
    first, then = lax.platform_dependent(
        w.values, wgrad.values,
        tpu=lambda *both: lax.optimization_barrier(both), default=lambda *both: both,
    )  # fmt: skip
    return dataclasses.replace(w, values=first), dataclasses.replace(wgrad, values=then)
