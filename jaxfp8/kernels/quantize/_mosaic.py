"""The quantizer in Pallas (Mosaic GPU), for Hopper and Blackwell: tiles in one read of x, whatever the number of directions.

Each block of threads brings a tile of x to shared memory and reads it from there in every direction. Scales go out along M
or K as TMA wants them. The rules are those of numerics, called on registers.

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a scale.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType, Rounding
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._mosaic_source import Reader, operands_of, reader
from jaxfp8.kernels._mosaic_sums import ColumnSums
from jaxfp8.kernels._mosaic_tiles import PART, RAGGED, T, grid, parts, place, shared_tile
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.kernels._prologue import Produced, Source
from jaxfp8.kernels.quantize import _mosaic_axes
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._rounding import kernel_cast
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

_SIDES = (128, 32)


@dataclasses.dataclass(frozen=True)
class _Direction:
    """One copy: tiles of 1 x S along rows, S x 1 along columns (`turned`), or S x S (`square`, `turned` or not)."""

    side: int
    turned: bool
    square: bool

    @property
    def whole(self) -> bool:
        """Whether the tile of a block of threads has one scale."""
        return self.square and self.side == T

    @property
    def tile(self) -> tuple[int, int]:
        return (self.side, self.side) if self.square else (self.side, 1) if self.turned else (1, self.side)

    def results(self, shape: Axes, format: Format, rule: ScaleRule) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Values and scales as the kernel writes them: turned [L, K, M], [L, M/S, K], else [L, M, K], [L, K/S, M].

        Scales are those of whole tiles of T: in one dimension Pallas copies a box without looking where a row ends. Of
        squares smaller than T each stands once for every row.
        """
        lead, m, k = shape
        rows, columns = (k, m) if self.turned else (m, k)
        across = pl.cdiv(rows, T) * (1 if self.whole else T)
        return (
            jax.ShapeDtypeStruct((lead, rows, columns), format.dtype),
            jax.ShapeDtypeStruct((lead, pl.cdiv(columns, T) * (T // self.side), across), _scale_dtype(rule)),
        )


def quantize(
    x: Source,
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    rule: ScaleRule,
    *,
    transposed: tuple[bool, ...],
    column_sums: bool,
    rounding: Rounding,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """See `kernels.quantize._api.quantize`.

    Raises:
      NotImplementedError: for tiles beside other granularities; tiles that are not 1 x S, S x 1 or S x S with S 128 or 32, the
        same in every direction; scales of single values; stochastic rounding; float64; last two axes that are no multiples of
        32; meshes that are manual in part; jax before 0.11.
    """
    del key
    if rounding != "nearest":
        raise NotImplementedError(f"rounding={rounding!r}")
    if not any(isinstance(granularity, PerBlock) for granularity in granularities):
        return _mosaic_axes.quantize(x, format, granularities, rule, transposed, column_sums=column_sums)
    directions = tuple(
        _direction(each, x.ndim, transposed=turn) for each, turn in zip(granularities, transposed, strict=True)
    )
    operands, prologue = operands_of(x), x.prologue if isinstance(x, Produced) else None
    if len({direction.side for direction in directions}) > 1:
        raise NotImplementedError(f"tiles of different sides, {[direction.tile for direction in directions]}")

    def local(*arrays: Array) -> tuple[Array, ...]:
        source, read = reader(arrays, prologue)
        sums = ColumnSums(source.shape, directions[0].side) if column_sums else None
        written = _kernel(source, format, rule, directions, sums)(*read)
        copies, summed = written[: 2 * len(directions)], written[2 * len(directions) :]
        shaped = [sums.shaped(each, arrays[0].shape) for each in summed] if sums else []
        return *_shaped(copies, arrays[0].shape, rule, directions), *shaped

    cells = tuple(cell for direction in directions for cell in ((1, 1), direction.tile))
    cells += ((directions[0].side, 1),) * column_sums
    sides = tuple(max(RAGGED, *along) for along in zip(*cells, strict=True))
    results = on_mesh(local, sides, cells)(*operands)
    copies, summed = results[: 2 * len(directions)], results[2 * len(directions) :]
    made = tuple(
        QuantizedTensor(values, scale, granularity, x.dtype, rule.exact)
        for values, scale, granularity in zip(copies[::2], copies[1::2], granularities, strict=True)
    )
    return made, Met(None, *summed)


def _direction(granularity: AbstractGranularity, ndim: int, *, transposed: bool) -> _Direction:
    if isinstance(granularity, PerBlock) and ndim >= 2:
        *lead, m, k = granularity.along(ndim)
        if set(lead) <= {1} and max(m, k) in _SIDES and min(m, k) in (1, max(m, k)):
            return _Direction(max(m, k), turned=transposed if m == k else k == 1, square=m == k)
    raise NotImplementedError(f"{granularity!r} of an array of {ndim} axes")


def _scale_dtype(rule: ScaleRule) -> DType:
    """As the kernel writes scales; those in E8M0 as bytes."""
    return jnp.dtype(jnp.float32 if rule.scale_format is None else jnp.uint8)


def _shaped(
    results: Sequence[Array], shape: Axes, rule: ScaleRule, directions: Sequence[_Direction]
) -> tuple[Array, ...]:
    """What the kernel wrote, with the axes of x. XLA turns nothing for that whose reader turns it back."""
    *lead, m, k = shape
    shaped: list[Array] = []
    for direction, values, scale in zip(directions, results[::2], results[1::2], strict=True):
        if direction.square and direction.side < T:
            scale = scale[..., :: direction.side]
        if direction.turned:
            values = values.swapaxes(1, 2)
        else:
            scale = scale.swapaxes(1, 2)
        if rule.scale_format is not None:
            scale = lax.bitcast_convert_type(scale, rule.scale_format.dtype)
        down, across = direction.tile
        scale = scale[:, : pl.cdiv(values.shape[1], down), : pl.cdiv(k, across)]
        shaped += [values.reshape(shape), scale.reshape(*lead, pl.cdiv(m, down), pl.cdiv(k, across))]
    return tuple(shaped)


def _kernel(
    source: Reader, format: Format, rule: ScaleRule, directions: Sequence[_Direction], sums: ColumnSums | None
) -> Callable[..., Sequence[Array]]:
    """The kernel for what is read for x [L, M, K]; values and scales of each direction (`_Direction.results`), and sums."""
    out_type = [result for direction in directions for result in direction.results(source.shape, format, rule)]

    def body(*refs: Any) -> None:
        operands, refs = refs[: len(source.operands)], refs[len(source.operands) :]
        results, (*sums_out, read, arrived, staged, line_of_sums) = refs[: len(out_type)], refs[len(out_type) :]
        lead, i, j = place(source.shape)
        source.start(operands, read, arrived)
        plgpu.barrier_wait(arrived)
        tile = source.tile(read)
        for n, direction in enumerate(directions):
            (values_out, scale_out), (values, scales) = results[2 * n : 2 * n + 2], staged[n]
            down, across = (j, i) if direction.turned else (i, j)
            for taken, rows in parts(tile, turned=direction.turned, rows=T if direction.whole else PART):
                values[taken], of_cells = _encode(rows, format, rule, direction)
                if sums and n == by_columns:
                    sums.take(line_of_sums, taken, rows)
                for cell, scale in enumerate(of_cells):
                    if scales is None:
                        scale_out[lead, across, down] = jnp.max(scale)
                    else:
                        scales[cell, taken] = scale
            plgpu.commit_smem()  # so that TMA sees what threads stored
            plgpu.copy_smem_to_gmem(values, values_out.at[lead, pl.ds(down * T, T), pl.ds(across * T, T)])
            if scales is not None:
                cells = pl.ds(across * (T // direction.side), T // direction.side)
                plgpu.copy_smem_to_gmem(scales, scale_out.at[lead, cells, pl.ds(down * T, T)])
        if sums:
            sums.write(line_of_sums, sums_out[0], tile if by_columns is None else None)
        plgpu.wait_smem_to_gmem(0)

    staged = []
    for direction, result in zip(directions, out_type[::2], strict=True):
        scales = None if direction.whole else plgpu.SMEM((T // direction.side, T), _scale_dtype(rule))
        staged.append((shared_tile(format.dtype, result.shape), scales))
    by_columns = next((n for n, direction in enumerate(directions) if direction.turned), None)
    arrived = plgpu.Barrier(num_arrivals=len(source.operands))
    scratch = [source.staged, arrived, staged, sums.staged if sums else None]
    results = [*out_type, sums.result] if sums else out_type
    return plgpu.kernel(body, out_type=results, scratch_types=scratch, **grid(source.shape))


def _encode(x: Array, format: Format, rule: ScaleRule, direction: _Direction) -> tuple[Array, list[Array]]:
    """Rows [R, T] in FP8, and the scale [R] of each of their T/S cells."""
    multipliers, scales = [], []
    for first in range(0, T, direction.side):
        cut = x[:, first : first + direction.side]
        largest = jnp.max(magnitude(cut), axis=1)
        if direction.square:
            largest = _largest_of_squares(largest, direction.side)
        multiplier, scale = rule.apply(largest, format)
        multipliers.append(lax.broadcast_in_dim(multiplier, cut.shape, (0,)))
        scales.append(scale if rule.scale_format is None else lax.bitcast_convert_type(scale, jnp.uint8))
    return kernel_cast(x, jnp.concatenate(multipliers, axis=1), format), scales


def _largest_of_squares(largest: Array, side: int) -> Array:
    """The largest of each `side` rows [R], for every one of them."""
    if len(largest) == side:
        return lax.broadcast_in_dim(jnp.max(largest), largest.shape, ())
    square = lax.broadcasted_iota(jnp.int32, largest.shape, 0) // side
    result = jnp.zeros_like(largest)
    for index in range(len(largest) // side):
        inside = square == index
        result = jnp.where(inside, jnp.max(jnp.where(inside, largest, 0.0)), result)
    return result
