"""One matmul, as Hopper's kernel divides it: what is known before the kernel runs.

The product [B, M, N] is divided four times.

  tile    what one block of threads computes, `Tiling.tile`. A cluster of two blocks takes two
          neighbours along N.
  share   the R x C of a tile that one warpgroup computes; two of them make a tile.
  patch   the 64 x W of a share that is scaled and stored at once.
  step    T values along K of the operands of one tile. They come to shared memory together.

Letters: B batch, M N K matmul, R C the share of a warpgroup, W the width of a patch; T = 128.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS, Tiling


class Tile(NamedTuple):
    """Which tile of the product a block computes: three indices, counted in tiles."""

    lead: Array  # along B
    down: Array  # along M
    across: Array  # along N


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """Sizes, dtypes, tiling and scaling of one matmul.

    Attributes:
      batch: B.
      m: M, a multiple of 8.
      n: N, a multiple of 8.
      k: K, a multiple of T.
      formats: dtypes of the values of lhs and rhs.
      out_dtype: of the result.
      tiling: how the product is divided.
      scaling: when it is scaled.
      add_to: the dtype of an array C that the product is added to; None without one.

    Raises:
      NoRoomError: for a tiling that a multiprocessor has no room for.
    """

    batch: int
    m: int
    n: int
    k: int
    formats: tuple[DType, DType]
    out_dtype: DType
    tiling: Tiling
    scaling: Scaling
    add_to: DType | None = None

    def __post_init__(self) -> None:
        self.tiling.check(**self._sizes)

    @property
    def in_place(self) -> bool:
        """Whether the result is written over C: C has the result's dtype."""
        return self.add_to == self.out_dtype

    @property
    def steps(self) -> int:
        """Steps of one tile."""
        return self.k // T

    @property
    def tiles(self) -> int:
        """Tiles of the product, two neighbours of a cluster counted as one."""
        tiles_m, tiles_n = self._tiles_of_matrix
        return self.batch * tiles_m * tiles_n

    @property
    def clusters(self) -> int:
        """Clusters that run, each taking tile after tile."""
        return min(self.tiles, self.tiling.blocks // self.tiling.cluster)

    @functools.cached_property
    def width(self) -> int:
        """W."""
        return self.tiling.width(**self._sizes)

    @functools.cached_property
    def slots(self) -> int:
        """Patches of its result that a warpgroup has in shared memory; it divides all of them."""
        return self.tiling.slots(**self._sizes)

    @property
    def bands(self) -> range:
        """First rows, in a share, of the ROWS rows that one `wgmma` computes."""
        return range(0, self.tiling.rows, ROWS)

    @property
    def lefts(self) -> range:
        """First columns, in a share, of its patches."""
        return range(0, self.tiling.columns, self.width)

    @functools.cached_property
    def patches(self) -> list[tuple[int, int]]:
        """First row and column of each patch in its share, in the order of their stores."""
        return [(above, left) for above in self.bands for left in self.lefts]

    @property
    def boxes(self) -> tuple[tuple[Axes, Any] | None, tuple[Axes, Any] | None]:
        """Shape and dtype of the scales of lhs and of rhs that come with a step.

        None for scales that stay in global memory: those that are used at the end, and those of
        squares of 128, of which a warpgroup needs one a step.
        """
        tile_m, tile_n = self.tiling.tile
        return self.scaling.box(0, tile_m), self.scaling.box(1, tile_n)

    def tile(self, index: Array) -> Tile:
        """The tile of a block whose cluster takes the tile `index`.

        Tiles are counted in groups of `tiling.group` along M, in a group along M first: what
        neighbours in time read is still in L2.
        """
        tiles_m, tiles_n = self._tiles_of_matrix
        lead, index = lax.div(index, tiles_m * tiles_n), lax.rem(index, tiles_m * tiles_n)
        first = lax.div(index, self.tiling.group * tiles_n) * self.tiling.group
        index = lax.rem(index, self.tiling.group * tiles_n)
        rows = jnp.minimum(tiles_m - first, self.tiling.group)  # the last group has fewer
        across = lax.div(index, rows)
        if self.tiling.cluster == 2:
            across = across * self.tiling.cluster + lax.axis_index("cluster")
        return Tile(lead, first + lax.rem(index, rows), across)

    @property
    def _tiles_of_matrix(self) -> tuple[int, int]:
        tile_m, tile_n = self.tiling.tile
        return pl.cdiv(self.m, tile_m), pl.cdiv(self.n, tile_n * self.tiling.cluster)

    @property
    def _sizes(self) -> dict[str, Any]:
        """What a tiling needs to know to count bytes and registers."""
        added = 0 if self.add_to is None else self.add_to.itemsize
        return {"scaling": self.scaling, "itemsize": self.out_dtype.itemsize, "added": added}
