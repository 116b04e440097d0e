"""The quantizer in Pallas (Mosaic GPU), for Hopper and Blackwell.

It reads x once for all copies in tiles. Scales that span x need an amax before the first value is
cast, so x is read twice: once for all amaxes and once for all copies. XLA reads x three times for
rows and columns, and then transposes values.

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
  scale.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.kernels._mosaic_source import Reader, Staged, make_reader, operands_of
from jaxfp8.kernels._mosaic_tiles import T, count_tiles, grid, load_parts, place
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.kernels.cast._mosaic import copies
from jaxfp8.kernels.quantize._mosaic_tiling import check_sides, quantize_in_tiles
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._exact import to_float32
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._per_block import PerBlock, devices_of, is_explicit, merge_axes
from jaxfp8.prologues._prologue import Produced, Source, prologue_of, value_of


def cast_copies(
    x: Source,
    cast: Cast,
    scales: Sequence[tuple[Array, Array]] | None,
    *,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.cast._api.cast_copies`.

    Raises NotImplementedError for stochastic rounding and for a scale for each value. Tiles must be
    1 x S, S x 1 or S x S, with one S of 128 or 32 in all directions, and scales of tiles unknown.
    `operands_of` refuses some arrays, and `on_mesh` some meshes.
    """
    del key
    in_tiles = any(granularity.in_tiles for granularity in cast.granularities)
    if cast.rounding != "nearest" or (in_tiles and scales is not None):
        raise NotImplementedError(
            f"The cast has granularities={cast.granularities!r} and rounding={cast.rounding!r}, "
            f"and scales are known: {scales is not None}. This kernel needs rounding='nearest', "
            "and finds scales of tiles itself. Write casts='xla' in fp8.Kernels."
        )
    if in_tiles:
        return _in_tiles(x, cast)
    if scales is None:
        scales = _scales(x, cast)
    multipliers, known = zip(*scales, strict=True)
    values, extras = copies(x, cast, multipliers)
    return cast.copies(values, known, x.dtype), extras


def _in_tiles(x: Source, cast: Cast) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """`cast_copies` if every copy is in tiles."""
    # Before axes are merged, so that an error names the tile that the user wrote.
    for granularity in cast.granularities:
        check_sides(granularity, x.ndim)
    if x.ndim > 2 and not (merged := _Merged.of(x.shape, cast)).is_trivial:
        copies, _ = _in_tiles(merged.source(x), merged.cast(cast))
        return merged.copies(copies, x, cast), CastExtras()
    return quantize_in_tiles(x, cast)


# Arrays whose tiles run along other axes than the last two, reshaped to matrices.
#
# Attention has such arrays. The gradient of heads, [B, S, H, D], is contracted along S in one
# matmul and along D (or H and D) in another. Its tiles of 128x1 run along S, and its tiles of 1x128
# along D. If H and D are merged into one axis, both kinds of tiles are tiles of the last two axes.
#
# Letters: B batch, S tokens, H heads, D values of a head.


@dataclasses.dataclass(frozen=True)
class _Merged:
    """How trailing axes of an array become one."""

    counts: Axes  # for each axis of the merged array, how many axes of x it holds
    rows: int  # the axis of x in front of the merged axes

    @classmethod
    def of(cls, shape: Axes, cast: Cast) -> "_Merged":
        """How to merge the axes of an array with tiles along the last axis or one before it."""
        ndim = len(shape)
        tiles = [granularity.along(ndim) for granularity in cast.granularities]
        rows = max((axis for tile in tiles for axis in range(ndim - 1) if tile[axis] > 1),
                   default=ndim - 2)  # fmt: skip
        # A ragged last tile of one head would continue into the next head of the merged axis.
        if rows < ndim - 2 and any(shape[-1] % tile[-1] for tile in tiles):
            raise NotImplementedError(
                f"The array has shape {list(shape)} and tiles along axis {rows}. The kernel merges "
                "the axes after it, whose last axis has no whole tiles. Pad the last axis."
            )
        return cls((1,) * (rows + 1) + (ndim - 1 - rows,), rows)

    @property
    def is_trivial(self) -> bool:
        """Whether no axes are merged."""
        return self.counts[-1] == 1

    def source(self, x: Source) -> Source:
        """x with merged axes. It refuses an array of a prologue that has only some of them."""
        if not isinstance(x, Produced):
            return self._array(value_of(x))
        for each in x.operands:
            last = each.shape[self.rows + 1 :]
            if last != x.shape[self.rows + 1 :] and math.prod(last) > 1:
                raise NotImplementedError(
                    f"prologue={x.prologue!r} of {list(x.shape)} reads an array of "
                    f"{list(each.shape)}. The kernel merges trailing axes, and the array has only "
                    "some of them. Quantize prologue(*arrays)."
                )
        return Produced(self._array(x.value), tuple(map(self._array, x.operands)), x.prologue)

    def cast(self, cast: Cast) -> Cast:
        """The cast of the merged array. It sums no columns: x has other columns than that array."""
        directions = tuple(
            dataclasses.replace(direction, granularity=PerBlock((tile[self.rows], tile[-1])))
            for direction in cast.directions
            for tile in [direction.granularity.along(self.rows + 1 + self.counts[-1])]
        )
        return dataclasses.replace(cast, directions=directions, column_sums=False)

    def copies(
        self, copies: tuple[QuantizedTensor, ...], x: Source, cast: Cast
    ) -> tuple[QuantizedTensor, ...]:
        """Copies of the merged array as copies of x."""
        like = value_of(x)
        values = tuple(_shaped(copy.values, like.shape, like) for copy in copies)
        scales = tuple(
            _shaped(copy.scale, granularity.scale_shape(like.shape), like)
            for copy, granularity in zip(copies, cast.granularities, strict=True)
        )
        return cast.copies(values, scales, like.dtype)

    def _array(self, x: Array) -> Array:
        if is_explicit(x):
            sharding = jax.typeof(x).sharding
            if any(devices_of(sharding.mesh, each) > 1 for each in sharding.spec[self.rows + 2 :]):
                raise NotImplementedError(
                    f"The array {list(x.shape)} is split as {sharding.spec}. The mesh splits an "
                    "axis that the kernel merges into the axis before it. Split the first of the "
                    f"merged axes, axis {self.rows + 1}."
                )
        return merge_axes(x, self.counts)


def _shaped(result: Array, shape: Axes, like: Array) -> Array:
    """A result of the merged array, with the axes and the sharding of x."""
    sharding = jax.typeof(like).sharding if is_explicit(like) else None
    return lax.reshape(result, shape, out_sharding=sharding)


# Scales that span x: of the tensor, of rows, of columns.

_Along: TypeAlias = Literal["tensor", "rows", "columns"]
_CELLS: dict[_Along, Axes] = {"tensor": (T, T), "rows": (1, T), "columns": (T, 1)}


def _scales(x: Source, cast: Cast) -> list[tuple[Array, Array]]:
    """Multipliers and scales, for the granularities that `_along` accepts: the first read of x."""
    kinds = tuple(_along(granularity, x.ndim) for granularity in cast.granularities)
    largest = _largest_of_tiles(x, tuple(dict.fromkeys(kinds)))
    return [
        cast.rule.apply(to_float32(granularity.maximum(largest[kind])), cast.format)
        for granularity, kind in zip(cast.granularities, kinds, strict=True)
    ]


def _along(granularity: AbstractGranularity, ndim: int) -> _Along:
    """Which values share a scale: all of x, those along K, or those along M (and axes in front)."""
    if granularity.in_one:
        return "tensor"
    if granularity.in_rows and ndim >= 2:
        if not granularity.has_cells_along(-1, ndim):
            return "rows"
        if not granularity.has_cells_along(-2, ndim):
            return "columns"
    raise NotImplementedError(
        f"The cast has {granularity!r} for an array of {ndim} axes. This kernel takes one scale "
        "for the tensor, for each row or for each column. Write casts='xla' in fp8.Kernels."
    )


def _largest_of_tiles(x: Source, kinds: tuple[_Along, ...]) -> dict[_Along, Array]:
    """Partial amaxes in one read of x: a scale cell is cut at the borders of tiles T x T.

    There is one array for each kind: "tensor" [.., M/T, K/T], "rows" [.., M, K/T], "columns"
    [.., M/T, K]. XLA reduces them to the amaxes of the cells.
    """
    operands, prologue = operands_of(x), prologue_of(x)

    def local(*arrays: Array) -> tuple[Array, ...]:
        source, read = make_reader(arrays, prologue)
        *lead, m, k = arrays[0].shape
        results = []
        # The kernel writes whole tiles. Amaxes past the end of the array are cut off.
        for kind, largest in zip(kinds, _AmaxKernel(source, kinds)(read), strict=True):
            down, across = _CELLS[kind]
            largest = largest.swapaxes(1, 2) if kind == "rows" else largest
            largest = largest[:, : pl.cdiv(source.shape[1], down), : pl.cdiv(k, across)]
            results.append(largest.reshape(*lead, pl.cdiv(m, down), pl.cdiv(k, across)))
        return tuple(results)

    cells = tuple(_CELLS[kind] for kind in kinds)
    return dict(zip(kinds, on_mesh(local, (T, T), cells)(*operands), strict=True))


class _Scratch(NamedTuple):
    """Shared memory of the kernel: what it reads, and for each kind a line of amaxes or None."""

    read: Staged
    lines: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class _AmaxKernel:
    """The kernel that finds amaxes in x [L, M, K]: of rows, of columns, and of tiles."""

    source: Reader
    kinds: Sequence[_Along]

    def __call__(self, operands: Sequence[Array]) -> Sequence[Array]:
        lead, (down, across) = self.source.shape[0], count_tiles(self.source.shape)
        # M and K of rows and columns are rounded up to whole tiles: Pallas copies one dimension
        # without a check for the end of a row.
        shapes = {
            "tensor": (lead, down, across),
            "rows": (lead, across, down * T),
            "columns": (lead, down, across * T),
        }
        lines = [None if kind == "tensor" else plgpu.SMEM((T,), jnp.float32) for kind in self.kinds]
        (results,) = plgpu.kernel(
            self.body,
            out_type=([jax.ShapeDtypeStruct(shapes[kind], jnp.float32) for kind in self.kinds],),
            scratch_types=(_Scratch(self.source.staged(), lines),),
            **grid(self.source.shape),
        )(operands)
        return results

    def body(self, operands: Sequence[Any], results: Sequence[Any], scratch: _Scratch) -> None:
        """The work of a block of threads. The name "body" is the kernel's name in the program."""
        self.source.start(operands, scratch.read)
        tile = self.source.tile(operands, scratch.read)
        for kind, result, line in zip(self.kinds, results, scratch.lines, strict=True):
            at = place(self.source.shape).of_copy(transposed=kind == "columns")
            amaxes = []
            for index, rows in load_parts(tile, transposed=kind == "columns"):
                amaxes.append(jnp.max(magnitude(rows, kernel_language=True), axis=1))
                if line is not None:
                    line[index] = amaxes[-1]
            if line is None:  # two parts, of PART = T / 2 rows each
                result[tuple(at)] = jnp.max(jnp.maximum(*amaxes))
            else:
                plgpu.commit_smem()  # all threads have stored amaxes, and TMA sees them
                where = at.matrix, at.column, pl.ds(at.row * T, T)
                plgpu.copy_smem_to_gmem(line, result.at[where])
        # TMA has read all lines. Before that the block must not end: its shared memory would go to
        # another block.
        plgpu.wait_smem_to_gmem(0)
