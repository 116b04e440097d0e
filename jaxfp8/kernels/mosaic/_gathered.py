"""How a kernel in Pallas (Mosaic GPU) reads tiles of rows that begin at any row of an array.

The array in shared memory that threads read by rows and by columns is permuted in boxes of 8 rows,
so TMA fills it from multiples of 8 rows only. Rows of a group begin anywhere. So TMA copies them to
memory that has no boxes. Threads move them from there, and write 0 in the place of rows that
another group has.

Letters: T rows, R tiles of P rows, K values of a row; a block of threads reads S x S, S = 128.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.mosaic._source import Reader, Staged
from jaxfp8.kernels.mosaic._tiles import PART, T, check_jax, place, shared_tile
from jaxfp8.prologues._prologue import Gathered

_COLUMNS = 64
"""Columns that are copied and moved at once.

Each of these parts of a tile has shared memory of its own. Pallas permutes this memory, too: 16
bytes change places by the bits 7 to 9 of their address. But it adds the first column of a slice
after that. So a slice that begins at byte 128 of a row would be read from wrong places (jax 0.11,
seen on an H200).
"""
_BOX = 128
"""Bytes of a box. Pallas copies whole boxes only, so a row must have a whole number of them.

It raises ValueError while it compiles the kernel if the last box of a row is not full.
"""


def check_gathered(x: Gathered) -> None:
    """Raise NotImplementedError for rows that TMA or Pallas cannot copy."""
    check_jax()
    _, tile, k = x.shape
    size = x.dtype.itemsize
    if size > 4 or not x.value.size or tile % T or k * size % _BOX:
        raise NotImplementedError(
            f"Tiles of {tile} rows are gathered from {x.dtype}{list(x.rows.shape)}. The kernel "
            f"needs tiles of multiples of {T} rows, rows of multiples of {_BOX} bytes, and at most "
            f"4 bytes a value. Pad the rows to a multiple of {max(1, _BOX // size)} values, or "
            "write casts='xla' in fp8.Kernels."
        )


@dataclasses.dataclass(frozen=True)
class GatheringReader(Reader):
    """A `Reader` of [1, R P, K], whose rows come from an array [1, T, K].

    Its operands are the array, and for each S rows of a tile the first row and the number of rows.
    """

    def staged(self, *, beside: int = 0) -> Staged:
        (_, dtype), *_ = self.operands
        parts = T // _COLUMNS
        tiles = [shared_tile(dtype, self.shape), plgpu.SMEM((parts, T, _COLUMNS), dtype)]
        return Staged(tiles, plgpu.Barrier(num_arrivals=parts + beside))

    def start(self, operands: Sequence[Any], staged: Staged) -> None:
        array, first_row, count = operands
        at = place(self.shape)
        rows = pl.ds(first_row[at.row], T)
        for part in range(T // _COLUMNS):
            columns = pl.ds(at.column * T + part * _COLUMNS, _COLUMNS)
            here = staged.operands[1].at[part]
            plgpu.copy_gmem_to_smem(array.at[0, rows, columns], here, staged.arrived)
        # The barrier is for the copy. The number of rows is read again in `tile`, by all threads.
        del count

    def tile(self, operands: Sequence[Any], staged: Staged) -> Any:
        """The tile in shared memory, permuted, once it has arrived and been moved."""
        plgpu.barrier_wait(staged.arrived)
        tile, arrived = staged.operands
        rows_here = operands[2][place(self.shape).row]

        def move(part: Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(part * PART, PART), PART)
            shape = PART, _COLUMNS
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            for index in range(T // _COLUMNS):
                load: Any = plgpu.load  # before jax 0.11 it has no layout=
                loaded = load(
                    arrived.at[index, rows], layout=plgpu.Layout.WGMMA, optimized=False
                ).astype(jnp.float32)
                kept = jnp.where(row + part * PART < rows_here, loaded, jnp.zeros_like(loaded))
                tile[rows, pl.ds(index * _COLUMNS, _COLUMNS)] = kept.astype(tile.dtype)

        lax.fori_loop(0, T // PART, move, None)
        # All threads have stored their rows. Without this, a thread that reads the tile by columns
        # could read where another warp has not stored yet.
        plgpu.commit_smem()
        return tile


def gathering_reader(x: Gathered) -> tuple[GatheringReader, list[Array]]:
    """The reader, and the operands as it reads them."""
    count, tile, k = x.shape
    part = jnp.arange(tile // T, dtype=jnp.int32)[None, :] * T
    first_row = (x.first_row[:, None] + part).reshape(-1)
    rows = jnp.clip(x.count[:, None] - part, 0, T).reshape(-1)
    # A part without rows reads the first rows of the array, and drops them.
    first_row = jnp.where(rows > 0, first_row, 0)
    reader = GatheringReader((1, count * tile, k), None, (("tile", x.dtype),))
    return reader, [x.rows[None], first_row, rows]
