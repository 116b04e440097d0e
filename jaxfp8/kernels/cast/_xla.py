"""The cast for XLA: elementwise, so that it fuses into whatever produced x, and into the amax beside it."""

from jaxfp8._typing import Array, Rounding
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def cast(
    x: Array,
    multiplier: Array,
    scale: Array,
    format: Format,
    granularity: AbstractGranularity,
    *,
    power_of_two: bool,
    rounding: Rounding,
    key: Array | None,
) -> QuantizedTensor:
    """See `kernels.cast._api.cast`."""
    values = saturating_cast(x, granularity.expand(multiplier, x.shape), format, rounding=rounding, key=key)
    return QuantizedTensor(values, scale, granularity, x.dtype, power_of_two)
