"""The quantizer for XLA: a reduction and an elementwise cast for each direction, which it fuses as far as it can.

On a GPU that is one read of x for the amax and one for the cast, in each direction.
"""

from jaxfp8._typing import Array, Rounding
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source, value_of
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def quantize(
    x: Source,
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    rule: ScaleRule,
    *,
    transposed: tuple[bool, ...],
    column_sums: bool,
    rounding: Rounding,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """See `kernels.quantize._api.quantize`."""
    del transposed, column_sums  # XLA chooses layouts, and reduces what it fuses
    array = value_of(x)

    def one(granularity: AbstractGranularity) -> QuantizedTensor:
        multiplier, scale = rule.apply(amax(array, granularity), format)
        values = saturating_cast(array, granularity.expand(multiplier, array.shape), format, rounding=rounding, key=key)
        return QuantizedTensor(values, scale, granularity, array.dtype, rule.exact)

    return tuple(map(one, granularities)), Met()
