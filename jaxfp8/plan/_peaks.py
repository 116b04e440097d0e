"""Figures of chips, and the small matmuls that XLA splits along K."""

import dataclasses
from typing import NamedTuple

# In how many parts XLA divides a matmul in bfloat16 that is too small for all multiprocessors.
#
# XLA splits K, the contracted axis. Each part writes its sum in float32, and another kernel adds
# the sums. The pass is `SplitkRewriter` (xla/backends/gpu/transforms/splitk_rewriter.cc). It
# rewrites matmuls of Triton only.

# XLA gives a multiprocessor one tile of the result at a time, 128 x 128.
_TILE = 128
_PARTS = [2**power for power in range(12)]


# `launch` and `per_byte` of `_SplitK`, as XLA has tuned them. Ada has Ampere's.
_AMPERE = 5.65e5, 4.68
_HOPPER = 4.36e5, 1.93
_BLACKWELL = 1.216e6, 1.90


class _SplitK(NamedTuple):
    """What XLA's estimate for a chip depends on.

    Attributes:
      processors: number of streaming multiprocessors.
      launch: the second kernel's launch, in operations that one multiprocessor could do meanwhile.
      per_byte: the same for each byte that the second kernel reads or writes.
    """

    processors: int
    launch: float
    per_byte: float

    def parts(self, m: int, k: int, n: int) -> int:
        """The number of parts of [M, K] @ [K, N]."""

        def operations(parts: int) -> float:
            area = min(m, _TILE) * min(n, _TILE)
            tiles = parts * -(-m // _TILE) * -(-n // _TILE)
            turns = max(1.0, tiles * area / (self.processors * _TILE**2))
            matmul = 2 * area * -(-k // parts) * turns
            summed = self.launch + self.per_byte * (4 * parts + 2) * m * n
            return matmul + (summed if parts > 1 else 0)

        return min(_PARTS, key=operations)


# Figures of chips, from data sheets.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """What a chip can do at most, by its data sheet, without sparsity.

    Attributes:
      bf16: operations/s of bfloat16 matmuls.
      fp8: operations/s of FP8 matmuls; None without FP8 units.
      bandwidth: bytes/s of device memory.
      split_k: how XLA splits small matmuls; None where it does not.
    """

    bf16: float
    fp8: float | None
    bandwidth: float
    split_k: _SplitK | None = None


# From NVIDIA's data sheets. If a data sheet gives a figure with sparsity, half of it is used.
PEAKS = {
    # A100 80GB SXM
    "a100": Peak(bf16=312e12, fp8=None, bandwidth=2.039e12, split_k=_SplitK(108, *_AMPERE)),
    "l4": Peak(bf16=121e12, fp8=242.5e12, bandwidth=0.3e12, split_k=_SplitK(58, *_AMPERE)),
    "l40s": Peak(bf16=362e12, fp8=733e12, bandwidth=0.864e12, split_k=_SplitK(142, *_AMPERE)),
    # SXM
    "h100": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=3.35e12, split_k=_SplitK(132, *_HOPPER)),
    "h200": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=4.8e12, split_k=_SplitK(132, *_HOPPER)),
    # DGX B200, an eighth
    "b200": Peak(bf16=2.25e15, fp8=4.5e15, bandwidth=8e12, split_k=_SplitK(148, *_BLACKWELL)),
}
