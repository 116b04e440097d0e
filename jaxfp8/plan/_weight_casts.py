"""What w costs if it is not cast once for each forward and backward pass.

Letters: K features in, N features out; w is [K, N].
"""

from typing import Any

from jaxfp8._typing import Matmul
from jaxfp8.plan._cast_costs import MATRICES, Casts
from jaxfp8.plan._costs import Cost, stream, turns


def check_weight_casts(given: object) -> float:
    """Raise ValueError unless it is a number of casts, 0 or more.

    Example:
      >>> check_weight_casts(1)
      1.0
    """
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1000:
        raise ValueError(
            f"weight_casts={given!r} must be the number of casts of w in each forward and backward "
            "pass: 1, or 1 / 8 if fp8.quantize_params casts it once for 8 microbatches."
        )
    return float(given)


def cost_of_weights(cast: Cost, casts: Casts, number: float) -> Cost:
    """The cost of w in one forward and backward pass.

    Args:
      cast: the cost of one cast.
      casts: the casts of w.
      number: how often w is cast in a pass. Below 1 the model holds the FP8 copies. They lie as w
        does, so matmuls that want another layout or dtype still transpose or widen them.

    Example:
      >>> import jaxfp8 as fp8
      >>> shape, h200 = (8192, 4096, 14336), fp8.Kernels("h200")
      >>> of = {"recipe": fp8.recipes.delayed(), "kernels": h200}
      >>> once, eighth = (fp8.plan.roofline(shape, **of, weight_casts=n) for n in (1, 1 / 8))
      >>> round(eighth.speedup / once.speedup, 3)
      1.016
    """
    if number >= 1:
        return cast.times(number)
    cost = cast.times(number)
    copies: dict[Any, list[Matmul]] = {}
    for name, quantizer in casts.recipe.uses("w"):
        direction = name if quantizer.granularity.is_directed else None
        copies.setdefault((quantizer, direction), []).append(name)
    for (quantizer, _), readers in copies.items():
        in_fp8 = [name for name in readers if casts.routes[name].reads_fp8]
        turned = any(MATRICES.axes(name, "w").is_transposed for name in in_fp8)
        if turned and (turns(casts.chip) or casts.routes[in_fp8[0]].value != "FP8"):
            cost += stream(casts.peak, 2 * casts.values)
        widened = len(readers) - len(in_fp8)
        if widened:  # tiles are widened once for both matmuls
            both = 1 if quantizer.granularity.in_tiles else widened
            cost += stream(casts.peak, (1 + 2 * both) * casts.values)
    return cost
