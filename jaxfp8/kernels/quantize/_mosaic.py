"""The quantizer in Pallas (Mosaic GPU), for Hopper and Blackwell.

It reads x once for all copies in tiles. Scales that span x need two reads (`_mosaic_axes`).

Each block of threads copies a tile of x to shared memory and reads it from there in every
direction. The kernel calls the functions of `numerics` on registers, so its rules are the same.

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
  scale.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from jaxfp8._quantized_tensor import Cast, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels._on_mesh import mesh_of, on_mesh
from jaxfp8.kernels.mosaic._gathered import check_gathered, gathering_reader
from jaxfp8.kernels.mosaic._merged import Merged
from jaxfp8.kernels.mosaic._source import operands_of, reader
from jaxfp8.kernels.mosaic._sums import ColumnSums
from jaxfp8.kernels.mosaic._tiles import RAGGED
from jaxfp8.kernels.quantize import _mosaic_axes
from jaxfp8.kernels.quantize._mosaic_kernel import TilesKernel
from jaxfp8.kernels.quantize._mosaic_tiling import Tiling, check_sides, tiling_of
from jaxfp8.prologues._prologue import Gathered, Source, prologue_of
from jaxfp8.sharding._amax import vary_as


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
        written = TilesKernel(source=source, cast=cast, tilings=tilings, sums=sums)(read)
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
        kernel = TilesKernel(source=source, cast=cast, tilings=tilings, sums=None)
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
