"""`quantize`: the cast of an array to a QuantizedTensor."""

import math
from typing import Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._quantized_tensor import Cast, Direction, QuantizedTensor
from jaxfp8._typing import Array, ArrayLike
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.kernels.quantize import _api as kernel
from jaxfp8.numerics._exact import TINY
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.numerics._scale import ScaleRule, inverse
from jaxfp8.ops._arguments import check_arrays, check_float
from jaxfp8.ops._cast_options import CastOptions, split_options
from jaxfp8.ops._once import constant
from jaxfp8.plan._kernels import Kernels, check_kernels
from jaxfp8.prologues._prologue import AbstractPrologue, produce
from jaxfp8.quantizers._base import check_value_format


@overload
def quantize(
    x: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | None = None,
    *,
    scale: ArrayLike | None = None,
    key: Array | None = None,
    kernels: Kernels | None = None,
    prologue: AbstractPrologue | None = None,
    **options: Unpack[CastOptions],
) -> QuantizedTensor: ...
@overload
def quantize(
    x: ArrayLike,
    format: Format,
    granularity: tuple[AbstractGranularity, ...],
    *,
    scale: ArrayLike | None = None,
    key: Array | None = None,
    kernels: Kernels | None = None,
    prologue: AbstractPrologue | None = None,
    **options: Unpack[CastOptions],
) -> tuple[QuantizedTensor, ...]: ...
def quantize(
    x: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | tuple[AbstractGranularity, ...] | None = None,
    *,
    scale: ArrayLike | None = None,
    key: Array | None = None,
    kernels: Kernels | None = None,
    prologue: AbstractPrologue | None = None,
    **options: Unpack[CastOptions],
) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """x in FP8: `values = round(x * m)` and `scale = 1 / m`.

    The multiplier is `m = format.max / amax(x)`, unless a scale is given.

    Finite input gives finite values. An element that is inf or NaN becomes NaN. This function has
    no gradient. `fp8.fake_quantize` has a straight-through gradient.

    Args:
      x: [...] bfloat16, float16, float32 or float64; with `prologue=` the tuple of its arrays.
      format: E4M3 or E5M2.
      granularity: which values share a scale; default PerTensor(). A tuple of granularities gives
        a copy of x for each. The matmuls of a training step read x in two directions, so they
        need two copies in tiles.
      scale: the scale to use, float32 of shape `granularity.scale_shape(x.shape)`. By default it is
        computed from the amax of x. It must be in [2^-126, 2^126]. If it is traced, no error can
        be raised, and another scale gives NaN.
      key: a jax PRNG key, for stochastic rounding.
      kernels: the kernels that cast. `fp8.Kernels("h200")` selects the kernel that is written for
        that chip. By default XLA casts, on every chip. See `fp8.Kernels`.
      prologue: `fp8.prologues.SwiGLU()` of x (gate, up), or `fp8.prologues.RMSNorm()` of x
        (x, gain). The result has the bits of `quantize(prologue(*x), ...)`. A kernel in Pallas
        computes the prologue tile by tile, and writes only FP8. The kernel in Triton cannot.
      **options: any of
        power_of_two: whether to round the multiplier down to a power of two; default False.
        scale_format: None (the default) for float32 scales. E8M0 for the scales of MXFP8, with
          PerBlock only.
        scale_rounding: how E8M0 scales are rounded. "rceil" (the default) rounds up, so that no
          value overflows. "floor" rounds as the OCP specification does.
        rounding: "nearest" (ties to even, the default) or "stochastic" (needs `key`).

    Returns:
      A `QuantizedTensor` of the shape of x. For a tuple of granularities, a tuple of them.

    Raises:
      TypeError, ValueError: the message names the argument, its value and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> q = fp8.quantize(jnp.array([0.1, -7.0]), fp8.E4M3)
      >>> q.scale, q.dequantize()
      (Array(0.015625, dtype=float32), Array([ 0.1015625, -7.       ], dtype=float32))
      >>> both = fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1))
      >>> rows, columns = fp8.quantize(jnp.ones((64, 96)), fp8.E4M3, both, scale_format=fp8.E8M0)
      >>> rows.scale.shape, columns.scale.shape
      ((64, 3), (2, 96))

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3 (tiles); OCP Microscaling Formats (MX) v1.0 (E8M0
      scales).
    """
    rule, rounding = split_options("fp8.quantize", options)
    arrays = constant(check_arrays("x", x, prologue))
    source = arrays[0] if prologue is None else produce(prologue, *arrays)
    check_value_format(format)
    granularity = PerTensor() if granularity is None else granularity
    granularities = granularity if isinstance(granularity, tuple) else (granularity,)
    _check_granularities(granularity, granularities, rule, source.shape)
    cast = Cast(
        format=format,
        directions=tuple(map(Direction, granularities)),
        rule=rule,
        rounding=rounding,
        backends=check_kernels(kernels).for_cast(granularities, math.prod(source.shape)),
    )
    if scale is None:
        copies, _ = kernel.quantize(source, cast, key=key)
        return copies if isinstance(granularity, tuple) else copies[0]
    if rule != ScaleRule() or isinstance(granularity, tuple):
        raise ValueError(
            f"power_of_two={rule.power_of_two}, scale_format={rule.scale_format!r}, "
            f"scale_rounding={rule.scale_rounding!r} and a tuple of granularities have no effect "
            "on a scale= that is given. Pass the one or the other."
        )
    known = _checked(scale, granularity, source.shape)
    ((copy,), _) = cast_copies(source, cast, (KnownScale(inverse(known), known),), key=key)
    return copy


def _check_granularities(
    given: object,
    granularities: tuple[AbstractGranularity, ...],
    rule: ScaleRule,
    shape: tuple[int, ...],
) -> None:
    """Raise TypeError or ValueError unless an array of this shape can be quantized in each."""
    if not granularities or not all(
        isinstance(each, AbstractGranularity) for each in granularities
    ):
        raise TypeError(
            f"granularity={given!r} is no granularity, or not an instance. Use "
            "fp8.PerTensor(), fp8.PerAxis(the axes to keep) or fp8.PerBlock((1, 128))."
        )
    for each in granularities:
        each.scale_shape(shape)  # raises an error if the granularity does not fit the shape
        if rule.scale_format is not None and not each.in_tiles:
            raise ValueError(
                f"scale_format={rule.scale_format!r} needs tiles, got granularity={each!r}. Use "
                "PerBlock((1, 32)), or leave scale_format= out for float32 scales."
            )


def _checked(given: ArrayLike, granularity: AbstractGranularity, x_shape: tuple[int, ...]) -> Array:
    """A scale that the user passed, checked and in float32."""
    parts = _concrete(given)
    # A number above float32's range becomes inf, and the check of the range below refuses inf.
    with np.errstate(over="ignore"):
        scale = jnp.asarray(given, jnp.float32)
        parts = [part.astype(np.float32) for part in parts]
    shape = granularity.scale_shape(x_shape)
    if scale.shape != shape:
        raise ValueError(
            f"scale has shape {list(scale.shape)}, but {granularity!r} of x {list(x_shape)} needs "
            f"{list(shape)}. Reshape it, or leave it out."
        )
    for part in parts:
        # In this range neither the scale nor its inverse, the multiplier, is subnormal or inf.
        if not np.all((part >= 2.0**-126) & (part <= 2.0**126)):
            raise ValueError(
                f"scale={part} must be positive, between 2**-126 and 2**126; leave it out for the "
                "scale that fits x."
            )
    return scale if parts else jnp.where((scale >= TINY) & (scale <= 1 / TINY), scale, jnp.nan)


def _concrete(given: ArrayLike) -> list[np.ndarray]:
    """The values of an array that this process can read. The list is empty for a traced array.

    NumPy reads the values. Inside `jax.jit` or `jax.checkpoint`, JAX traces its own operations even
    on concrete arrays.
    """
    # An object that holds an array, such as an nnx Variable.
    if not isinstance(given, jax.Array) and hasattr(given, "__jax_array__"):
        given = given.__jax_array__()
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given)):
        return []
    if isinstance(given, jax.Array) and not given.is_fully_addressable:
        # Each process checks the shards that it holds.
        return [np.asarray(shard.data) for shard in given.addressable_shards]
    return [np.asarray(given)]


def fake_quantize(
    x: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | None = None,
    *,
    key: Array | None = None,
    **options: Unpack[CastOptions],
) -> Array:
    """x rounded to values that FP8 can hold, in the dtype of x, with a straight-through gradient.

    Args:
      x: [...] bfloat16, float16, float32 or float64.
      format: E4M3 or E5M2.
      granularity: which values share a scale; default PerTensor().
      key: a jax PRNG key, for stochastic rounding.
      **options: those of `fp8.quantize`: power_of_two, scale_format, scale_rounding, rounding.

    Returns:
      [...], `dequantize(quantize(x))`. Its gradient with respect to x is 1.

    Raises:
      TypeError, ValueError: the message names the argument, its value and the cure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> jax.grad(lambda x: fp8.fake_quantize(x, fp8.E4M3).sum())(jnp.array([0.1, 7.0]))
      Array([1., 1.], dtype=float32)

    References:
      Bengio et al., straight-through estimator, arXiv:1308.3432.
    """
    split_options("fp8.fake_quantize", options)
    x = check_float("x", x)
    if isinstance(granularity, tuple):
        raise TypeError(
            f"granularity={granularity!r} is a tuple, but the result is one array. Pass one "
            "granularity."
        )
    constant_x = jax.lax.stop_gradient(x)
    rounded = quantize(constant_x, format, granularity, key=key, **options).dequantize()
    # For finite x, `stop_gradient(x) - x` is +0, and `rounded - (+0)` keeps every bit, also that of
    # -0. In `rounded + (x - stop_gradient(x))` a value -0 would become +0.
    return rounded - (jax.lax.stop_gradient(x) - x)
