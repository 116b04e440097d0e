"""CastExtras: what a cast kernel returns besides the copies, because it reads the array anyway."""

from typing import NamedTuple

from jaxfp8._typing import Array


class CastExtras(NamedTuple):
    """Extra results of a cast kernel. A field is None if the kernel did not compute it.

    Attributes:
      largest: an array [...] that has the same amax as x.
      column_sums: float32 [..., C, K] of x [..., M, K]. Each entry is the sum of some rows. Their
        sum along C is the sum of x along M.

    Example:
      >>> CastExtras().largest is None
      True
    """

    largest: Array | None = None
    column_sums: Array | None = None

    def or_else(self, other: "CastExtras") -> "CastExtras":
        """These results, and those of another kernel for the fields that are None.

        Example:
          >>> CastExtras().or_else(CastExtras(largest=1.0)).largest
          1.0
        """
        return CastExtras(
            *(mine if mine is not None else its for mine, its in zip(self, other, strict=True))
        )
