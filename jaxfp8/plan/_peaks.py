"""Figures of chips, from data sheets."""

import dataclasses

from jaxfp8.kernels._dispatch import Chip, chip_named
from jaxfp8.plan._split_k import AMPERE, BLACKWELL, HOPPER, SplitK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """What a chip can do at most, by its data sheet, without sparsity.

    Attributes:
      bf16: operations/s of bfloat16 matmuls.
      fp8: operations/s of FP8 matmuls; None without FP8 units.
      bandwidth: bytes/s of device memory.
      split_k: how XLA splits small matmuls.
    """

    bf16: float
    fp8: float | None
    bandwidth: float
    split_k: SplitK


# From NVIDIA's data sheets. If a data sheet gives a figure with sparsity, half of it is used.
PEAKS = {
    # A100 80GB SXM
    "a100": Peak(bf16=312e12, fp8=None, bandwidth=2.039e12, split_k=SplitK(108, *AMPERE)),
    "l4": Peak(bf16=121e12, fp8=242.5e12, bandwidth=0.3e12, split_k=SplitK(58, *AMPERE)),
    "l40s": Peak(bf16=362e12, fp8=733e12, bandwidth=0.864e12, split_k=SplitK(142, *AMPERE)),
    # SXM
    "h100": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=3.35e12, split_k=SplitK(132, *HOPPER)),
    "h200": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=4.8e12, split_k=SplitK(132, *HOPPER)),
    # DGX B200, an eighth
    "b200": Peak(bf16=2.25e15, fp8=4.5e15, bandwidth=8e12, split_k=SplitK(148, *BLACKWELL)),
}


def estimable(name: str) -> Chip:
    """The chip of that name, if its figures are known.

    Raises:
      ValueError: for an unknown chip, or one without figures.

    Example:
      >>> estimable("h200").compute_capability
      (9, 0)
    """
    chip = chip_named(name)
    if name not in PEAKS:
        raise ValueError(
            f"chip={name!r} has no figures to estimate from. jaxfp8 has compiled nothing for FP8 "
            f"units of platform {chip.platform}. Use one of {sorted(PEAKS)}."
        )
    return chip
