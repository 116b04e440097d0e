"""The cost of padding the FP8 operands of a matmul.

Axes of cuBLASLt's FP8 matmuls are multiples of 16. XLA pads in two steps. The first one, to
multiples of 8, comes before fusion is planned, and becomes a part of the cast. The second one, to
multiples of 16, comes with the FP8 call. On Ada and Hopper it stays apart from a cast that also
transposes.

Hopper's Pallas matmul reads whole tiles of 128 along the contracted axis, and rows in boxes of 8.
"""

from jaxfp8.kernels._dispatch import Chip
from jaxfp8.plan._costs import BOX, WHOLE_TILE, Cost, padded, stream, turns
from jaxfp8.plan._peaks import Peak


def padding(
    peak: Peak, chip: Chip, sides: tuple[int, int], layouts: set[bool], *, first: bool
) -> Cost:
    """The cost of padding the FP8 copies of a matrix.

    Args:
      peak: data-sheet figures of the chip.
      chip: the chip.
      sides: the sizes of the matrix.
      layouts: the layouts in which matmuls read it; True stands for transposed.
      first: whether XLA writes FP8 to memory before another kernel transposes it.

    Example:
      >>> from jaxfp8.kernels._dispatch import chip_named
      >>> from jaxfp8.plan._peaks import PEAKS
      >>> h200, both = (PEAKS["h200"], chip_named("h200")), {False, True}
      >>> padding(*h200, (333, 1024), both, first=False).bytes
      0
      >>> padding(*h200, (4096, 1000), both, first=False).bytes == 2 * 4096 * (1000 + 1008)
      True
    """
    rows, columns = sides
    before, after = rows * columns, padded(rows) * padded(columns)
    if before == after:
        return Cost()
    if not turns(chip):
        return stream(peak, before + after) if first else Cost()
    if len(layouts) == 1 and not first:
        # A copy with scales of its own, those of rows or columns. One kernel casts and pads it, or
        # casts and transposes it. Then another kernel pads it.
        return stream(peak, before + after) if True in layouts else Cost()
    if any(padded(size, 8) != padded(size) for size in sides):
        cost = stream(peak, (before + after) * len(layouts), kernels=len(layouts))
        if True in layouts and not first and any(size % 8 for size in sides):
            # The cast pads neither layout. So it writes one, which another kernel transposes.
            cost += stream(peak, before)
        return cost
    # The kernel that transposes FP8 also writes the other layout, padded.
    return stream(peak, after, kernels=0) if first and True in layouts else Cost()


def padding_for_pallas(
    peak: Peak, sides: tuple[int, int], layouts: set[bool], *, by_kernel: bool
) -> Cost:
    """The cost of padding the FP8 copies of a matrix for Hopper's Pallas matmul.

    Args:
      peak: data-sheet figures of the chip.
      sides: the sizes of the matrix.
      layouts: the layouts in which matmuls read it; True stands for transposed.
      by_kernel: whether a kernel cast the matrix and wrote each layout. Otherwise XLA cast it.

    Example:
      >>> from jaxfp8.plan._peaks import PEAKS
      >>> padding_for_pallas(PEAKS["h200"], (333, 1024), {True}, by_kernel=False).bytes
      52224
    """
    rows, columns = sides
    before, cost = rows * columns, Cost()
    for transposed in layouts:
        kept, contracted = (columns, rows) if transposed else (rows, columns)
        after = padded(kept, BOX) * padded(contracted, WHOLE_TILE)
        if after == before:
            continue
        # XLA pads in the kernel that transposes. If nothing is transposed, it pads in the cast.
        fused = not by_kernel and (transposed or len(layouts) == 1)
        cost += stream(peak, after - before if fused else after + before, kernels=not fused)
    return cost
