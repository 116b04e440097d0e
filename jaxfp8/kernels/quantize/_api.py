"""The door of the quantizer: amax, scale and cast in one call, for every direction in which matmuls read the array.

In one call, so that a kernel can do all of it in one read of x. Amaxes are those of the array at hand; a scale that spans
devices, or steps, goes through `kernels.cast`.
"""

from collections.abc import Callable
from typing import Any

from jaxfp8._typing import Array, Implementation, Rounding
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source
from jaxfp8.kernels.quantize import _reference, _xla
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

# What no GPU has timed yet is taken only by name.
BACKENDS: dict[str, Callable[..., Any]] = {
    "xla": _xla.quantize,
    "mosaic": Backend("jaxfp8.kernels.quantize._mosaic", "quantize", needs="Pallas Mosaic GPU"),
    # jax-triton before 0.4 needs the CUDA wheels to be imported.
    "triton": Backend(
        "jaxfp8.kernels.quantize._triton",
        "quantize",
        needs="Triton (pip install 'jaxfp8[triton]', with cuda12 or cuda13)",
    ),
    "reference": _reference.quantize,
}


def quantize(
    x: Source,
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    rule: ScaleRule,
    *,
    transposed: tuple[bool, ...] = (),
    column_sums: bool = False,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """x in each granularity, every copy from the high-precision x, and what a kernel met of x on the way.

    Args:
      x: [...] floating point, or what a prologue makes of arrays: XLA fuses it, Pallas kernels read the arrays.
      format: E4M3 or E5M2.
      granularities: which values share a scale, for each copy.
      rule: how an amax becomes a scale.
      transposed: of each copy, as in `kernels.cast._api.cast_copies`.
      column_sums: likewise.
      rounding: "nearest" or "stochastic".
      key: a jax PRNG key, for stochastic rounding; every copy gets the same random bits.
      implementation: a backend by name, or None for the first that can.
    """
    return dispatch(
        "quantize", BACKENDS, implementation, x, format, granularities, rule,
        transposed=transposed or (False,) * len(granularities), column_sums=column_sums, rounding=rounding, key=key,
    )  # fmt: skip
