"""The quantizer for XLA: for each direction a reduction and an elementwise cast, fused by XLA.

On a GPU x is read once for the amax and once for the cast, in each direction. With barriers this is
the reference: a barrier separates each step from the next, so XLA cannot fuse or rewrite them.
"""

import jax

from jaxfp8._quantized_tensor import Cast, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels.cast._xla import cast_copies
from jaxfp8.numerics._amax import amax
from jaxfp8.prologues._prologue import Source, value_of


def quantize(
    x: Source, cast: Cast, *, key: Array | None, barriers: bool
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.quantize._api.quantize`."""
    array = value_of(x)
    cut = jax.lax.optimization_barrier if barriers else lambda arrays: arrays
    scales = [cast.rule.apply(cut(amax(array, each)), cast.format) for each in cast.granularities]
    return cast_copies(array, cast, scales, key=key, barriers=barriers)
