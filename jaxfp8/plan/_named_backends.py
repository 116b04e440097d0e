"""Backends that a user names: those that there are, and the chips that each is made for."""

from jaxfp8.kernels._platform import Chip
from jaxfp8.kernels.cast import _api as cast
from jaxfp8.kernels.quantize import _api as quantize
from jaxfp8.kernels.scaled_matmul import _api as scaled_matmul

KNOWN = {
    "casts": tuple(sorted({*cast.BACKENDS, *quantize.BACKENDS})),
    "matmuls": tuple(sorted(scaled_matmul.BACKENDS)),
}
"""Names of backends by the field of `fp8.Kernels` that takes them."""


def check_named(casts: object, matmuls: object, chip: Chip | None) -> None:
    """Raise ValueError for a name of no backend, or of one that is not made for the chip.

    None names nothing.
    """
    for field, name in (("casts", casts), ("matmuls", matmuls)):
        if name is not None and (not isinstance(name, str) or name not in KNOWN[field]):
            raise ValueError(
                f"{field}={name!r} is no backend of {field}; use None or one of "
                f"{list(KNOWN[field])}."
            )
    given = None if chip is None else chip.name
    if matmuls == "cudnn" and (chip is None or not chip.block_scaled_matmul):
        raise ValueError(
            f"matmuls='cudnn' is made for Blackwell, but chip={given!r}: XLA has no such "
            'matmul for it; write fp8.Kernels("b200"), or leave matmuls out.'
        )
    if chip is None:
        return
    if matmuls == "mosaic" and not chip.is_hopper:
        raise ValueError(
            f"matmuls='mosaic' is made for Hopper, but chip={given!r}; leave matmuls out."
        )
    needed = {"mosaic": (9, 0), "triton": (8, 9)}.get(str(casts), (0, 0))
    if (chip.compute_capability or (0, 0)) < needed:
        has = ".".join(map(str, chip.compute_capability or ("none",)))
        raise ValueError(
            f"casts={casts!r} needs compute capability {needed[0]}.{needed[1]}, but "
            f"chip={given!r} has {has}; leave casts out."
        )


def cure_of(kernels: object) -> str:
    """What to write instead of something that is no `fp8.Kernels`.

    Example:
      >>> cure_of("h200"), cure_of("triton")
      ("fp8.Kernels('h200')", "fp8.Kernels(casts='triton')")
    """
    if not isinstance(kernels, str):
        return 'fp8.Kernels("h200")'
    words = [f"{field}={kernels!r}" for field, names in KNOWN.items() if kernels in names]
    if kernels == "cudnn":
        words.insert(0, "'b200'")
    return f"fp8.Kernels({', '.join(words) or repr(kernels)})"
