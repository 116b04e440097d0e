"""The quantizer as the numerics page has it, step by step: the oracle of the other backends."""

import jax

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
    """See `kernels.quantize._api.quantize`; here every step is cut off from the next, so that nothing is fused or rewritten."""
    del transposed, column_sums  # XLA chooses layouts, and reduces what it fuses
    array = value_of(x)

    def one(granularity: AbstractGranularity) -> QuantizedTensor:
        largest = jax.lax.optimization_barrier(amax(array, granularity))
        multiplier, scale = jax.lax.optimization_barrier(rule.apply(largest, format))
        values = saturating_cast(array, granularity.expand(multiplier, array.shape), format, rounding=rounding, key=key)
        return QuantizedTensor(values, scale, granularity, array.dtype, rule.exact)

    return tuple(map(one, granularities)), Met()
