"""Sizes of a matmul that are known before the kernel runs, and the scales as it reads them.

The product [B, M, N] and the axis K are divided into:

  tile    the part of the product that one block of threads computes, `Tiling.tile`. A cluster of
          two blocks computes two tiles that are adjacent along N.
  share   the R x C of a tile that one warpgroup computes. Two shares make a tile.
  patch   the 64 x W of a share that is scaled and stored at once.
  step    T values along K of the operands of one tile. They are copied to shared memory together.

Letters: B batch, M N K the axes of the matmul, R x C a share, W the width of a patch; T = 128.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxfp8._geometry import Geometry, OperandAxes
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels.scaled_matmul._call import as_matrix, repeat_scale
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T, float32_of_bytes
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS, WARPGROUPS, NoRoomError, Tiling
from jaxfp8.numerics._formats import E8M0

_Grouping: TypeAlias = Literal["rows", "groups"]

_SHARED = 227 * 1024  # bytes that a block of threads can have on Hopper
# The registers with which each of 384 threads starts: 65536 / 384, rounded down to a multiple of 8.
# If ptxas links the kernel, it keeps to this number and ignores those of `_kernel`.
_REGISTERS = 168
# For addresses, counters and scales of rows: the most that compiled kernels had besides sums,
# products and scales of columns.
_OTHER_REGISTERS = 24
# The largest width of a patch in bytes: the widest swizzle of a row in shared memory.
_LINE = 128
_BARRIERS = 1024  # bytes for barriers, and for the gaps that align arrays


class Tile(NamedTuple):
    """Which tile of the product a block computes: its matrix, and indices that count tiles."""

    lead: Array  # along B
    down: Array  # along M
    across: Array  # along N
    # What follows differs from a dense matmul in grouped matmuls only.
    of_lhs: Array  # the matrix of lhs that the tile reads,
    of_rhs: Array  # and that of rhs
    first_step: Array | int
    steps: Array | int
    rows: tuple[Array, Array] | None = None  # the first row in the result, and how many are written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """Sizes, dtypes, tiling and scaling of one matmul. A tiling without room raises NoRoomError."""

    batch: int  # B
    m: int  # M, a multiple of 8
    n: int  # N, a multiple of 8
    k: int  # K, a multiple of T
    formats: tuple[DType, DType]  # dtypes of the values of lhs and rhs
    out_dtype: DType
    tiling: Tiling
    scaling: Scaling
    add_to: DType | None = None  # the dtype of C; None without C
    # Which axis is in groups. With "rows" B is 1, and M counts rows of tiles. With "groups" B
    # counts groups, and K the values of all groups.
    grouping: _Grouping | None = None
    out_rows: int | None = None  # the rows of the result, with grouping "rows"

    def __post_init__(self) -> None:
        if self.shared_bytes > _SHARED:
            raise NoRoomError(
                f"{self.tiling!r} needs {self.shared_bytes} bytes of shared memory, and a block "
                f"has {_SHARED}. Take fewer stages."
            )
        if self.registers > _REGISTERS:
            raise NoRoomError(
                f"{self.tiling!r} needs about {self.registers} registers a thread, and there are "
                f"{_REGISTERS}. Take a smaller tile."
            )

    @property
    def in_place(self) -> bool:
        """Whether the result is written over C: C has the result's dtype."""
        return self.add_to == self.out_dtype

    @property
    def steps(self) -> int:
        """Steps of one tile of a dense matmul, and of a tile of rows."""
        return self.k // T

    @property
    def tiles(self) -> int:
        """The number of tiles of the product. The two tiles of a cluster count as one."""
        tiles_m, tiles_n = self._tiles_of_matrix
        return self.batch * tiles_m * tiles_n

    @property
    def clusters(self) -> int:
        """The number of clusters that run. Each computes one tile after the other."""
        return min(self.tiles, self.tiling.blocks // self.tiling.cluster)

    @property
    def added(self) -> int:
        """The itemsize of C, or 0."""
        return 0 if self.add_to is None else self.add_to.itemsize

    @functools.cached_property
    def width(self) -> int:
        """W: the columns of a patch, whose 64 rows are scaled and stored at once."""
        # If square tiles have scales, a patch is at most one tile wide, so that it has one scale.
        scaled = self.scaling.tile if self.scaling.square else _LINE
        return min(self.tiling.columns, _LINE // max(self.out_dtype.itemsize, self.added), scaled)

    @functools.cached_property
    def slots(self) -> int:
        """How many patches of its result a warpgroup has in shared memory."""
        # A divisor of `patches`. So slots are used in turn, also from one tile to the next
        # (`_consumer._Epilogue._write`). As many as have room. At least 1: then `__post_init__`
        # raises if there is no room.
        part, patches = WARPGROUPS * ROWS * self.width, len(self.patches)
        free = _SHARED - _BARRIERS - self._bytes_of_stages - part * self.added
        room = max(1, free // (part * self.out_dtype.itemsize))
        return max(n for n in range(1, patches + 1) if patches % n == 0 and n <= room)

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that a block needs."""
        of_patches = self.slots * self.out_dtype.itemsize + self.added
        return self._bytes_of_stages + WARPGROUPS * ROWS * self.width * of_patches + _BARRIERS

    @property
    def _bytes_of_stages(self) -> int:
        """Bytes of values and scales of all stages."""
        tile = self.tiling.tile
        return self.tiling.stages * (sum(tile) * T + self.scaling.bytes_of_step(tile))

    @property
    def registers(self) -> int:
        """About how many registers a multiplying thread needs."""
        # For sums, a product of 64 x C, and scales of the columns of a patch.
        # A warpgroup has 128 threads, so a thread has R C / 128 sums. In the layout of `wgmma` it
        # has a quarter of the columns of a row.
        sums = self.tiling.rows * self.tiling.columns // 128
        product = 0 if self.scaling.fast else ROWS * self.tiling.columns // 128
        of_columns = 0 if self.scaling.square else self.width // 4
        if not self.scaling.at_end:
            return sums + product + of_columns + _OTHER_REGISTERS
        # Scales that are used at the end are read when no product is in registers any more. Their
        # registers then hold scales of columns, and a patch of C.
        addend = ROWS * self.width // 128 if self.added else 0
        return sums + max(product, of_columns + addend) + _OTHER_REGISTERS

    @property
    def bands(self) -> range:
        """The bands of a share: the first row of each group of ROWS rows, one `wgmma` each."""
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
        """`Scaling.box` of lhs and of rhs: the scales that come with a step."""
        tile_m, tile_n = self.tiling.tile
        return self.scaling.box(0, tile_m), self.scaling.box(1, tile_n)

    def tile(self, index: Array) -> Tile:
        """The tile of this block of a dense matmul. `index` is the number of its cluster's tile."""
        # The numbers run along M first, in groups of `tiling.group` tiles, and then along N. So
        # tiles that are computed at one time read the same rows and columns, which are still in L2.
        tiles_m, tiles_n = self._tiles_of_matrix
        lead, index = lax.div(index, tiles_m * tiles_n), lax.rem(index, tiles_m * tiles_n)
        first = lax.div(index, self.tiling.group * tiles_n) * self.tiling.group
        index = lax.rem(index, self.tiling.group * tiles_n)
        across, row = self._in_group(index, first + self.tiling.group > tiles_m)
        if self.tiling.cluster == 2:
            across = across * self.tiling.cluster + lax.axis_index("cluster")
        return Tile(lead, first + row, across, lead, lead, 0, self.steps)

    def _in_group(self, index: Array, is_last: Array) -> tuple[Array, Array]:
        """Column and row of a tile by its number in its group. The last one may have fewer rows."""
        # Each divisor is a constant. ptxas makes a call of a division by a small variable. Because
        # of the call, each `wgmma` would wait for the previous one.
        tiles_m, _ = self._tiles_of_matrix
        group = min(self.tiling.group, tiles_m)
        across, row = lax.div(index, group), lax.rem(index, group)
        if not (fewer := tiles_m % group):
            return across, row
        return (
            jnp.where(is_last, lax.div(index, fewer), across),
            jnp.where(is_last, lax.rem(index, fewer), row),
        )

    @property
    def _tiles_of_matrix(self) -> tuple[int, int]:
        tile_m, tile_n = self.tiling.tile
        return pl.cdiv(self.m, tile_m), pl.cdiv(self.n, tile_n * self.tiling.cluster)


# The scales of two operands as Hopper's matmul reads them.
#
# Letters: B batch, M N K the axes of the matmul, S the side of a tile along K, P = T / S tiles in a
#     step, C = ceil(K / T) steps; T = 128.

_LEAST = 32
"""Values along K that one `wgmma` multiplies."""


def inner_tile(lhs: QuantizedTensor, geometry: Geometry) -> tuple[int, int]:
    """Which pair of contracted axes has tiles, and S: 128 or 32, of which tiles are multiples."""
    along = lhs.granularity.along(lhs.ndim)  # rhs has the same tiles along contracted axes
    tiles = [along[axis] for axis in geometry.lhs.contracted]
    for tile in (T, _LEAST):
        whole = [pair for pair, side in enumerate(tiles) if side % tile == 0]
        if whole:
            return whole[-1], tile
    raise NotImplementedError(
        f"The tiles along the contracted axes are {tiles}. This kernel takes multiples of "
        f"{_LEAST}. Write matmuls='xla' in fp8.Kernels."
    )


def shares_columns(rhs: QuantizedTensor, axes: OperandAxes, tile: int) -> bool:
    """Whether rhs is in square tiles: S columns and S values along K have one scale."""
    if len(axes.kept) != 1:
        return False
    square = dict.fromkeys((axes.kept[0], axes.contracted[-1]), tile)
    sides = enumerate(rhs.granularity.along(rhs.ndim))
    return all(side == square.get(axis, 1) for axis, side in sides)


def scale_matrix(operand: QuantizedTensor, axes: OperandAxes, side: int, scaling: Scaling) -> Array:
    """The scales of lhs (side 0) as [B, M, P C], or of rhs (side 1) as [B, N, P C].

    Square tiles of rhs give [B, N/S, P C]. If all of K shares a scale, the last size is 1.
    """
    scale = operand.scale
    if scale.dtype == E8M0.dtype:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
        scale = scale if scaling.in_bytes[side] else float32_of_bytes(scale)
    if scaling.at_end:
        shape = (1 if a in axes.contracted else size for a, size in enumerate(operand.shape))
        return as_matrix(jnp.broadcast_to(scale, tuple(shape)), axes)
    if not (scaling.square and side == 1):
        scale = repeat_scale(operand, scale, axes.contracted[-1], scaling.tile)
    return as_matrix(scale, axes, tile=scaling.parts)


def lay_out_scales(scale: Array, side: int, extent: int, scaling: Scaling) -> Array:
    """A scale matrix in the layout of `_kernel.launch`, with zeros to whole tiles of `extent`."""
    if not (scaling.square and side == 1):
        return pad_to_multiple(scale.mT, 2, extent)
    scale = pad_to_multiple(scale, 1, pl.cdiv(extent, scaling.tile))
    if scaling.parts == 1:
        return scale
    # The scales of a step become adjacent, [B, C, N/S P], so that they are one copy.
    batch, columns, cells = scale.shape
    scale = scale.reshape(batch, columns, cells // scaling.parts, scaling.parts)
    return scale.transpose(0, 2, 1, 3).reshape(
        batch, cells // scaling.parts, columns * scaling.parts
    )


def pad_to_multiple(x: Array, axis: int, multiple: int) -> Array:
    """x with zeros at the end of an axis, so that its size is a multiple of `multiple`."""
    missing = pl.cdiv(x.shape[axis], multiple) * multiple - x.shape[axis]
    pads = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), pads) if missing else x
