"""The backends that a user can name, and the chips that each backend is made for."""

from jaxfp8.kernels._dispatch import Chip
from jaxfp8.kernels.cast import _api as cast
from jaxfp8.kernels.quantize import _api as quantize
from jaxfp8.kernels.scaled_matmul import _api as scaled_matmul

KNOWN = {
    "casts": tuple(sorted({*cast.BACKENDS, *quantize.BACKENDS})),
    "matmuls": tuple(sorted(scaled_matmul.BACKENDS)),
}
"""The names of backends that each field of `fp8.Kernels` takes."""


def check_named(casts: object, matmuls: object, chip: Chip | None) -> None:
    """Raise ValueError for an unknown backend, or for one that is not made for the chip.

    None is valid: then the user names no backend, or no chip.
    """
    for field, name in (("casts", casts), ("matmuls", matmuls)):
        if name is not None and (not isinstance(name, str) or name not in KNOWN[field]):
            raise ValueError(
                f"{field}={name!r} is no backend of {field}. Use None or one of "
                f"{list(KNOWN[field])}."
            )
    given = None if chip is None else chip.name
    if matmuls == "cudnn" and (chip is None or not chip.block_scaled_matmul):
        raise ValueError(
            f"matmuls='cudnn' is made for Blackwell, but chip={given!r}. XLA has no such matmul "
            'for other chips. Write fp8.Kernels("b200"), or leave matmuls out.'
        )
    if chip is None:
        return
    if matmuls == "mosaic" and not chip.is_hopper:
        raise ValueError(
            f"matmuls='mosaic' is made for Hopper, but chip={given!r}. Leave matmuls out."
        )
    # "xla" and "reference" run on every chip, so they need (0, 0).
    needed = {"mosaic": (9, 0), "triton": (8, 9)}.get(str(casts), (0, 0))
    if (chip.compute_capability or (0, 0)) < needed:
        has = ".".join(map(str, chip.compute_capability or ("none",)))
        raise ValueError(
            f"casts={casts!r} needs compute capability {needed[0]}.{needed[1]}, but "
            f"chip={given!r} has {has}. Leave casts out."
        )


def cure_of(kernels: object) -> str:
    """The code to write instead of a value that is not `fp8.Kernels`, for messages.

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
