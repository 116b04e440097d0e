"""The quantizer in Pallas (Mosaic GPU), for Hopper and Blackwell.

It reads x once for all copies in tiles. Scales that span x need two reads (`_mosaic_axes`).

Each block of threads copies a tile of x to shared memory and reads it from there in every
direction. The kernel calls the functions of `numerics` on registers, so its rules are the same.

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
  scale.
"""

from jaxfp8._typing import Array
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.kernels.mosaic._merged import Merged
from jaxfp8.kernels.mosaic._source import operands_of, reader
from jaxfp8.kernels.mosaic._sums import ColumnSums
from jaxfp8.kernels.mosaic._tiles import RAGGED
from jaxfp8.kernels.quantize import _mosaic_axes
from jaxfp8.kernels.quantize._mosaic_kernel import TilesKernel
from jaxfp8.kernels.quantize._mosaic_tiling import check_sides, tiling_of
from jaxfp8.prologues._prologue import Source, prologue_of
from jaxfp8.tensors._cast import Cast
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


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
    operands, prologue = operands_of(x), prologue_of(x)
    side, count = tilings[0].side, len(tilings)
    if any(tiling.side != side for tiling in tilings):
        raise NotImplementedError(
            f"The tiles have different sides, {[tiling.tile for tiling in tilings]}. This kernel "
            "needs one side in all directions. Quantize in each direction by itself."
        )

    def local(*arrays: Array) -> tuple[Array, ...]:
        source, read = reader(arrays, prologue)
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
