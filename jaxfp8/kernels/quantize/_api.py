"""The entry to the quantizer: amax, scale and cast in one call, for every direction.

It is one call, so that a kernel can do all of it in one read of x. An amax is that of the array on
this device. For scales that span devices, and for scales from a state, use `kernels.cast`.
"""

import functools
from collections.abc import Callable
from typing import Any

from jaxfp8._quantized_tensor import Cast, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels.quantize import _xla
from jaxfp8.prologues._prologue import Source, value_of


def _elsewhere(
    like: tuple[tuple[QuantizedTensor, ...], CastExtras],
    x: Source,
    cast: Cast,
    *,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The quantizer that other platforms than CUDA run instead of a kernel."""
    copies, _ = _xla.quantize(x, cast, key=key, barriers=False)
    return copies, CastExtras.of(value_of(x), like[1])


BACKENDS: dict[str, Callable[..., Any]] = {
    "xla": functools.partial(_xla.quantize, barriers=False),
    "mosaic": Backend(
        "jaxfp8.kernels.quantize._mosaic",
        "quantize",
        needs="Pallas Mosaic GPU",
        elsewhere=_elsewhere,
    ),
    # jax-triton before 0.4 cannot be imported without the CUDA wheels.
    "triton": Backend(
        "jaxfp8.kernels.quantize._triton",
        "quantize",
        needs="Triton (pip install 'jaxfp8[triton]', with cuda12 or cuda13)",
        elsewhere=_elsewhere,
    ),
    "reference": functools.partial(_xla.quantize, barriers=True),
}


def quantize(
    x: Source, cast: Cast, *, key: Array | None = None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The copies of x that a cast asks for, all of them from the high-precision x.

    Args:
      x: [...] floating point, or the result of a prologue with its arrays. XLA fuses the prologue.
        Kernels in Pallas read the arrays.
      cast: which copies.
      key: a jax PRNG key, for stochastic rounding.

    Returns:
      The copies, and extra results of a kernel.
    """
    result: tuple[tuple[QuantizedTensor, ...], CastExtras] = dispatch(
        "quantize", BACKENDS, cast.backends, x, cast, key=key
    )
    return result
