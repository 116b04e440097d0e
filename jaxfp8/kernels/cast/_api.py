"""The door of the cast: high precision in, QuantizedTensor out."""

from collections.abc import Callable
from typing import Any

from jaxfp8._typing import Array, Implementation, Rounding
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source
from jaxfp8.kernels.cast import _reference, _xla
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._scale import inverse
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

# What no GPU has timed yet is taken only by name.
BACKENDS: dict[str, Callable[..., Any]] = {
    "xla": _xla.cast,
    "mosaic": Backend("jaxfp8.kernels.cast._mosaic", "cast", needs="Pallas Mosaic GPU"),
    "reference": _reference.cast,
}


def cast(
    x: Source,
    multiplier: Array,
    format: Format,
    granularity: AbstractGranularity,
    *,
    scale: Array | None = None,
    power_of_two: bool = False,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
) -> QuantizedTensor:
    """`values = round(clip(x * multiplier))`, with `scale = 1 / multiplier`.

    Args:
      x: [...] floating point, or what a prologue makes of arrays: XLA fuses it, Pallas kernels read the arrays.
      multiplier: float32 of shape `granularity.scale_shape(x.shape)`, in [2^-126, 2^126].
      format: E4M3 or E5M2.
      granularity: which values share a scale.
      scale: of the same shape, if the caller has it already; else it is computed.
      power_of_two: every scale is known to be a power of two.
      rounding: "nearest" or "stochastic".
      key: a jax PRNG key, for stochastic rounding.
      implementation: a backend by name, or None for the first that can.

    Returns:
      A QuantizedTensor that stands for x.
    """
    (copy,), _ = cast_copies(
        x, (multiplier,), format, (granularity,), scales=(inverse(multiplier) if scale is None else scale,),
        power_of_two=power_of_two, rounding=rounding, key=key, implementation=implementation,
    )  # fmt: skip
    return copy


def cast_copies(
    x: Source,
    multipliers: tuple[Array, ...],
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    *,
    scales: tuple[Array, ...],
    transposed: tuple[bool, ...] = (),
    column_sums: bool = False,
    power_of_two: bool = False,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """x with each of these multipliers, in one call, so that a kernel can read x once for all copies and for its amax.

    Args:
      x: [...] floating point, or what a prologue makes of arrays: XLA fuses it, Pallas kernels read the arrays.
      multipliers: of each copy, see `cast`.
      format: E4M3 or E5M2.
      granularities: of each copy.
      scales: of each copy.
      transposed: of each copy, whether it shall lie in memory with the last two axes swapped, as Hopper's matmuls read an
        operand that is contracted along the first of them. Only a layout: XLA's own backend leaves it to XLA. () is "none".
      column_sums: whether to sum the columns, too, if that takes no read of its own.
      power_of_two: every scale is known to be a power of two.
      rounding: "nearest" or "stochastic".
      key: a jax PRNG key, for stochastic rounding; every copy gets the same random bits.
      implementation: a backend by name, or None for the first that can.

    Returns:
      The copies, and what a kernel met of x on the way. XLA fuses an amax of x with the cast.
    """
    return dispatch(
        "cast", BACKENDS, implementation, x, multipliers, scales, format, granularities,
        transposed=transposed or (False,) * len(granularities), column_sums=column_sums, power_of_two=power_of_two,
        rounding=rounding, key=key,
    )  # fmt: skip
