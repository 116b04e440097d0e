"""The quantizer in Pallas (Mosaic GPU) for tiles along the last two axes: one read of x.

Each block of threads copies a tile of x to shared memory and reads it from there in every
direction. The kernel calls the functions of `numerics` on registers, so its rules are the same.
The tiles can also be of rows that are gathered in the same read (`Gathered`).

A block of threads has T rows, and T/S scales for each. TMA writes T scales that are adjacent in
memory. So the kernel writes scales with the rows as last axis. XLA then gives them the axes of x. A
scale of T x T is written by itself, in the order of its copy. So no matmul needs it transposed.

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
  scale.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType

from jaxfp8._quantized_tensor import Cast, CastExtras, Direction, QuantizedTensor
from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels._dispatch import traced_once
from jaxfp8.kernels._mosaic_source import Reader, Staged, make_reader, operands_of
from jaxfp8.kernels._mosaic_tiles import (
    PART,
    RAGGED,
    ColumnSums,
    T,
    check_jax,
    grid,
    load,
    load_parts,
    place,
    shared_tile,
)
from jaxfp8.kernels._on_mesh import mesh_of, on_mesh
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._rounding import kernel_cast
from jaxfp8.numerics._scale import ScaleRule
from jaxfp8.prologues._prologue import Gathered, Source, prologue_of
from jaxfp8.sharding._amax import vary_as

_SIDES = (128, 32)


class _Copy(NamedTuple):
    """Values and scales of a copy: types, refs inside the kernel, arrays after it."""

    values: Any
    scales: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """The tiles of one copy: 1 x S, S x 1 or S x S."""

    side: int  # S
    transposed: bool  # whether the copy is written transposed; in tiles of S x 1 it always is
    square: bool  # whether tiles are S x S

    @property
    def whole(self) -> bool:
        """Whether the tile of a block of threads has one scale."""
        return self.square and self.side == T

    @property
    def tile(self) -> tuple[int, int]:
        if self.square:
            return self.side, self.side
        return (self.side, 1) if self.transposed else (1, self.side)

    @property
    def cells(self) -> int:
        """The number of scales in a row of the tile of a block of threads."""
        return T // self.side

    def written(self, shape: Axes, format: Format, rule: ScaleRule) -> _Copy:
        """The arrays that the kernel writes: values [L, M, K] and scales [L, K/S, M].

        If a tile of T x T has one scale, scales are [L, M/T, K/T], as a matmul reads them. Of a
        transposed copy M and K are exchanged.
        """
        lead, m, k = shape
        rows, columns = (k, m) if self.transposed else (m, k)
        down, across = pl.cdiv(rows, T), pl.cdiv(columns, T)
        # There are scales for whole tiles of T, because Pallas copies one dimension without a check
        # for the end of a row. For squares smaller than T, each scale is written for every row.
        scales = (down, across) if self.whole else (across * self.cells, down * T)
        return _Copy(
            jax.ShapeDtypeStruct((lead, rows, columns), format.dtype),
            jax.ShapeDtypeStruct((lead, *scales), _dtype(rule)),
        )

    def staged(self, written: _Copy, rule: ScaleRule) -> _Copy:
        """Shared memory for the tile of a block of threads. A single scale is stored directly."""
        scales = None if self.whole else plgpu.SMEM((self.cells, T), _dtype(rule))
        return _Copy(shared_tile(written.values.dtype, written.values.shape), scales)

    def with_axes_of_x(self, copy: _Copy, shape: Axes, rule: ScaleRule) -> _Copy:
        """The arrays that the kernel wrote, with the axes of x."""
        *lead, m, k = shape
        values, scale = copy
        # If the reader transposes back, XLA drops both transpositions.
        if self.square and self.side < T:
            scale = scale[..., :: self.side]
        if self.transposed:
            values = values.swapaxes(1, 2)
        # A single scale of T x T is in the order of its copy, others have rows last: see `written`.
        if self.transposed == self.whole:
            scale = scale.swapaxes(1, 2)
        if rule.scale_format is not None:
            scale = lax.bitcast_convert_type(scale, rule.scale_format.dtype)
        down, across = self.tile
        scale = scale[:, : pl.cdiv(values.shape[1], down), : pl.cdiv(k, across)]
        return _Copy(
            values.reshape(shape), scale.reshape(*lead, pl.cdiv(m, down), pl.cdiv(k, across))
        )


def _tiling_of(direction: Direction, ndim: int) -> _Tiling:
    """The tiling of an array of `ndim` axes, for tiles of 1 x S, S x 1, S x S."""
    granularity = direction.granularity
    check_sides(granularity, ndim)
    *lead, m, k = granularity.along(ndim)
    if any(side > 1 for side in lead):
        raise _cannot(granularity, ndim)
    transposed = direction.transposed if m == k else k == 1
    return _Tiling(side=max(m, k), transposed=transposed, square=m == k)


def check_sides(granularity: AbstractGranularity, ndim: int) -> None:
    """Raise NotImplementedError unless a tile has one side S, along one axis or two."""
    sides = [side for side in granularity.along(ndim) if side > 1]
    if ndim < 2 or len(set(sides)) != 1 or len(sides) > 2 or sides[0] not in _SIDES:
        raise _cannot(granularity, ndim)


def _cannot(granularity: AbstractGranularity, ndim: int) -> NotImplementedError:
    return NotImplementedError(
        f"The cast has {granularity!r} for an array of {ndim} axes. This kernel takes tiles of "
        f"1 x S, S x 1 and S x S along the last two axes, with S in {_SIDES}. Write casts='xla' in "
        "fp8.Kernels."
    )


def _dtype(rule: ScaleRule) -> DType:
    """The dtype in which the kernel writes scales. It writes E8M0 as bytes."""
    return jnp.dtype(jnp.float32 if rule.scale_format is None else jnp.uint8)


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


def _check_gathered(x: Gathered) -> None:
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
    """A `Reader` of [1, R P, K], whose rows come from an array [1, T, K]."""

    # Its operands are the array, and for each S rows the first row and the number of rows.

    def staged(self, *, beside: int = 0) -> Staged:
        (_, dtype), *_ = self.operands
        count = T // _PART_COLUMNS
        tiles = [shared_tile(dtype, self.shape), plgpu.SMEM((count, T, _PART_COLUMNS), dtype)]
        return Staged(tiles, plgpu.Barrier(num_arrivals=count + beside))

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
                loaded = load(arrived.at[index, rows], optimized=False).astype(jnp.float32)
                kept = jnp.where(row + part * PART < rows_here, loaded, jnp.zeros_like(loaded))
                tile[rows, pl.ds(index * _PART_COLUMNS, _PART_COLUMNS)] = kept.astype(tile.dtype)

        lax.fori_loop(0, T // PART, move, None)
        # All threads have stored their rows. Without this, a thread that reads the tile by columns
        # could read where another warp has not stored yet.
        plgpu.commit_smem()
        return tile


def _gathering_reader(x: Gathered) -> tuple[_GatheringReader, list[Array]]:
    """The reader, and the operands as it reads them."""
    count, tile, k = x.shape
    part = jnp.arange(tile // T, dtype=jnp.int32)[None, :] * T
    first_row = (x.first_row[:, None] + part).reshape(-1)
    rows = jnp.clip(x.count[:, None] - part, 0, T).reshape(-1)
    # A part without rows reads the first rows of the array, and drops them.
    first_row = jnp.where(rows > 0, first_row, 0)
    gathering = _GatheringReader((1, count * tile, k), None, (("tile", x.dtype),))
    return gathering, [x.rows[None], first_row, rows]


# The kernel of the quantizer in tiles, in Pallas (Mosaic GPU).
#
# "Tile" alone is the T x T of a block of threads. A cell is the part of one of its rows that has
# one scale: S values.


class _Written(NamedTuple):
    """What the kernel writes: types, refs inside the kernel, arrays after it."""

    copies: Sequence[_Copy]  # see `_Tiling.written`
    sums: Any  # `ColumnSums.result`, or None


class _Scratch(NamedTuple):
    """Shared memory of the kernel."""

    read: Staged
    copies: Sequence[_Copy]
    sums: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TilesKernel:
    """The kernel that writes copies of x [L, M, K] in tiles, their scales, and sums of columns."""

    source: Reader
    format: Format
    rule: ScaleRule
    tilings: tuple[_Tiling, ...]
    sums: ColumnSums | None

    def __call__(self, operands: Sequence[Array], shape: Axes) -> tuple[Array, ...]:
        """Values and scales of each copy, then sums, with the axes of x [*shape]."""
        written: _Written = traced_once(_TilesKernel.run, self, operands)
        results: list[Array] = []
        for tiling, copy in zip(self.tilings, written.copies, strict=True):
            results += tiling.with_axes_of_x(copy, shape, self.rule)
        if self.sums:
            results.append(self.sums.shaped(written.sums, shape))
        return tuple(results)

    def run(self, operands: Sequence[Array]) -> _Written:
        """What the kernel writes."""
        copies = [each.written(self.source.shape, self.format, self.rule) for each in self.tilings]
        staged = [
            each.staged(copy, self.rule) for each, copy in zip(self.tilings, copies, strict=True)
        ]
        out_type = _Written(copies, self.sums.result if self.sums else None)
        sums = self.sums.staged if self.sums else None
        (result,) = plgpu.kernel(
            self.body,
            out_type=(out_type,),
            scratch_types=(_Scratch(self.source.staged(), staged, sums),),
            **grid(self.source.shape),
        )(operands)
        written: _Written = result
        return written

    def body(self, operands: Sequence[Any], written: _Written, scratch: _Scratch) -> None:
        """The work of a block of threads. The name "body" is the kernel's name in the program."""
        self.source.start(operands, scratch.read)
        tile = self.source.tile(operands, scratch.read)
        # Columns are summed while the first transposed copy has them in registers. Without such a
        # copy, `ColumnSums.write` loads them.
        summing = next((n for n, each in enumerate(self.tilings) if each.transposed), None)
        for n, (tiling, staged, copy) in enumerate(
            zip(self.tilings, scratch.copies, written.copies, strict=True)
        ):
            at = place(self.source.shape).of_copy(transposed=tiling.transposed)
            # A square of T x T is loaded at once, because its first row is cast with the amax of
            # all rows. Smaller squares fit in a part, which needs fewer registers.
            for index, rows in load_parts(
                tile, transposed=tiling.transposed, rows=T if tiling.whole else PART
            ):
                staged.values[index], scales = self._encode(rows, tiling)
                if self.sums and n == summing:
                    self.sums.take(scratch.sums, index, rows)
                for cell, scale in enumerate(scales):
                    if staged.scales is None:  # one scale for the tile: it is equal in all rows
                        copy.scales[at.matrix, at.row, at.column] = jnp.max(scale)
                    else:
                        staged.scales[cell, index] = scale
            # All threads have stored values, scales and sums, and TMA sees them. Without this, TMA
            # would write what a slower warp has not stored yet.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.values, copy.values.at[at.window])
            if staged.scales is not None:
                cells = pl.ds(at.column * tiling.cells, tiling.cells)
                where = at.matrix, cells, pl.ds(at.row * T, T)
                plgpu.copy_smem_to_gmem(staged.scales, copy.scales.at[where])
        if self.sums:
            self.sums.write(scratch.sums, written.sums, tile if summing is None else None)
        # TMA has read all copies. Before that the block must not end: its shared memory would go to
        # another block. No copy waits for another one, because each has its own shared memory.
        plgpu.wait_smem_to_gmem(0)

    def _encode(self, rows: Array, tiling: _Tiling) -> tuple[Array, list[Array]]:
        """Rows [R, T] in FP8, and T/S arrays [R] of scales, one for each cell of a row."""
        multipliers, scales = [], []
        for first in range(0, T, tiling.side):
            cell = rows[:, first : first + tiling.side]
            largest = jnp.max(magnitude(cell, kernel_language=True), axis=1)
            if tiling.square:
                largest = _largest_of_squares(largest, tiling.side)
            multiplier, scale = self.rule.apply(largest, self.format, kernel_language=True)
            multipliers.append(lax.broadcast_in_dim(multiplier, cell.shape, (0,)))
            # Pallas writes bytes. `Tiling.with_axes_of_x` makes E8M0 of them.
            as_bytes = self.rule.scale_format is not None
            scales.append(lax.bitcast_convert_type(scale, jnp.uint8) if as_bytes else scale)
        return kernel_cast(rows, jnp.concatenate(multipliers, axis=1), self.format), scales


def _largest_of_squares(largest: Array, side: int) -> Array:
    """Amaxes [R] of rows as amaxes of squares: each is the largest of its group of `side` rows."""
    if len(largest) == side:
        return lax.broadcast_in_dim(jnp.max(largest), largest.shape, ())
    square = lax.broadcasted_iota(jnp.int32, largest.shape, 0) // side
    result = jnp.zeros_like(largest)
    for index in range(len(largest) // side):
        inside = square == index
        result = jnp.where(inside, jnp.max(jnp.where(inside, largest, 0.0)), result)
    return result


def quantize_in_tiles(x: Source, cast: Cast) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """`cast_copies` if every copy is in tiles along the last two axes of x."""
    tilings = tuple(_tiling_of(direction, x.ndim) for direction in cast.directions)
    side, count = tilings[0].side, len(tilings)
    if any(tiling.side != side for tiling in tilings):
        raise NotImplementedError(
            f"The tiles have different sides, {[tiling.tile for tiling in tilings]}. This kernel "
            "needs one side in all directions. Quantize in each direction by itself."
        )
    if isinstance(x, Gathered):
        return _of_gathered(x, cast, tilings), CastExtras()
    operands, prologue = operands_of(x), prologue_of(x)

    def local(*arrays: Array) -> tuple[Array, ...]:
        source, read = make_reader(arrays, prologue, separate=cast.separate)
        sums = ColumnSums(source.shape, side) if cast.column_sums else None
        kernel = _TilesKernel(
            source=source, format=cast.format, rule=cast.rule, tilings=tilings, sums=sums
        )
        return kernel(read, arrays[0].shape)

    cells = tuple(cell for tiling in tilings for cell in ((1, 1), tiling.tile))
    cells += ((side, 1),) * cast.column_sums
    # Each shard must be an array that the kernel takes, with axes of multiples of RAGGED. It must
    # also have whole tiles.
    sides = tuple(max(RAGGED, *along) for along in zip(*cells, strict=True))
    results = on_mesh(local, sides, cells)(*operands)
    values, scales = results[: 2 * count : 2], results[1 : 2 * count : 2]
    extras = CastExtras(column_sums=results[-1] if cast.column_sums else None)
    return cast.copies(values, scales, x.dtype), extras


def _of_gathered(
    x: Gathered, cast: Cast, tilings: tuple[_Tiling, ...]
) -> tuple[QuantizedTensor, ...]:
    """`cast_copies` of rows that the kernel gathers, on one device or in `shard_map`."""
    _check_gathered(x)
    kinds = {*mesh_of(x.rows).axis_types}
    if kinds not in ({AxisType.Manual}, set()) and mesh_of(x.rows).size > 1:
        raise NotImplementedError(
            f"The mesh is {mesh_of(x.rows)}. Gathered rows may be on any of its devices. Call it "
            "inside jax.shard_map, with all axes of the mesh."
        )

    @sequential_vmap
    def call(x: Gathered) -> tuple[Array, ...]:
        source, read = _gathering_reader(x)
        kernel = _TilesKernel(
            source=source, format=cast.format, rule=cast.rule, tilings=tilings, sums=None
        )
        return tuple(vary_as(each, x.rows) for each in kernel(read, x.shape))

    results = call(x)
    return cast.copies(results[::2], results[1::2], x.dtype)
