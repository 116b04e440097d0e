"""The cast for XLA: elementwise, so that it fuses into whatever produced x, and into the amax beside it."""

from jaxfp8._typing import Array, Rounding
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source, value_of
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def cast(
    x: Source,
    multipliers: tuple[Array, ...],
    scales: tuple[Array, ...],
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    *,
    transposed: tuple[bool, ...],
    column_sums: bool,
    power_of_two: bool,
    rounding: Rounding,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """See `kernels.cast._api.cast_copies`."""
    del transposed, column_sums  # XLA chooses layouts, and reduces what it fuses
    array = value_of(x)

    def one(multiplier: Array, scale: Array, granularity: AbstractGranularity) -> QuantizedTensor:
        values = saturating_cast(array, granularity.expand(multiplier, array.shape), format, rounding=rounding, key=key)
        return QuantizedTensor(values, scale, granularity, array.dtype, power_of_two)

    return tuple(map(one, multipliers, scales, granularities)), Met()
