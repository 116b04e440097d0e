"""How a block of threads in Pallas (Mosaic GPU) gets its tile: copied, computed or gathered.

A prologue is applied in place. Its result h replaces the tile of its first operand in shared
memory. Only then does the kernel read the tile. h is rounded to its dtype, as if it had been
written to memory and read again. So a kernel does the same in both cases, and it computes h once
for all directions.

Letters: L the leading axes as one, M, K the last two; T = 128.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels._mosaic_tiles import (
    PART,
    T,
    as_matrices,
    check_array,
    check_jax,
    place,
    shared_tile,
)
from jaxfp8.prologues._prologue import AbstractPrologue, Gathered, Produced, Source

# How a block of threads in Pallas (Mosaic GPU) gets its tile: from memory, or by a prologue.

Kind: TypeAlias = Literal["tile", "rows", "columns"]
"""An operand [L, M, K], or a value for each row [L, M] or column [L, K] in float32."""
# Columns for which a prologue is computed at once. With all T columns, two operands and an
# exponential take all 255 registers of a thread.
_COLUMNS = 64
# The layouts of one value a row, and of one value a column. Each thread gets the values for the
# elements of a tile that it holds, so scaling needs no exchange between threads.
ONE_A_ROW, _ONE_A_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def operands_of(x: Source) -> tuple[Array, ...]:
    """The arrays that a kernel reads for x, the first with its shape.

    Raises:
      NotImplementedError: see `check_array`.
    """
    if isinstance(x, Gathered):
        raise NotImplementedError(
            f"The rows of {list(x.rows.shape)} are gathered into tiles. This kernel reads whole "
            "arrays. Write casts='xla' in fp8.Kernels."
        )
    operands = x.operands if isinstance(x, Produced) else (x,)
    check_array(operands[0])
    return operands


class Staged(NamedTuple):
    """The shared memory in which a tile arrives: types for `plgpu.kernel`, then refs.

    Attributes:
      operands: for each operand a tile, or the values of its rows, or of its columns.
      arrived: the barrier that counts one arrival for each copy to shared memory.
    """

    operands: list[Any]
    arrived: Any


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a kernel reads an array [L, M, K].

    Attributes:
      shape: L, M, K.
      prologue: computes the array from its operands; None for an array in memory.
      operands: kind and dtype of each operand. An operand of kind "tile" has the array's shape.
    """

    shape: Axes
    prologue: AbstractPrologue | None
    operands: tuple[tuple[Kind, DType], ...]

    def staged(self, *, beside: int = 0) -> Staged:
        """Shared memory for the operands.

        Args:
          beside: how many more copies the kernel starts that arrive at the same barrier.
        """
        operands = [
            shared_tile(dtype, self.shape) if kind == "tile" else plgpu.SMEM((T,), dtype)
            for kind, dtype in self.operands
        ]
        return Staged(operands, plgpu.Barrier(num_arrivals=len(operands) + beside))

    def start(self, operands: Sequence[Any], staged: Staged) -> None:
        """Start to copy the operands of this block's tile. Each arrives at `staged.arrived`."""
        at, down, across = place(self.shape).window
        windows = {"tile": (at, down, across), "rows": (at, down), "columns": (at, across)}
        for (kind, _), operand, here in zip(self.operands, operands, staged.operands, strict=True):
            plgpu.copy_gmem_to_smem(operand.at[windows[kind]], here, staged.arrived)

    def tile(self, operands: Sequence[Any], staged: Staged) -> Any:
        """The tile in shared memory, once all copies have arrived and the prologue is applied."""
        del operands
        # The wait is for all copies, those that the kernel started itself included. Before it,
        # shared memory is not written yet.
        plgpu.barrier_wait(staged.arrived)
        tile = staged.operands[0]
        prologue = self.prologue
        if prologue is None:
            return tile

        def make(part: Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(part * PART, PART), PART)
            for first in range(0, T, _COLUMNS):
                columns = pl.ds(first, _COLUMNS)
                loaded = (
                    _loaded(kind, each, rows, columns)
                    for (kind, _), each in zip(self.operands, staged.operands, strict=True)
                )
                # In place: operand and result have one layout, so a warp overwrites only what it
                # has loaded itself.
                tile[rows, columns] = prologue.elementwise(*loaded).astype(tile.dtype)

        # The compiled program has this loop, too. Unrolled, its addresses would take registers from
        # the code after it.
        lax.fori_loop(0, T // PART, make, None)
        # All threads have stored h. Without this, a thread that reads the tile by columns could
        # read the operand where another warp has not stored h yet.
        plgpu.commit_smem()
        return tile


def _loaded(kind: Kind, staged: Any, rows: Any, columns: Any) -> Array:
    """Some rows and columns of a staged operand, in float32 registers."""
    index = {"tile": (rows, columns), "rows": (rows,), "columns": (columns,)}[kind]
    layout = {"tile": plgpu.Layout.WGMMA, "rows": ONE_A_ROW, "columns": _ONE_A_COLUMN}[kind]
    load: Any = plgpu.load  # before jax 0.11 it has no layout=
    loaded = load(staged.at[index], layout=layout).astype(jnp.float32)
    if kind == "tile":
        return loaded
    return lax.broadcast_in_dim(loaded, (PART, _COLUMNS), (0 if kind == "rows" else 1,))


def reader(
    operands: Sequence[Array], prologue: AbstractPrologue | None, *, separate: bool = False
) -> tuple[Reader, list[Array]]:
    """The reader, and the operands as it reads them.

    Args:
      operands: the first is [..., M, K]. Each axis of the others has the same size or size 1.
      prologue: see `Reader`.
      separate: whether the matrices [M, K] of the array stay separate. Otherwise they become one
        matrix, if that cuts no tile.
    """
    x, *others = operands
    # Matrices also stay separate if each has its own values for columns: the rows of one matrix
    # share these values.
    separate = separate or any(
        each.shape[-2] == 1 and each.size > each.shape[-1] for each in others
    )
    matrices = x.reshape(-1, *x.shape[-2:]) if separate else as_matrices(x)
    described: list[tuple[Kind, DType]] = [("tile", x.dtype)]
    arrays = [matrices]
    for each in others:
        if each.shape[-2:] == x.shape[-2:]:
            described.append(("tile", each.dtype))
            arrays.append(jnp.broadcast_to(each, x.shape).reshape(matrices.shape))
        else:
            described.append(("rows" if each.shape[-1] == 1 else "columns", each.dtype))
            arrays.append(lined(each, x.shape, len(matrices)))
    return Reader(matrices.shape, prologue, tuple(described)), arrays


def lined(values: Array, shape: Axes, matrices: int) -> Array:
    """Values of rows or columns as a kernel reads them: [L], [L, M] of rows, or [L, K] of columns.

    M or K is padded with zeros to whole tiles. Pallas copies one dimension without a check for the
    end of a row, so a row must not end inside a tile.
    """
    *lead, _, _ = shape
    if values.shape[-2] > 1 or matrices > 1:
        values = jnp.broadcast_to(values, (*lead, *values.shape[-2:]))
    flat = values.reshape(matrices, -1)
    return flat[:, 0] if flat.shape[1] == 1 else jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % T)))


# How a kernel in Pallas (Mosaic GPU) reads tiles of rows that begin at any row of an array.
#
# The array in shared memory that threads read by rows and by columns is permuted in boxes of 8
# rows, so TMA fills it from multiples of 8 rows only. Rows of a group begin anywhere. So TMA copies
# them to memory that has no boxes. Threads move them from there, and write 0 in the place of rows
# that another group has.
#
# Letters: T rows, R tiles of P rows, K values of a row; a block of threads reads S x S, S = 128.

_PART_COLUMNS = 64
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
class _GatheringReader(Reader):
    """A `Reader` of [1, R P, K], whose rows come from an array [1, T, K].

    Its operands are the array, and for each S rows of a tile the first row and the number of rows.
    """

    def staged(self, *, beside: int = 0) -> Staged:
        (_, dtype), *_ = self.operands
        parts = T // _PART_COLUMNS
        tiles = [shared_tile(dtype, self.shape), plgpu.SMEM((parts, T, _PART_COLUMNS), dtype)]
        return Staged(tiles, plgpu.Barrier(num_arrivals=parts + beside))

    def start(self, operands: Sequence[Any], staged: Staged) -> None:
        array, first_row, count = operands
        at = place(self.shape)
        rows = pl.ds(first_row[at.row], T)
        for part in range(T // _PART_COLUMNS):
            columns = pl.ds(at.column * T + part * _PART_COLUMNS, _PART_COLUMNS)
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
            shape = PART, _PART_COLUMNS
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            for index in range(T // _PART_COLUMNS):
                load: Any = plgpu.load  # before jax 0.11 it has no layout=
                loaded = load(
                    arrived.at[index, rows], layout=plgpu.Layout.WGMMA, optimized=False
                ).astype(jnp.float32)
                kept = jnp.where(row + part * PART < rows_here, loaded, jnp.zeros_like(loaded))
                tile[rows, pl.ds(index * _PART_COLUMNS, _PART_COLUMNS)] = kept.astype(tile.dtype)

        lax.fori_loop(0, T // PART, move, None)
        # All threads have stored their rows. Without this, a thread that reads the tile by columns
        # could read where another warp has not stored yet.
        plgpu.commit_smem()
        return tile


def gathering_reader(x: Gathered) -> tuple[_GatheringReader, list[Array]]:
    """The reader, and the operands as it reads them."""
    count, tile, k = x.shape
    part = jnp.arange(tile // T, dtype=jnp.int32)[None, :] * T
    first_row = (x.first_row[:, None] + part).reshape(-1)
    rows = jnp.clip(x.count[:, None] - part, 0, T).reshape(-1)
    # A part without rows reads the first rows of the array, and drops them.
    first_row = jnp.where(rows > 0, first_row, 0)
    reader = _GatheringReader((1, count * tile, k), None, (("tile", x.dtype),))
    return reader, [x.rows[None], first_row, rows]
