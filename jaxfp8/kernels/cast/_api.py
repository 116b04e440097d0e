"""The entry to the cast with known scales: high precision in, QuantizedTensors out."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxfp8._quantized_tensor import Cast, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels.cast import _xla
from jaxfp8.prologues._prologue import Source, value_of


class KnownScale(NamedTuple):
    """A scale that is known before the cast: `values = round(clip(x * multiplier))`.

    Attributes:
      multiplier: float32, of `granularity.scale_shape(x.shape)`, in [2^-126, 2^126].
      scale: of the same shape, `1 / multiplier`.

    Example:
      >>> import jax.numpy as jnp
      >>> KnownScale(multiplier=jnp.float32(4.0), scale=jnp.float32(0.25)).scale
      Array(0.25, dtype=float32)
    """

    multiplier: Array
    scale: Array


WRITE_TRANSPOSED = frozenset({"mosaic"})
"""The backends that write a copy transposed if its direction says so."""


def _elsewhere(
    like: tuple[tuple[QuantizedTensor, ...], CastExtras],
    x: Source,
    cast: Cast,
    scales: tuple[KnownScale, ...],
    *,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The cast that other platforms than CUDA run instead of a kernel."""
    copies, _ = _xla.cast_copies(x, cast, scales, key=key, barriers=False)
    return copies, CastExtras.of(value_of(x), like[1])


BACKENDS: dict[str, Callable[..., Any]] = {
    "xla": functools.partial(_xla.cast_copies, barriers=False),
    "mosaic": Backend(
        "jaxfp8.kernels.cast._mosaic",
        "cast_copies",
        needs="Pallas Mosaic GPU",
        elsewhere=_elsewhere,
    ),
    "reference": functools.partial(_xla.cast_copies, barriers=True),
}


def cast_copies(
    x: Source, cast: Cast, scales: tuple[KnownScale, ...], *, key: Array | None = None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The copies of x that a cast asks for, in one call, so that a kernel can read x once.

    Args:
      x: [...] floating point, or the result of a prologue with its arrays. XLA fuses the prologue.
        Kernels in Pallas read the arrays.
      cast: which copies. Of its rule only `exact` is used: whether scales are powers of two.
      scales: one for each direction.
      key: a jax PRNG key, for stochastic rounding.

    Returns:
      The copies, and extra results of a kernel. XLA's cast has none: the caller computes the amax,
      and XLA fuses it with the cast.
    """
    result: tuple[tuple[QuantizedTensor, ...], CastExtras] = dispatch(
        "cast", BACKENDS, cast.backends, x, cast, scales, key=key
    )
    return result
