"""The quantizer in Pallas (Mosaic GPU), for Hopper and Blackwell.

It reads x once for all copies in tiles. Scales that span x need an amax before the first value is
cast. XLA finds these amaxes, in one read for rows and columns, and a kernel reads x again for all
copies.

Letters: S the side of a tile that shares a scale.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax import lax

from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.kernels.cast._mosaic import copies
from jaxfp8.kernels.quantize._mosaic_tiling import check_sides, quantize_in_tiles
from jaxfp8.numerics._amax import amaxes
from jaxfp8.numerics._per_block import PerBlock, devices_of, is_explicit, merge_axes
from jaxfp8.prologues._prologue import Produced, Source, value_of


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
        found = amaxes(value_of(x), cast.granularities)
        scales = [cast.rule.apply(found[each], cast.format) for each in cast.granularities]
    multipliers, known = zip(*scales, strict=True)
    values, extras = copies(x, cast, multipliers)
    return cast.copies(values, known, x.dtype), extras


def _in_tiles(x: Source, cast: Cast) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """`cast_copies` if every copy is in tiles."""
    # Before axes are merged, so that an error names the tile that the user wrote.
    for granularity in cast.granularities:
        check_sides(granularity, x.ndim)
    tiles = [granularity.along(x.ndim) for granularity in cast.granularities]
    last = x.ndim - 1
    rows = max((axis for tile in tiles for axis in range(last) if tile[axis] > 1), default=last - 1)
    if rows == last - 1:
        return quantize_in_tiles(x, cast)
    return _in_merged_tiles(x, cast, rows), CastExtras()


# Arrays whose tiles run along other axes than the last two, reshaped to matrices.
#
# Attention has such arrays. The gradient of heads, [B, S, H, D], is contracted along S in one
# matmul and along D (or H and D) in another. Its tiles of 128x1 run along S, and its tiles of 1x128
# along D. If H and D are merged into one axis, both kinds of tiles are tiles of the last two axes.
#
# Letters: B batch, S tokens, H heads, D values of a head.


def _in_merged_tiles(x: Source, cast: Cast, rows: int) -> tuple[QuantizedTensor, ...]:
    """`cast_copies` by a cast of x whose axes after `rows` are merged. It sums no columns."""
    like = value_of(x)
    tiles = [granularity.along(x.ndim) for granularity in cast.granularities]
    # A ragged last tile of one head would continue into the next head of the merged axis.
    if any(like.shape[-1] % tile[-1] for tile in tiles):
        raise NotImplementedError(
            f"The array has shape {list(like.shape)} and tiles along axis {rows}. The kernel "
            "merges the axes after it, whose last axis has no whole tiles. Pad the last axis."
        )
    directions = tuple(
        dataclasses.replace(direction, granularity=PerBlock((tile[rows], tile[-1])))
        for direction, tile in zip(cast.directions, tiles, strict=True)
    )
    # The merged array has other columns than x, so their sums would not be those of x.
    merged = dataclasses.replace(cast, directions=directions, column_sums=False)
    copies, _ = quantize_in_tiles(_merge_source(x, rows), merged)
    values = tuple(_shaped(copy.values, like.shape, like) for copy in copies)
    scales = tuple(
        _shaped(copy.scale, granularity.scale_shape(like.shape), like)
        for copy, granularity in zip(copies, cast.granularities, strict=True)
    )
    return cast.copies(values, scales, like.dtype)


def _merge_source(x: Source, rows: int) -> Source:
    """x with one axis after `rows`. It refuses an array of a prologue that has some of its axes."""
    if not isinstance(x, Produced):
        return _merge(value_of(x), rows)
    for each in x.operands:
        last = each.shape[rows + 1 :]
        if last != x.shape[rows + 1 :] and math.prod(last) > 1:
            raise NotImplementedError(
                f"prologue={x.prologue!r} of {list(x.shape)} reads an array of "
                f"{list(each.shape)}. The kernel merges trailing axes, and the array has only "
                "some of them. Quantize prologue(*arrays)."
            )
    operands = tuple(_merge(each, rows) for each in x.operands)
    return Produced(_merge(x.value, rows), operands, x.prologue)


def _merge(x: Array, rows: int) -> Array:
    if is_explicit(x):
        sharding = jax.typeof(x).sharding
        if any(devices_of(sharding.mesh, each) > 1 for each in sharding.spec[rows + 2 :]):
            raise NotImplementedError(
                f"The array {list(x.shape)} is split as {sharding.spec}. The mesh splits an "
                "axis that the kernel merges into the axis before it. Split the first of the "
                f"merged axes, axis {rows + 1}."
            )
    return merge_axes(x, (*[1] * (rows + 1), x.ndim - 1 - rows))


def _shaped(result: Array, shape: Axes, like: Array) -> Array:
    """A result of the merged array, with the axes and the sharding of x."""
    sharding = jax.typeof(like).sharding if is_explicit(like) else None
    return lax.reshape(result, shape, out_sharding=sharding)
