"""The share of a tile: the part that one consumer computes.

The two shares of a tile are one above the other, or side by side (`Tiling.beside`).
"""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Tile
from jaxfp8.kernels.scaled_matmul.hopper._memory import Block
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One consumer's share of one tile.

    Attributes:
      block: the matmul, and the memory of the block of threads.
      warpgroup: which consumer, 0 or 1.
      before: the number of steps of the tiles that the block has computed before this one.
      tile: which tile of the product.
      row: the share's first row in the tile.
      column: its first column in the tile.
      column_of_product: its first column in the product.
    """

    block: Block
    warpgroup: Array
    before: Array
    tile: Tile
    row: Array | int
    column: Array | int
    column_of_product: Array

    def patch(self, index: int) -> tuple[Any, Any]:
        """Rows and columns of the product that a patch covers, with all rows of ragged tiles."""
        matmul = self.block.matmul
        above, left = matmul.patches[index]
        rows = pl.ds(self.tile.down * matmul.tiling.tile[0] + self.row + above, ROWS)
        return rows, pl.ds(self.column_of_product + left, matmul.width)

    def rows(self, above: int) -> Any:
        """ROWS rows of the share, as rows of the tile."""
        return pl.ds(self.row + above, ROWS)

    @property
    def columns(self) -> Any:
        """All columns of the share, as columns of the tile."""
        return pl.ds(self.column, self.block.matmul.tiling.columns)
