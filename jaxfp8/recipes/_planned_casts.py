"""The copies of a tensor that the matmuls of a training step read, and how each is cast.

All of this is static. It is computed once for a recipe and a geometry, and not for each layer.
"""

import functools
from typing import NamedTuple

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Matmul, Tensor
from jaxfp8.kernels.cast._api import WRITE_TRANSPOSED
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.tensors._cast import Cast, Direction


class PlannedCast(NamedTuple):
    """The copies of one tensor by one quantizer.

    Attributes:
      quantizer: the quantizer, which chooses the scales and casts.
      cast: the copies to make; None if the tensor stays in high precision.
      readers: for each copy, the matmuls that read it.
      row: the index of the quantizer's row of state; None if the quantizer has no state.
    """

    quantizer: AbstractQuantizer
    cast: Cast | None
    readers: tuple[tuple[Matmul, ...], ...]
    row: int | None


@functools.lru_cache(maxsize=4096)
def planned_casts(
    recipe: Recipe,
    geometry: TrainingGeometry,
    tensor: Tensor,
    backends: tuple[str, ...],
    column_sums: bool = False,
    gathered: bool = False,
    by_xla: frozenset[Matmul] = frozenset(),
    only: Matmul | None = None,
) -> tuple[PlannedCast, ...]:
    """The casts of a tensor: one for each quantizer that the recipe gives it.

    Args:
      recipe: the quantizers of all operands.
      geometry: the axes of the three matmuls.
      tensor: "x", "w" or "g".
      backends: names of cast backends, in the order in which they are tried.
      column_sums: whether the first cast also sums columns.
      gathered: whether the copies of this pass are gathered over a mesh. Matmuls with one scale
        then share a copy, because a second one would double the bytes.
      by_xla: the matmuls that XLA computes. It multiplies tiles in bfloat16, in any layout.
      only: the only matmul that reads the copies of this pass; None for all.

    Example:
      >>> import jaxfp8 as fp8
      >>> geometry = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)
      >>> (planned,) = planned_casts(fp8.recipes.blockwise(), geometry, "x", ("xla",))
      >>> planned.cast.granularities, planned.readers
      ((PerBlock(tile=(1, 128)), PerBlock(tile=(128, 1))), (('fprop',), ('wgrad',)))
    """
    # Matmuls with equal quantizers share a cast. With equal directions as well, they share a copy.
    found: dict[AbstractQuantizer, dict[Direction, tuple[Matmul, ...]]] = {}
    for matmul, quantizer in recipe.uses(tensor):
        if only not in (None, matmul):
            continue
        axes = geometry.axes(matmul, tensor)
        granularity = quantizer.granularity.for_matmul(axes.not_contracted, len(axes.order))
        # Hopper's matmuls read operands with the contracted axis last. So a backend that can write
        # a copy transposed does it here, and nobody has to transpose it later.
        transposed = axes.is_transposed and backends[0] in WRITE_TRANSPOSED
        if (gathered and granularity.in_one) or (matmul in by_xla and granularity.in_tiles):
            transposed = False
        direction = Direction(granularity, transposed)
        copies = found.setdefault(quantizer, {})
        copies[direction] = (*copies.get(direction, ()), matmul)
    planned = []
    for quantizer, copies in found.items():
        cast = None
        if quantizer.value_format is not None:
            cast = Cast(
                format=quantizer.value_format, directions=tuple(copies), rule=quantizer.rule,
                rounding=quantizer.rounding, column_sums=column_sums, backends=backends,
            )  # fmt: skip
            column_sums = False  # one sum is enough, also if other quantizers cast the tensor
        readers, row = tuple(copies.values()), recipe.row_of(tensor, quantizer)
        planned.append(PlannedCast(quantizer, cast, readers, row))
    return tuple(planned)
