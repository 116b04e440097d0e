"""CastOptions: the keyword arguments of functions that cast to FP8."""

from collections.abc import Mapping
from typing import Any, TypedDict

from jaxfp8._call import check_options
from jaxfp8._typing import Rounding, ScaleRounding
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._scale import ScaleRule


class CastOptions(TypedDict, total=False):
    """Options of `fp8.quantize` and `fp8.fake_quantize`.

    The functions take `**options: Unpack[CastOptions]`, so type checkers find a misspelt option.

    Attributes:
      power_of_two: whether to round the multiplier down to a power of two; default False.
      scale_format: None (the default) for float32 scales. E8M0 for the scales of MXFP8, with
        PerBlock only.
      scale_rounding: how E8M0 scales are rounded. "rceil" (the default) rounds up, so that no value
        overflows. "floor" rounds as the OCP specification does.
      rounding: "nearest" (ties to even, the default) or "stochastic" (needs `key`).

    Example:
      >>> sorted(CastOptions(power_of_two=True))
      ['power_of_two']
    """

    power_of_two: bool
    scale_format: Format | None
    scale_rounding: ScaleRounding
    rounding: Rounding


def split_options(function: str, options: Mapping[str, object]) -> tuple[ScaleRule, Rounding]:
    """The scale rule and the rounding that these options select.

    Args:
      function: the name of the function that was called, for the message.
      options: the keyword arguments that it was given.

    Raises:
      TypeError: for an unknown option.
      TypeError, ValueError: see `ScaleRule`.

    Example:
      >>> split_options("fp8.quantize", {"power_of_two": True})[1]
      'nearest'
    """
    check_options(function, CastOptions, options)
    given: dict[str, Any] = dict(options)
    rounding: Rounding = given.pop("rounding", "nearest")
    return ScaleRule(**given), rounding
