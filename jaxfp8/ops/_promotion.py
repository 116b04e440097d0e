"""flax's promotion of dtypes, for layers whose kernel may be a weight in FP8."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight


@dataclasses.dataclass(frozen=True)
class KeepsFP8:
    """A `promote_dtype` that promotes arrays as another one does, and leaves FP8 weights alone.

    Attributes:
      promote: flax's `promote_dtype`, or the user's.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax.linen.dtypes import promote_dtype
      >>> [x.dtype.name for x in KeepsFP8(promote_dtype)(jnp.ones(2), jnp.ones(2, "bfloat16"))]
      ['float32', 'float32']
    """

    promote: Callable[..., Any]

    @classmethod
    def of(cls, promote: Callable[..., Any]) -> "KeepsFP8":
        return promote if isinstance(promote, cls) else cls(promote)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # linen passes arrays, nnx passes one tuple of arrays.
        in_tuple = len(arguments) == 1 and isinstance(arguments[0], tuple)
        arrays = arguments[0] if in_tuple else arguments
        if not any(map(is_weight, arrays)):
            return self.promote(*arguments, **options)
        like = tuple(jnp.zeros((), each.dtype) if is_weight(each) else each for each in arrays)
        promoted = self.promote(like, **options) if in_tuple else self.promote(*like, **options)
        return tuple(
            _checked(each, new.dtype) if is_weight(each) else new
            for each, new in zip(arrays, promoted, strict=True)
        )


def _checked(weight: QuantizedWeight, dtype: Any) -> QuantizedWeight:
    if weight.dtype != dtype:
        raise TypeError(
            f"a layer computes in {jnp.dtype(dtype).name}, but its kernel is {weight}. The layer "
            f"would round a kernel to {jnp.dtype(dtype).name} before the cast to FP8. Do the same: "
            f"fp8.quantize_params(..., dtype=jnp.{jnp.dtype(dtype).name})."
        )
    return weight
