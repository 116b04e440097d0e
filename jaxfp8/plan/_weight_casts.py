"""What w costs if it is not cast once for each forward and backward pass.

Letters: K features in, N features out; w is [K, N].
"""

from jaxfp8.plan._cast_costs import MATRICES, Casts, copies_of, wants_contracted_last
from jaxfp8.plan._costs import Cost, stream


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
    for (quantizer, _), readers in copies_of(casts.recipe, "w").items():
        routes = {name: casts.routes[name] for name in readers}
        if any(
            MATRICES.axes(name, "w").is_transposed
            and route.reads_fp8
            and wants_contracted_last(route, casts.chip)
            for name, route in routes.items()
        ):
            cost += stream(casts.peak, 2 * casts.values)
        widened = sum(not route.reads_fp8 for route in routes.values())
        if widened:  # tiles are widened once for both matmuls
            both = 1 if quantizer.granularity.in_tiles else widened
            cost += stream(casts.peak, (1 + 2 * both) * casts.values)
    return cost
