"""In how many parts XLA divides a matmul in bfloat16 that is too small for all multiprocessors.

XLA splits K, the contracted axis. Each part writes its sum in float32, and another kernel adds the
sums. The pass is `SplitkRewriter` (xla/backends/gpu/transforms/splitk_rewriter.cc). It rewrites
matmuls of Triton only.
"""

from typing import NamedTuple

# XLA gives a multiprocessor one tile of the result at a time, 128 x 128.
_TILE = 128
_PARTS = [2**power for power in range(12)]


# `launch` and `per_byte` of `SplitK`, as XLA has tuned them. Ada has Ampere's.
AMPERE = 5.65e5, 4.68
HOPPER = 4.36e5, 1.93
BLACKWELL = 1.216e6, 1.90


class SplitK(NamedTuple):
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
        """The number of parts of [M, K] @ [K, N].

        Example:
          >>> h200 = SplitK(132, *HOPPER)
          >>> h200.parts(333, 2048, 1024), h200.parts(8192, 2048, 1024)
          (4, 1)
        """

        def operations(parts: int) -> float:
            area = min(m, _TILE) * min(n, _TILE)
            tiles = parts * -(-m // _TILE) * -(-n // _TILE)
            turns = max(1.0, tiles * area / (self.processors * _TILE**2))
            matmul = 2 * area * -(-k // parts) * turns
            summed = self.launch + self.per_byte * (4 * parts + 2) * m * n
            return matmul + (summed if parts > 1 else 0)

        return min(_PARTS, key=operations)
