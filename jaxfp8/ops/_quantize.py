"""`quantize`: an array into a QuantizedTensor."""

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, ArrayLike, Implementation, Rounding, ScaleRounding
from jaxfp8.kernels._dispatch import check_backend_name
from jaxfp8.kernels._prologue import AbstractPrologue, produce
from jaxfp8.kernels.cast._api import cast
from jaxfp8.kernels.quantize import _api as kernel
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale import inverse
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.ops._arguments import check_arrays, check_float
from jaxfp8.ops._once import constant
from jaxfp8.quantizers._base import check_value_format
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@overload
def quantize(
    x: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | None = None,
    *,
    power_of_two: bool = False,
    scale_format: Format | None = None,
    scale_rounding: ScaleRounding = "rceil",
    scale: ArrayLike | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
    prologue: AbstractPrologue | None = None,
) -> QuantizedTensor: ...
@overload
def quantize(
    x: ArrayLike,
    format: Format,
    granularity: tuple[AbstractGranularity, ...],
    *,
    power_of_two: bool = False,
    scale_format: Format | None = None,
    scale_rounding: ScaleRounding = "rceil",
    scale: ArrayLike | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
    prologue: AbstractPrologue | None = None,
) -> tuple[QuantizedTensor, ...]: ...
def quantize(
    x: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | tuple[AbstractGranularity, ...] | None = None,
    *,
    power_of_two: bool = False,
    scale_format: Format | None = None,
    scale_rounding: ScaleRounding = "rceil",
    scale: ArrayLike | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
    prologue: AbstractPrologue | None = None,
) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """x in FP8: `values = round(x * m)`, `scale = 1 / m`, with `m = format.max / amax(x)` unless a scale is given.

    Finite input gives finite values; an element that is inf or NaN becomes NaN. Not differentiable: see
    `fp8.fake_quantize` for a straight-through gradient.

    Args:
      x: [...] bfloat16, float16, float32 or float64; with `prologue=` the tuple of its arrays.
      format: E4M3 or E5M2.
      granularity: which values share a scale; default PerTensor(). A tuple of them gives x in each, from the same x: both
        directions in which the matmuls of a training step read it.
      power_of_two: round the multiplier down to a power of two.
      scale_format: None for float32 scales, E8M0 for those of MXFP8 (with PerBlock only).
      scale_rounding: of E8M0 scales: "rceil" rounds up, so that nothing overflows; "floor" is the OCP paper's.
      scale: quantize with this scale instead (float32, shape `granularity.scale_shape(x.shape)`).
      rounding: "nearest" (even) or "stochastic" (needs `key`).
      key: a jax PRNG key.
      implementation: of the cast; None takes the first that can.
      prologue: `fp8.SwiGLU()` of x (gate, up), or `fp8.RMSNorm()` of x (x, gain): `quantize(prologue(*x), ...)`, to the bit.
        "mosaic" makes it tile by tile, and writes FP8 alone; "triton" refuses.

    Raises:
      TypeError, ValueError: naming the argument, its value and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> q = fp8.quantize(jnp.array([0.1, -7.0]), fp8.E4M3)
      >>> q.scale, q.dequantize()
      (Array(0.015625, dtype=float32), Array([ 0.1015625, -7.       ], dtype=float32))
      >>> rows, columns = fp8.quantize(jnp.ones((64, 96)), fp8.E4M3, (fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1))),
      ...                              scale_format=fp8.E8M0)
      >>> rows.scale.shape, columns.scale.shape
      ((64, 3), (2, 96))

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3 (tiles); OCP Microscaling Formats (MX) v1.0 (E8M0 scales).
    """
    arrays = constant(check_arrays("x", x, prologue))
    source = arrays[0] if prologue is None else produce(prologue, *arrays)
    check_value_format(format)
    check_backend_name("implementation", implementation)
    granularity = PerTensor() if granularity is None else granularity
    granularities = granularity if isinstance(granularity, tuple) else (granularity,)
    if not granularities or not all(isinstance(each, AbstractGranularity) for each in granularities):
        raise TypeError(
            f"granularity={granularity!r} is no granularity, or not an instance; use fp8.PerTensor(), "
            "fp8.PerAxis(the axes to keep) or fp8.PerBlock((1, 128))."
        )
    rule = ScaleRule(power_of_two=power_of_two, scale_format=scale_format, scale_rounding=scale_rounding)
    for each in granularities:
        each.scale_shape(source.shape)  # raises where it does not fit
        if scale_format is not None and not isinstance(each, PerBlock):
            raise ValueError(
                f"scale_format={scale_format!r} needs tiles, got granularity={each!r}; use PerBlock((1, 32)) or float32 scales."
            )
    if scale is not None:
        if rule != ScaleRule() or isinstance(granularity, tuple):
            raise ValueError(
                f"power_of_two={power_of_two}, scale_format={scale_format!r}, scale_rounding={scale_rounding!r} and a tuple of "
                "granularities have no effect on a scale= that is given; pass the one or the other."
            )
        scale = _checked(scale, granularity, source.shape)
        return cast(
            source,
            inverse(scale),
            format,
            granularity,
            scale=scale,
            rounding=rounding,
            key=key,
            implementation=implementation,
        )
    copies, _ = kernel.quantize(
        source, format, granularities, rule, rounding=rounding, key=key, implementation=implementation
    )
    return copies if isinstance(granularity, tuple) else copies[0]


def _checked(given: ArrayLike, granularity: AbstractGranularity, x_shape: tuple[int, ...]) -> Array:
    """A scale that the user gives, float32."""
    parts = _concrete(given)
    # A number above float32's range becomes inf, and the check of the range below refuses inf.
    with np.errstate(over="ignore"):
        scale = jnp.asarray(given, jnp.float32)
        parts = [part.astype(np.float32) for part in parts]
    shape = granularity.scale_shape(x_shape)
    if scale.shape != shape:
        raise ValueError(
            f"scale has shape {list(scale.shape)}, but {granularity!r} of x {list(x_shape)} needs {list(shape)}."
        )
    for part in parts:
        if not np.all((part >= 2.0**-126) & (part <= 2.0**126)):
            raise ValueError(
                f"scale={part} must be positive, between 2**-126 and 2**126; leave it out for the scale that fits x."
            )
    return scale


def _concrete(given: ArrayLike) -> list[np.ndarray]:
    """The values of an array that this process can read; none for a traced array.

    NumPy reads them. Inside `jax.jit` or `jax.checkpoint` JAX traces operations even on concrete arrays.
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
    power_of_two: bool = False,
    scale_format: Format | None = None,
    scale_rounding: ScaleRounding = "rceil",
) -> Array:
    """x rounded to what FP8 can hold, in its own dtype; the gradient passes straight through.

    Args:
      x: [...] bfloat16, float16, float32 or float64.
      format: E4M3 or E5M2.
      granularity: which values share a scale; default PerTensor().
      power_of_two: round the multiplier down to a power of two.
      scale_format: None for float32 scales, E8M0 for those of MXFP8.
      scale_rounding: of E8M0 scales, "rceil" or "floor".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> jax.grad(lambda x: fp8.fake_quantize(x, fp8.E4M3).sum())(jnp.array([0.1, 7.0]))
      Array([1., 1.], dtype=float32)

    References:
      Bengio et al., straight-through estimator, arXiv:1308.3432.
    """
    x = check_float("x", x)
    if isinstance(granularity, tuple):
        raise TypeError(f"granularity={granularity!r} is a tuple, but the result is one array; pass one granularity.")
    rounded = quantize(
        jax.lax.stop_gradient(x), format, granularity,
        power_of_two=power_of_two, scale_format=scale_format, scale_rounding=scale_rounding,
    ).dequantize()  # fmt: skip
    return rounded - (jax.lax.stop_gradient(x) - x)  # in this order the value is `rounded`, to the bit, -0 included
