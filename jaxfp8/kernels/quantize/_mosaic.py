"""The quantizer in Pallas (Mosaic GPU), for Hopper and Blackwell.

It reads x once for all copies in tiles. Scales that span x need two reads (`_mosaic_axes`).

Each block of threads copies a tile of x to shared memory and reads it from there in every
direction. The kernel calls the functions of `numerics` on registers, so its rules are the same.

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
  scale.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType

from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._mosaic_source import (
    Reader,
    Staged,
    check_gathered,
    gathering_reader,
    operands_of,
    reader,
)
from jaxfp8.kernels._mosaic_tiles import PART, RAGGED, ColumnSums, Merged, T, grid, parts, place
from jaxfp8.kernels._on_mesh import mesh_of, on_mesh
from jaxfp8.kernels.quantize import _mosaic_axes
from jaxfp8.kernels.quantize._mosaic_tiling import Copy, Tiling, check_sides, tiling_of
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._rounding import kernel_cast
from jaxfp8.prologues._prologue import Gathered, Source, prologue_of
from jaxfp8.sharding._amax import vary_as

# The kernel of the quantizer in tiles, in Pallas (Mosaic GPU).
#
# Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
#     scale. "Tile" alone is the T x T of a block of threads. A cell is the part of one of its rows
#     that
#     has one scale: S values.


class _Written(NamedTuple):
    """What the kernel writes: types, refs inside the kernel, arrays after it.

    Attributes:
      copies: see `Tiling.written`.
      sums: `ColumnSums.result`, or None.
    """

    copies: Sequence[Copy]
    sums: Any


class _Scratch(NamedTuple):
    """Shared memory of the kernel."""

    read: Staged
    copies: Sequence[Copy]
    sums: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TilesKernel:
    """The kernel that writes copies of x [L, M, K] in tiles with their scales, and sums of columns.

    Attributes:
      source: how x is read.
      cast: the format and the scale rule.
      tilings: the tiles of each copy.
      sums: how columns are summed; None if they are not.
    """

    source: Reader
    cast: Cast
    tilings: tuple[Tiling, ...]
    sums: ColumnSums | None

    def __call__(self, operands: Sequence[Array]) -> _Written:
        format, rule = self.cast.format, self.cast.rule
        copies = [each.written(self.source.shape, format, rule) for each in self.tilings]
        staged = [each.staged(copy, rule) for each, copy in zip(self.tilings, copies, strict=True)]
        written = _Written(copies, self.sums.result if self.sums else None)
        sums = self.sums.staged if self.sums else None
        (result,) = plgpu.kernel(
            self.body,
            out_type=(written,),
            scratch_types=(_Scratch(self.source.staged(), staged, sums),),
            **grid(self.source.shape),
        )(operands)
        return result

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
            for index, rows in parts(
                tile, transposed=tiling.transposed, rows=T if tiling.whole else PART
            ):
                staged.values[index], scales = _encode(rows, self.cast, tiling)
                if self.sums and n == summing:
                    self.sums.take(scratch.sums, index, rows)
                for cell, scale in enumerate(scales):
                    if staged.scales is None:  # one scale for the tile: it is equal in all rows
                        copy.scales[at.matrix, at.column, at.row] = jnp.max(scale)
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


def _encode(rows: Array, cast: Cast, tiling: Tiling) -> tuple[Array, list[Array]]:
    """Rows [R, T] in FP8, and T/S arrays [R] of scales, one for each cell of a row."""
    multipliers, scales = [], []
    for first in range(0, T, tiling.side):
        cell = rows[:, first : first + tiling.side]
        largest = jnp.max(magnitude(cell, kernel_language=True), axis=1)
        if tiling.square:
            largest = _largest_of_squares(largest, tiling.side)
        multiplier, scale = cast.rule.apply(largest, cast.format, kernel_language=True)
        multipliers.append(lax.broadcast_in_dim(multiplier, cell.shape, (0,)))
        # Pallas writes bytes. `Tiling.with_axes_of_x` makes E8M0 of them.
        as_bytes = cast.rule.scale_format is not None
        scales.append(lax.bitcast_convert_type(scale, jnp.uint8) if as_bytes else scale)
    return kernel_cast(rows, jnp.concatenate(multipliers, axis=1), cast.format), scales


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


# The quantizer in Pallas (Mosaic GPU), for Hopper and Blackwell.


def quantize(
    x: Source, cast: Cast, *, key: Array | None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.quantize._api.quantize`.

    Raises:
      NotImplementedError: for any of these:

        - tiles that are not 1 x S, S x 1 or S x S, with S = 128 or 32;
        - different S in two directions, or tiles together with other granularities;
        - a scale for each value;
        - stochastic rounding;
        - x is float64, or its last two axes are no multiples of 32;
        - some axes of the mesh are manual and others are not;
        - jax is older than 0.11.
    """
    del key
    if cast.rounding != "nearest":
        raise NotImplementedError(
            f"The cast has rounding={cast.rounding!r}. This kernel needs rounding='nearest'. Write "
            "casts='xla' in fp8.Kernels."
        )
    if any(granularity.in_tiles for granularity in cast.granularities):
        return _in_tiles(x, cast)
    return _mosaic_axes.quantize(x, cast)


def _in_tiles(x: Source, cast: Cast) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """`quantize` if every copy is in tiles."""
    for granularity in cast.granularities:
        check_sides(granularity, x.ndim)
    if x.ndim > 2 and not (merged := Merged.of(x.shape, cast)).is_trivial:
        copies, _ = _in_tiles(merged.source(x), merged.cast(cast))
        return merged.copies(copies, x, cast), CastExtras()
    tilings = tuple(tiling_of(direction, x.ndim) for direction in cast.directions)
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
        source, read = reader(arrays, prologue, separate=cast.separate)
        sums = ColumnSums(source.shape, side) if cast.column_sums else None
        written = _TilesKernel(source=source, cast=cast, tilings=tilings, sums=sums)(read)
        shape = arrays[0].shape
        summed = [] if sums is None else [sums.shaped(written.sums, shape)]
        copies = [
            tiling.with_axes_of_x(copy, shape, cast.rule)
            for tiling, copy in zip(tilings, written.copies, strict=True)
        ]
        return *(each for copy in copies for each in copy), *summed

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
    x: Gathered, cast: Cast, tilings: tuple[Tiling, ...]
) -> tuple[QuantizedTensor, ...]:
    """`quantize` of tiles of rows that the kernel reads where they are.

    Raises:
      NotImplementedError: see `check_gathered`, and for several devices outside of `jax.shard_map`.
    """
    check_gathered(x)
    kinds = {*mesh_of(x.rows).axis_types}
    if kinds not in ({AxisType.Manual}, set()) and mesh_of(x.rows).size > 1:
        raise NotImplementedError(
            f"The mesh is {mesh_of(x.rows)}. Gathered rows may be on any of its devices. Call it "
            "inside jax.shard_map, with all axes of the mesh."
        )

    @custom_vmap
    def call(x: Gathered) -> tuple[Array, ...]:
        source, read = gathering_reader(x)
        kernel = _TilesKernel(source=source, cast=cast, tilings=tilings, sums=None)
        return tuple(
            vary_as(each, x.rows)
            for tiling, copy in zip(tilings, kernel(read).copies, strict=True)
            for each in tiling.with_axes_of_x(copy, x.shape, cast.rule)
        )

    @call.def_vmap
    def batched(size: int, mapped: Any, x: Gathered) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        full = jax.tree.map(
            lambda leaf, there: leaf if there else jnp.broadcast_to(leaf, (size, *leaf.shape)),
            x, mapped[0],
        )  # fmt: skip
        return jax.lax.map(call, full), (True,) * (2 * len(tilings))

    results = call(x)
    return cast.copies(results[::2], results[1::2], x.dtype)
