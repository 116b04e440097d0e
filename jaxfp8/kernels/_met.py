"""What a kernel that casts an array tells of it besides: it reads the array anyway."""

from typing import NamedTuple

from jaxfp8._typing import Array


class Met(NamedTuple):
    """What a kernel met on its way; None what it did not, or was not asked for, and XLA reduces the array itself.

    Attributes:
      largest: an array [...] whose amax is that of x.
      column_sums: float32 [..., C, K], sums of some rows each of x [..., M, K], whose sums along C are those of x along M.

    Example:
      >>> Met().largest is None
      True
    """

    largest: Array | None = None
    column_sums: Array | None = None
