"""The entry to the quantizer: amax, scale and cast in one call, for every direction.

It is one call, so that a kernel can do all of it in one read of x. An amax is that of the array on
this device. For scales that span devices, and for scales from a state, use `kernels.cast`.

The quantizer for XLA is here, too.
"""

import functools
from collections import ChainMap
from collections.abc import Mapping

import jax

from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels.cast import _api as cast_api
from jaxfp8.numerics._amax import amax
from jaxfp8.prologues._prologue import Source, value_of

# The quantizer for XLA: for each direction a reduction and an elementwise cast, fused by XLA.
#
# On a GPU x is read once for the amax and once for the cast, in each direction. With barriers this
# is the reference: a barrier separates each step from the next, so XLA cannot fuse or rewrite them.


def _quantize_by_xla(
    x: Source, cast: Cast, *, key: Array | None, barriers: bool
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `quantize`."""
    array = value_of(x)
    cut = jax.lax.optimization_barrier if barriers else lambda arrays: arrays
    scales = [cast.rule.apply(cut(amax(array, each)), cast.format) for each in cast.granularities]
    return cast_api.cast_by_xla(array, cast, scales, key=key, barriers=barriers)


# The backends, and the entry.


def _elsewhere(
    like: tuple[tuple[QuantizedTensor, ...], CastExtras],
    x: Source,
    cast: Cast,
    *,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The quantizer that other platforms run instead of a kernel."""
    copies, _ = _quantize_by_xla(x, cast, key=key, barriers=False)
    return copies, CastExtras.of(value_of(x), like[1])


BACKENDS: dict[str, Backend] = {
    "xla": Backend(function=functools.partial(_quantize_by_xla, barriers=False)),
    "mosaic": Backend(
        "jaxfp8.kernels.quantize._mosaic",
        "quantize",
        needs="Pallas Mosaic GPU",
        platform="cuda",
        elsewhere=_elsewhere,
        families=("Hopper", "Blackwell"),
        estimated=True,
        writes_transposed=True,
        rows=128,
    ),
    # jax-triton before 0.4 cannot be imported without the CUDA wheels.
    "triton": Backend(
        "jaxfp8.kernels.quantize._triton",
        "quantize",
        needs="Triton (pip install 'jaxfp8[triton]', with cuda12 or cuda13)",
        platform="cuda",
        elsewhere=_elsewhere,
        families=("Ada", "Hopper", "Blackwell"),
    ),
    "reference": Backend(function=functools.partial(_quantize_by_xla, barriers=True)),
}

CASTS: Mapping[str, Backend] = ChainMap(cast_api.BACKENDS, BACKENDS)
"""Every backend that casts. Rows of one name in both tables state the same facts."""


def quantize(
    x: Source, cast: Cast, *, key: Array | None = None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The copies of x that a cast asks for, all of them from the high-precision x.

    x is floating point, or the result of a prologue with its arrays. XLA fuses the prologue, and
    kernels in Pallas read the arrays. The key is for stochastic rounding.
    """
    result: tuple[tuple[QuantizedTensor, ...], CastExtras] = dispatch(
        "quantize", BACKENDS, cast.backends, x, cast, key=key
    )
    return result
