"""Statistics of one cast: how much of a tensor the format and its scales lose."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Matmul, Tensor
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._exact import TINY, factors_of, times, widened
from jaxfp8.numerics._formats import Format

_EXACT = 2**31 - 1  # an int32 counts so far


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "amax", "scale_min", "scale_max", "saturated", "underflowed", "nonzero", "nonfinite",
    ],
    meta_fields=["tensor", "matmuls", "values"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class CastStats:
    """Statistics of one FP8 copy of a tensor x with the scale s, per value: `x ~ stored * s`.

    Attributes:
      amax: f32[], `max |x|`; inf if a value is not finite.
      scale_min: f32[], the smallest s of all scale cells with a nonzero value; inf if none has one.
      scale_max: f32[], the largest such s; -inf if no cell has a nonzero value. An s that is NaN
        does not count.
      saturated: i32[], the number of finite values with `|x| > limit(format) * s`, where
        `limit(format)` is the largest value plus half of the spacing there.
      underflowed: i32[], the number of nonzero values whose stored value is 0.
      nonzero: i32[], the number of finite values with `|x| >= 2^-126`. Smaller ones count as 0.
      nonfinite: i32[], the number of values that are inf or NaN.
      tensor: "x", "w" or "g" (static).
      matmuls: the matmuls that read the copy (static).
      values: the number of values, on this device inside `jax.shard_map` (static).

    A count is f32[] if there are 2^31 values or more.
    """

    amax: Array
    scale_min: Array
    scale_max: Array
    saturated: Array
    underflowed: Array
    nonzero: Array
    nonfinite: Array
    tensor: Tensor
    matmuls: tuple[Matmul, ...]
    values: int


def limit(format: Format) -> float:
    """The magnitude above which the clip of a cast loses more than rounding does.

    It is the middle between the largest value and the next one, which the format lacks.

    Example:
      >>> import jaxfp8 as fp8
      >>> limit(fp8.E4M3), limit(fp8.E5M2)
      (464.0, 61440.0)
    """
    return format.max + 2.0 ** (format.max_exponent - format.mantissa_bits - 1)


def cast_stats(
    x: Array, copy: QuantizedTensor, tensor: Tensor, matmuls: tuple[Matmul, ...]
) -> CastStats:
    """The statistics of a copy of x.

    Args:
      x: [...] floating point, before the cast.
      copy: [...], its copy.
      tensor: which tensor x is.
      matmuls: the matmuls that read the copy.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x = jnp.array([1e6, 1.0, 1e-9, 0.0])
      >>> stats = cast_stats(x, fp8.quantize(x, fp8.E4M3, scale=1.0), "x", ())
      >>> int(stats.saturated), int(stats.underflowed), int(stats.nonzero)
      (1, 1, 3)
    """
    size = widened(magnitude(x))
    finite = size < jnp.inf
    nonzero = finite & (size >= TINY)
    factors = factors_of(copy.scale)
    largest = times(jnp.full_like(factors[0], limit(copy.format)), factors)
    saturated = finite & (size > copy.granularity.expand(largest, x.shape))
    without_sign = lax.bitcast_convert_type(copy.values, jnp.uint8) & 0x7F
    # Scales of cells without a nonzero value mean nothing. For float32 they are 1.
    scale = times(jnp.ones_like(factors[0]), factors)
    used = copy.granularity.maximum(jnp.where(nonzero, size, 0.0)) > 0
    used &= scale == scale  # an E8M0 scale of a cell with inf or NaN is NaN
    return CastStats(
        amax=jnp.max(size, initial=0.0),
        scale_min=jnp.min(jnp.where(used, scale, jnp.inf), initial=jnp.inf),
        scale_max=jnp.max(jnp.where(used, scale, -jnp.inf), initial=-jnp.inf),
        saturated=_count(saturated),
        underflowed=_count(nonzero & (without_sign == 0)),
        nonzero=_count(nonzero),
        nonfinite=_count(~finite),
        tensor=tensor,
        matmuls=matmuls,
        values=math.prod(x.shape),
    )


def joined_stats(each: CastStats, values: int) -> CastStats:
    """The statistics of a stack, from those of its arrays, each with an axis in front.

    Args:
      each: statistics [n] of n arrays.
      values: how many values the stack has, without padding.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x = jnp.array([[1.0, 0.0], [2.0, 3.0]])
      >>> copies = jax.vmap(lambda x: fp8.quantize(x, fp8.E4M3))(x)
      >>> each = jax.vmap(lambda x, copy: cast_stats(x, copy, "x", ()))(x, copies)
      >>> int(joined_stats(each, 4).nonzero)
      3
    """
    joined: dict[str, Any] = {
        "amax": jnp.max(each.amax, initial=0.0),
        "scale_min": jnp.min(each.scale_min, initial=jnp.inf),
        "scale_max": jnp.max(each.scale_max, initial=-jnp.inf),
    }
    counts = ("saturated", "underflowed", "nonzero", "nonfinite")
    joined |= {name: jnp.sum(getattr(each, name)) for name in counts}
    return dataclasses.replace(each, values=values, **joined)


def _count(mask: Array) -> Array:
    dtype = jnp.int32 if math.prod(mask.shape) <= _EXACT else jnp.float32
    return jnp.sum(mask, dtype=dtype)
