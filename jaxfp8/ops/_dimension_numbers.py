"""The geometry of the three matmuls of `dot_general`, written once.

fprop: y [batch, x kept, w kept]; dgrad: dx from g and w; wgrad: dw from x and g. A product whose axes come out in another
order than its tensor's is transposed.
"""

import dataclasses
from collections.abc import Sequence

from jaxfp8._typing import Axes, DotDimensionNumbers
from jaxfp8.recipes._recipe import Matmul, Tensor


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where the axes of x, w and g go in each matmul. All tuples, hence hashable.

    Attributes:
      dimension_numbers: of each matmul, for `jax.lax.dot_general`, keyed by position: fprop, dgrad, wgrad.
      product_axes: for dgrad and wgrad, which axis of the tensor each axis of the product is.
      kept_axes: (matmul, tensor) -> the axes of the tensor that the matmul does not contract, ascending.
    """

    dimension_numbers: tuple[DotDimensionNumbers, DotDimensionNumbers, DotDimensionNumbers]
    product_axes: tuple[Axes, Axes]
    kept_axes: tuple[tuple[tuple[Matmul, Tensor], Axes], ...]

    @property
    def batched(self) -> bool:
        return bool(self.dimension_numbers[0][1][0])

    @property
    def rhs_kept(self) -> Axes:
        """The axes of rhs that fprop leaves to its product, but those of the batch."""
        batch = self.dimension_numbers[0][1][1]
        return tuple(axis for axis in self.kept("fprop", "w") if axis not in batch)

    def kept(self, matmul: Matmul, tensor: Tensor) -> Axes:
        return dict(self.kept_axes)[matmul, tensor]


def geometry(dimension_numbers: DotDimensionNumbers, x_ndim: int, w_ndim: int) -> Geometry:
    """The geometry of `dot_general(x, w, dimension_numbers)` and its two transposes.

    Example:
      >>> geometry((((1,), (0,)), ((), ())), 2, 2).dimension_numbers[2]
      (((0,), (0,)), ((), ()))
    """
    (x_contract, w_contract), (x_batch, w_batch) = (tuple(tuple(a) for a in pair) for pair in dimension_numbers)
    x_kept = _rest(x_ndim, x_contract, x_batch)
    w_kept = _rest(w_ndim, w_contract, w_batch)
    # Axes of y and of its gradient g.
    n, m = len(x_batch), len(x_kept)
    g_batch, g_x, g_w = tuple(range(n)), tuple(range(n, n + m)), tuple(range(n + m, n + m + len(w_kept)))

    fprop = ((x_contract, w_contract), (x_batch, w_batch))
    dgrad = ((g_w, w_kept), (g_batch, w_batch))
    wgrad = ((x_kept, g_x), (x_batch, g_batch))
    # The axes that dot_general leaves over come in ascending order: of w in dgrad, of x in wgrad.
    dx_axes = x_batch + x_kept + tuple(x_contract[w_contract.index(axis)] for axis in sorted(w_contract))
    dw_axes = w_batch + tuple(w_contract[x_contract.index(axis)] for axis in sorted(x_contract)) + w_kept
    kept: dict[tuple[Matmul, Tensor], Axes] = {
        ("fprop", "x"): _sorted(x_batch + x_kept),
        ("wgrad", "x"): _sorted(x_batch + x_contract),
        ("fprop", "w"): _sorted(w_batch + w_kept),
        ("dgrad", "w"): _sorted(w_batch + w_contract),
        ("dgrad", "g"): g_batch + g_x,
        ("wgrad", "g"): g_batch + g_w,
    }
    return Geometry((fprop, dgrad, wgrad), (dx_axes, dw_axes), tuple(kept.items()))


def inverse_permutation(axes: Axes) -> Axes:
    """The permutation that undoes `axes`.

    Example:
      >>> inverse_permutation((2, 0, 1))
      (1, 2, 0)
    """
    return tuple(axes.index(axis) for axis in range(len(axes)))


def _rest(ndim: int, *taken: Sequence[int]) -> Axes:
    return tuple(axis for axis in range(ndim) if not any(axis in axes for axes in taken))


def _sorted(axes: Axes) -> Axes:
    return tuple(sorted(axes))
