"""The cast for XLA. It is elementwise, so XLA fuses it with the producer of x and an amax of x.

With barriers it is the reference: XLA cannot fuse or rewrite anything across them.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxfp8._quantized_tensor import Cast, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels._in_order import in_order_on_mesh
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.prologues._prologue import Source, value_of


def cast_copies(
    x: Source,
    cast: Cast,
    scales: Sequence[tuple[Array, Array]],
    *,
    key: Array | None,
    barriers: bool,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.cast._api.cast_copies`."""
    array = value_of(x)
    if not barriers and any(each.in_rows for each in cast.granularities):
        array = _in_its_layout(array)
    values, known = [], []
    for direction, (multiplier, scale) in zip(cast.directions, scales, strict=True):
        if barriers:
            multiplier, scale = jax.lax.optimization_barrier((multiplier, scale))
        spread = direction.granularity.expand(multiplier, array.shape)
        value = saturating_cast(array, spread, cast.format, rounding=cast.rounding, key=key)
        values.append(in_order_on_mesh(value) if direction.transposed else value)
        known.append(scale)
    return cast.copies(tuple(values), tuple(known), array.dtype), CastExtras()


def _in_its_layout(x: Array) -> Array:
    """x, laid out in memory in the order of its axes.

    Otherwise XLA may give all of the cast the layout of the copy that cuBLASLt reads transposed.
    Parts of the cast that both copies share are then written to memory, for instance the masks of
    values that are finite.
    """
    layout = Layout(tuple(range(x.ndim)))
    return lax.platform_dependent(
        x, cuda=lambda x: with_layout_constraint(x, layout), default=lambda x: x
    )
