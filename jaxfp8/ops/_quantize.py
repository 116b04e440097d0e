"""`quantize`, `fake_quantize` and `scaled_matmul`."""

import math
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._call import check_options
from jaxfp8._check import check_bool
from jaxfp8._geometry import Geometry, OperandAxes, check_dimension_numbers
from jaxfp8._quantized_tensor import Cast, Direction, QuantizedTensor, validate
from jaxfp8._typing import (
    Array,
    ArrayLike,
    Axes,
    DotDimensionNumbers,
    DType,
    PyTree,
    Rounding,
    ScaleRounding,
)
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.kernels.scaled_matmul._api import multiply
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.matmul._options import check_arrays, check_float
from jaxfp8.numerics._exact import TINY
from jaxfp8.numerics._formats import (
    E5M2,
    Format,
    check_float_dtype,
    check_out_dtype,
    check_value_format,
    product_dtype,
)
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.numerics._rounding import undifferentiable
from jaxfp8.numerics._scale import ScaleRule, inverse
from jaxfp8.plan._kernels import Kernels, check_kernels
from jaxfp8.prologues._prologue import AbstractPrologue, produce

# `scaled_matmul`: two QuantizedTensors in, high precision out.


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers | None = None,
    preferred_element_type: DType | None = None,
    add_to: Array | None = None,
    kernels: Kernels | None = None,
    fast_accumulation: bool = False,
    out_sharding: jax.sharding.NamedSharding | jax.P | None = None,
) -> Array:
    """`dequantize(lhs) @ dequantize(rhs)`, accumulated in float32.

    With `add_to`, `add_to + dequantize(lhs) @ dequantize(rhs)`.

    Args:
      lhs: [..., M, K] or as `dimension_numbers` say. It has one scale, a scale for each index of
        the axes that are not contracted, or tiles along a contracted axis. At most one operand
        has square tiles.
      rhs: [K, N] or as `dimension_numbers` say.
      dimension_numbers: as in `jax.lax.dot_general`. By default the last axis of lhs is contracted
        with the first axis of rhs.
      preferred_element_type: dtype of the result. The default is the dtype of `add_to`. Without
        `add_to` it is that of `jax.lax.dot_general`, see `fp8.dot_general`.
      add_to: [..., M, N], any float dtype. It is added in float32, before the result is rounded.
        One use is to sum the gradients of microbatches. In cuBLAS it is C with beta = 1. If it has
        the dtype of the result, Hopper's kernel overwrites it. Donate it then, or XLA copies it
        first.
      kernels: the kernels that multiply. `fp8.Kernels("h200")` selects the kernel that is written
        for that chip. By default XLA multiplies, on every chip. See `fp8.Kernels`.
      fast_accumulation: let Hopper's tensor cores keep about 14 bits of each partial sum
        (cuBLASLt's fast mode).
      out_sharding: as in `jax.lax.dot_general`, for Explicit meshes.

    Returns:
      [..., M, N], batch axes first.

    Raises:
      TypeError: if an operand is not a QuantizedTensor. Also if the dtype of the result or of
        `add_to` is not a float.
      ValueError: if the shapes of the operands or of `add_to` do not fit. Also in three other
        cases. Both operands are E5M2, which no hardware multiplies. A scale varies along a
        contracted axis, and is not the scale of a tile. The tiles of the two operands differ, or
        are square on both sides.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> q = fp8.quantize(7 * jnp.eye(2), fp8.E4M3)
      >>> fp8.scaled_matmul(q, q)
      Array([[49.,  0.],
             [ 0., 49.]], dtype=float32)
      >>> fp8.scaled_matmul(q, q, add_to=jnp.ones((2, 2), jnp.bfloat16))
      Array([[50, 1],
             [1, 50]], dtype=bfloat16)
    """
    check_bool("fast_accumulation", fast_accumulation)
    given = check_kernels(kernels)
    validate(lhs, "lhs")
    validate(rhs, "rhs")
    if dimension_numbers is None:
        dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    if lhs.format == rhs.format == E5M2:
        raise ValueError(
            "lhs and rhs are both E5M2, which no hardware multiplies; quantize one of them to E4M3."
        )
    dimension_numbers = check_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    geometry = Geometry.of(dimension_numbers, lhs.ndim, rhs.ndim)
    # A scale is applied to a sum of products. All products of one sum must have the same scales.
    _check_tiles(lhs, rhs, geometry)
    _check_rows("lhs", lhs, geometry.lhs)
    _check_rows("rhs", rhs, geometry.rhs)
    if add_to is not None:
        _check_add_to(add_to, geometry.out_shape(lhs.shape, rhs.shape))
    if preferred_element_type is None:
        product = product_dtype(lhs.dtype, rhs.dtype)
        preferred_element_type = product if add_to is None else add_to.dtype
    call = MatmulCall(
        geometry=geometry,
        out_dtype=check_out_dtype(preferred_element_type),
        fast_accumulation=fast_accumulation,
        out_sharding=out_sharding,
    )
    names = given.for_matmul(lhs, rhs, geometry)
    attempts = given.attempts(names, lhs, rhs, call, add_to=add_to)
    return multiply(lhs, rhs, call, attempts, add_to=add_to)


def _check_add_to(add_to: Array, shape: Axes) -> None:
    """Raise ValueError for another shape than the product's, and TypeError for another dtype."""
    if not isinstance(add_to, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(
            f"add_to is of type {type(add_to).__name__}; pass an array of shape {list(shape)}."
        )
    if add_to.shape != shape:
        raise ValueError(
            f"add_to has shape {list(add_to.shape)}, but the product that is added to it has "
            f"{list(shape)}: give it that shape."
        )
    check_float_dtype("add_to", add_to)


def _check_rows(name: str, operand: QuantizedTensor, axes: OperandAxes) -> None:
    """Raise ValueError if per-row scales vary along a contracted axis."""
    if operand.granularity.in_rows and any(operand.scale.shape[a] != 1 for a in axes.contracted):
        raise ValueError(
            f"{name} is scaled by {operand.granularity!r}, which varies along its contracted axes "
            f"{axes.contracted}. Such scales cannot leave the sum. Quantize it along the axes "
            "that are kept."
        )


def _check_tiles(lhs: QuantizedTensor, rhs: QuantizedTensor, geometry: Geometry) -> None:
    """Raise ValueError unless tiles run along a contracted axis, with one length on both sides."""
    tiles = []
    for name, operand, axes in (("lhs", lhs, geometry.lhs), ("rhs", rhs, geometry.rhs)):
        if not operand.granularity.in_tiles:
            continue
        tile = operand.granularity.along(operand.ndim)
        tiles.append([tile[axis] for axis in axes.contracted])
        if not axes.contracted:
            raise ValueError(
                f"{name} {list(operand.shape)} is in tiles, but no axis is contracted. Tiles need "
                "a contracted axis. Quantize it with fp8.PerTensor() or fp8.PerAxis(...)."
            )
        if all(size == 1 for size in tiles[-1]):
            raise ValueError(
                f"{name} {list(operand.shape)} is in tiles of {tile}. The matmul contracts axes "
                f"{axes.contracted}, where its tiles have one value. Quantize it in the other "
                "direction."
            )
    if len(tiles) == 2 and tiles[0] != tiles[1]:
        raise ValueError(
            f"lhs has tiles of {tiles[0]} along its contracted axes {geometry.lhs.contracted}. rhs "
            f"has tiles of {tiles[1]} along {geometry.rhs.contracted}. Scales can leave a partial "
            "sum only if both sides have the same tiles. Quantize both with one tile length."
        )
    if lhs.granularity.is_square and rhs.granularity.is_square:
        raise ValueError(
            f"lhs {lhs.granularity!r} and rhs {rhs.granularity!r} are both in 2D tiles. No kernel "
            "multiplies them. Quantize one with tiles along the contracted axis only, for "
            "instance PerBlock((1, T)) if that is its last axis."
        )


# CastOptions: the keyword arguments of functions that cast to FP8.


class CastOptions(TypedDict, total=False):
    """Options of `fp8.quantize` and `fp8.fake_quantize`; see there."""

    power_of_two: bool
    scale_format: Format | None
    scale_rounding: ScaleRounding
    rounding: Rounding


def _split_options(function: str, options: Mapping[str, object]) -> tuple[ScaleRule, Rounding]:
    """The scale rule and the rounding that the options of a function select."""
    check_options(function, CastOptions, options)
    given: dict[str, Any] = dict(options)
    rounding: Rounding = given.pop("rounding", "nearest")
    return ScaleRule(**given), rounding


# `quantize`: the cast of an array to a QuantizedTensor.


def _of_quantize(arrays: PyTree) -> Exception:
    shapes = ", ".join(str(list(leaf.shape)) for leaf in jax.tree.leaves(arrays))
    return TypeError(
        f"fp8.quantize of x {shapes} is being differentiated, but it has no gradient. Use "
        "fp8.fake_quantize for a straight-through gradient, fp8.dot for a matmul in FP8, or "
        "jax.lax.stop_gradient(x)."
    )


_constant = undifferentiable(_of_quantize)  # for the arrays of `fp8.quantize`


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
    rule, rounding = _split_options("fp8.quantize", options)
    arrays = _constant(check_arrays("x", x, prologue))
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
        copies, _ = cast_copies(source, cast, key=key)
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
    """The values of an array that this process can read; none of a traced array."""
    # NumPy reads them. Inside `jax.jit` or `jax.checkpoint`, JAX traces its own operations even on
    # concrete arrays.
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
    _split_options("fp8.fake_quantize", options)
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
