"""Types that every folder may use, and the errors of quantizer state."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = Any  # what `jnp.asarray` takes; jax's own ArrayLike leaves out lists
DType: TypeAlias = Any  # what `jnp.dtype` takes
PyTree: TypeAlias = Any
Axes: TypeAlias = tuple[int, ...]
DotDimensionNumbers: TypeAlias = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]
"""`((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`, as in `jax.lax.dot_general`."""
# The matmuls of a training step: y = x @ w (fprop), dx = g @ w^T (dgrad), dw = x^T @ g (wgrad).
# g is the gradient of y.
Matmul: TypeAlias = Literal["fprop", "dgrad", "wgrad"]
Tensor: TypeAlias = Literal["x", "w", "g"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
ScaleRounding: TypeAlias = Literal["rceil", "floor"]


# The errors of quantizer state.


class FP8StateError(ValueError):
    """Quantizer state is missing, belongs to another recipe, or would be lost.

    The message says what is wrong and what to write instead.
    """


class UncollectedStateError(FP8StateError):
    """A matmul with quantizer state is differentiated outside of `fp8.value_and_grad`."""
