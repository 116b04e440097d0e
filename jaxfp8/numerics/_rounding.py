"""The saturating cast to FP8: nearest-even and stochastic rounding.

On CPUs and TPUs XLA converts to FP8. On GPUs the payload is built as a byte, from the bits of a
float32, because XLA may fold a conversion away there. The bits are the same.

The cast compiles to 0.45 times the instructions of a conversion on an A100, and to 1.2 times on an
H200 (compiled, not run: benchmarks/programs/cast_cost.py).

References:
  XLA, xla/service/simplify_fp_conversions.cc (the pass that folds conversions).
"""

import functools
from collections.abc import Callable
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._check import check_one_of
from jaxfp8._typing import Array, PyTree, Rounding
from jaxfp8.numerics._exact import TINY, constant_like, is_finite, power_of_two, to_float32, widen
from jaxfp8.numerics._formats import Format

_FLOAT32_MANTISSA = 23  # stored bits
_EXPONENT = 0x7F800000  # the exponent field of a float32


# jit traces and lowers this once for all arrays of one shape. A step of 12 blocks has 100 casts.
@functools.partial(jax.jit, static_argnames=("format", "rounding"))
def saturating_cast(
    x: Array,
    multiplier: Array,
    format: Format,
    *,
    rounding: Rounding = "nearest",
    key: Array | None = None,
) -> Array:
    """`round(clip(x * multiplier, -max, max))` in `format`.

    Finite values stay finite. An inf or NaN in x or in its multiplier becomes the NaN of the
    format, so that guards against overflow see it. The clip is needed because JAX's own casts do
    not saturate, and XLA's do so in some fusions only. The derivative is zero. `fp8.fake_quantize`
    has a straight-through derivative.

    Args:
      x: [...] floating point.
      multiplier: float32, broadcastable to x.
      format: E4M3 or E5M2.
      rounding: "nearest" (ties to even) or "stochastic". Stochastic rounding needs `key`. It rounds
        up with the probability of the dropped fraction.
      key: a jax PRNG key, for stochastic rounding only.

    Returns:
      [...] in `format.dtype`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x = jnp.array([0.3, 1e9, -1e9])
      >>> saturating_cast(x, jnp.float32(1.0), fp8.E4M3).astype(jnp.float32)
      Array([ 3.125e-01,  4.480e+02, -4.480e+02], dtype=float32)
    """
    check_one_of("rounding", rounding, get_args(Rounding))
    if (rounding == "stochastic") != (key is not None):
        raise ValueError(
            f"rounding={rounding!r} was called with key={'given' if key is not None else None}. "
            "'stochastic' needs a key=, 'nearest' takes none."
        )
    if key is not None:
        return _built(x, multiplier, format=format, key=key)
    return lax.platform_dependent(
        x, multiplier,
        cpu=functools.partial(_converted, format=format),
        tpu=functools.partial(_converted_on_tpu, format=format),
        default=functools.partial(_built, format=format),
    )  # fmt: skip


# XLA for CPUs and TPUs does not fold its conversion away. The conversion has less than half of the
# operations of `_built`, so programs compile in less time.


def _converted(x: Array, multiplier: Array, *, format: Format) -> Array:
    """The cast by XLA's conversion on a CPU."""
    x = widen(x)
    magnitude = jnp.abs(x)
    zero = magnitude - magnitude  # NaN if x is not finite
    # A magnitude below 2^-126 counts as zero. The product keeps the sign of x.
    scaled = lax.select(magnitude < TINY, x * zero, x) * multiplier
    saturated = lax.clamp(np.float32(-format.max), scaled, np.float32(format.max))
    # 0, or NaN if x or the multiplier is not finite. The sign of such a NaN depends on the CPU, and
    # the conversion would keep it.
    guard = jnp.abs(zero * multiplier)
    return lax.select(guard == guard, saturated, guard).astype(format.dtype)


def _converted_on_tpu(x: Array, multiplier: Array, *, format: Format) -> Array:
    """The cast by XLA's conversion on a TPU, in the fewest operations on its vector unit."""
    x = widen(x)
    magnitude = jnp.abs(x)
    # A magnitude below 2^-126 counts as zero. The product keeps the sign of x.
    each = constant_like(x, 1.0) * multiplier
    scaled = x * lax.select(magnitude < TINY, constant_like(x, 0.0), each)
    saturated = lax.clamp(np.float32(-format.max), scaled, np.float32(format.max))
    # inf, or NaN if the multiplier is not finite: no magnitude is less than NaN. (A select would be
    # an array of its own for multipliers of rows, and XLA then makes copies earlier than needed.)
    bound = multiplier * np.float32(0) + np.float32(np.inf)
    nan = constant_like(x, np.nan)
    return lax.select(magnitude < bound, saturated, nan).astype(format.dtype)


def _built(x: Array, multiplier: Array, *, format: Format, key: Array | None = None) -> Array:
    """The cast by integer arithmetic on the bits of a float32."""
    # A plain conversion to FP8 could lose the rounding. On GPUs, XLA by default folds float32 ->
    # FP8 -> bfloat16 into float32 -> bfloat16 (`xla_allow_excess_precision=true`). A byte that is
    # bitcast cannot be folded, under any option.
    x = widen(x)
    magnitude = jnp.abs(x)
    zero = magnitude - magnitude  # NaN if x is not finite
    # A magnitude below 2^-126 counts as zero. The second product is 0, or NaN if x or the
    # multiplier is not finite.
    scaled = jnp.where(magnitude < TINY, zero, magnitude) * multiplier + zero * multiplier
    saturated = jnp.minimum(scaled, format.max)
    if key is not None:
        saturated = _stochastic(saturated, format, key)
    sign = (lax.bitcast_convert_type(x, jnp.int32) >> 24) & 0x80
    # `_nearest` would give a finite byte for NaN, so the byte of NaN is selected here.
    byte = _nearest(saturated, format) | sign
    byte = lax.select(scaled == scaled, byte, constant_like(byte, format.nan_byte))
    return lax.bitcast_convert_type(byte.astype(jnp.uint8), format.dtype)


def kernel_cast(x: Array, multiplier: Array, format: Format) -> Array:
    """`saturating_cast` to nearest inside a Pallas kernel."""
    # XLA does not look into kernels, so it cannot fold a conversion there. Hopper and Blackwell
    # convert two values in one instruction (PTX ISA, `cvt.rn.satfinite.e4m3x2.f32`).
    x = to_float32(x)
    saturated = jnp.clip(x * multiplier, -format.max, format.max)
    return jnp.where(is_finite(x), saturated, jnp.nan).astype(format.dtype)


def _nearest(v: Array, format: Format) -> Array:
    """The byte, in an int32 [...], of the format's value nearest to v in [0, `format.max`]."""
    fraction = _FLOAT32_MANTISSA - format.mantissa_bits  # mantissa bits that the format lacks
    # Subnormals of the format have the spacing of its smallest normal values.
    smallest = (format.min_exponent + 127) << _FLOAT32_MANTISSA
    exponent = jnp.maximum(lax.bitcast_convert_type(v, jnp.int32) & _EXPONENT, smallest)
    # `base` is a power of two. Above it, float32 values have the spacing that the format has at v.
    # So the sum `base + v` rounds v to a whole number of spacings, ties to even. Its last bits are
    # that number. `base` is never subtracted, so no compiler can cancel the sum.
    # The byte is that number plus `(exponent - smallest) >> fraction`. The last byte of
    # `-smallest >> fraction` is even, so it can be in the last bits of `base` from the start.
    minus_smallest = -(smallest >> fraction) % 256
    base = exponent + (fraction << _FLOAT32_MANTISSA) + minus_smallest
    spacings = lax.bitcast_convert_type(lax.bitcast_convert_type(base, jnp.float32) + v, jnp.int32)
    # Each binade above the smallest adds 1 to the exponent field. A normal value also has at least
    # 2^mantissa_bits spacings: that bit adds 1 more, so its field is 1 or more. A subnormal has
    # fewer spacings and the field 0. A carry into the next binade is right by itself.
    return spacings + (exponent >> fraction)


def _stochastic(v: Array, format: Format, key: Array) -> Array:
    """Rounds v, in [0, `format.max`], to a value of the format, as float32."""
    biased = lax.bitcast_convert_type(v, jnp.uint32) >> 23
    exponent = jnp.maximum(biased.astype(jnp.int32) - 127, format.min_exponent)
    # The spacing of the format at v is a power of two. So the product with its inverse, the floor
    # and the fraction are exact. `_nearest` then finds a value of the format, and changes nothing.
    spacing = power_of_two(exponent - format.mantissa_bits)
    steps = v * power_of_two(format.mantissa_bits - exponent)
    whole = jnp.floor(steps)
    # The probability of rounding up is the dropped fraction, down to a multiple of 2^-32.
    threshold = ((steps - whole) * 2.0**32).astype(jnp.uint32)
    up = jax.random.bits(key, v.shape, jnp.uint32) < threshold
    return (whole + up.astype(jnp.float32)) * spacing


# Identities that raise an error when they are differentiated.
#
# The derivative of a cast to FP8 is zero almost everywhere. JAX would return these zeros without a
# message.

T = TypeVar("T")


def undifferentiable(error: Callable[[PyTree], Exception]) -> Callable[[T], T]:
    """An identity of trees that raises `error(tree)` when it is differentiated."""

    @jax.custom_jvp
    def identity(tree: T) -> T:
        return tree

    @identity.defjvp
    def refuse(primals: PyTree, tangents: PyTree) -> PyTree:
        del tangents
        raise error(primals)

    return identity
