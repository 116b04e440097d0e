"""The cast in Pallas (Mosaic GPU), for Hopper and Blackwell: x is read once, for all its copies and its amax.

XLA reads x once for a cast and an amax, but a second time for a transposed copy.

Letters: L the leading axes as one, M, K the last two; T = 128.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Rounding
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._mosaic_source import ONE_A_ROW, Reader, lined, operands_of, reader
from jaxfp8.kernels._mosaic_sums import ColumnSums
from jaxfp8.kernels._mosaic_tiles import T, grid, parts, place, shared_tile
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.kernels._prologue import Produced, Source
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._rounding import kernel_cast
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def cast(
    x: Source,
    multipliers: tuple[Array, ...],
    scales: tuple[Array, ...],
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    *,
    transposed: tuple[bool, ...],
    column_sums: bool,
    power_of_two: bool,
    rounding: Rounding,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """See `kernels.cast._api.cast_copies`.

    Raises:
      NotImplementedError: see `copies`; for tiles; for stochastic rounding.
    """
    del key
    if rounding != "nearest" or any(isinstance(granularity, PerBlock) for granularity in granularities):
        raise NotImplementedError(f"a cast with {granularities!r}, rounding={rounding!r}")
    # Multipliers along columns are those of an operand that is contracted along its first axis.
    turned = tuple(
        turn or (each.ndim > 1 and each.shape[-1] > 1) for turn, each in zip(transposed, multipliers, strict=True)
    )
    values, met = copies(x, multipliers, format, turned, column_sums=column_sums)
    made = zip(values, scales, granularities, strict=True)
    return tuple(QuantizedTensor(*each, x.dtype, power_of_two) for each in made), met


def copies(
    x: Source,
    multipliers: tuple[Array, ...],
    format: Format,
    transposed: tuple[bool, ...],
    *,
    column_sums: bool = False,
) -> tuple[tuple[Array, ...], Met]:
    """Values of copies of x, each with multipliers of its own, and the amaxes of its tiles of T x T, in one read.

    Args:
      x: [..., M, K].
      multipliers: of each copy: [], or with the axes of x or 1, and 1 along K (M if it is transposed).
      format: of the values.
      transposed: of each copy, whether it lies in memory as [..., K, M], as Hopper's matmuls read an operand that is contracted
        along its first axis. The result has the shape of x all the same.
      column_sums: whether to sum the columns of tiles, too.

    Raises:
      NotImplementedError: for float64; last two axes that are no multiples of 32; multipliers along rows of a transposed copy,
        along columns of another, or of single values; meshes that are manual in part; jax before 0.11.
    """
    operands, prologue = operands_of(x), x.prologue if isinstance(x, Produced) else None
    multipliers = tuple(each.reshape((1,) * x.ndim) if each.ndim == 0 else each for each in multipliers)
    for each, turned in zip(multipliers, transposed, strict=True):
        if each.shape[-1 if not turned else -2] > 1:
            raise NotImplementedError(f"multipliers {list(each.shape)} of x {list(x.shape)}, transposed={turned}")

    def local(*arrays: Array) -> tuple[Array, ...]:
        x, multipliers = arrays[0], arrays[len(operands) :]
        # Matrices that share no multiplier stay apart; else tokens of all of them are rows of one.
        apart = any(each.shape[-2] == 1 and each.size > each.shape[-1] for each in multipliers)
        source, read = reader(arrays[: len(operands)], prologue, apart=apart)
        lines = [lined(each, x.shape, source.shape[0]) for each in multipliers]
        along = tuple(each.ndim > 1 for each in lines)
        sums = ColumnSums(source.shape, T) if column_sums else None
        written = _kernel(source, format, transposed, along, sums)(*read, *lines)
        values, (largest, *summed) = written[: len(transposed)], written[len(transposed) :]
        turned = [v.swapaxes(1, 2) if turn else v for v, turn in zip(values, transposed, strict=True)]
        tiles = *x.shape[:-2], pl.cdiv(x.shape[-2], T), pl.cdiv(x.shape[-1], T)
        shaped = [sums.shaped(each, x.shape) for each in summed] if sums else []
        return *(v.reshape(x.shape) for v in turned), largest.reshape(tiles), *shaped

    cells = *[(1, 1)] * len(transposed), (T, T), *[(T, 1)] * column_sums
    results = on_mesh(local, (T, T), cells)(*operands, *multipliers)
    return results[: len(transposed)], Met(*results[len(transposed) :])


def _kernel(
    source: Reader, format: Format, transposed: Sequence[bool], along: Sequence[bool], sums: ColumnSums | None
) -> Callable[..., Sequence[Array]]:
    """The kernel for what is read for x [L, M, K], and the multipliers of each copy (`along`: `lined` of two axes).

    It gives the copies, [L, M, K] or [L, K, M], the amax of each tile, and the sums of its columns if they are asked for.
    """
    lead, m, k = source.shape
    results = [jax.ShapeDtypeStruct((lead, k, m) if turned else (lead, m, k), format.dtype) for turned in transposed]
    tiles = jax.ShapeDtypeStruct((lead, pl.cdiv(m, T), pl.cdiv(k, T)), jnp.float32)
    summed = [sums.result] if sums else []

    def body(*refs: Any) -> None:
        operands, refs = refs[: len(source.operands)], refs[len(source.operands) :]
        multipliers, refs = refs[: len(results)], refs[len(results) :]
        values_out, refs = refs[: len(results)], refs[len(results) :]
        largest_out, *sums_out, read, arrived, staged, line_of_sums = refs
        at, i, j = place(source.shape)
        source.start(operands, read, arrived)
        for turned, multiplier, (_, line) in zip(transposed, multipliers, staged, strict=True):
            if line is not None:
                plgpu.copy_gmem_to_smem(multiplier.at[at, pl.ds((j if turned else i) * T, T)], line, arrived)
        plgpu.barrier_wait(arrived)
        tile = source.tile(read)
        for n, (turned, multiplier, (values, line)) in enumerate(zip(transposed, multipliers, staged, strict=True)):
            one: Any = multiplier[at] if line is None else None
            largest = []
            for taken, rows in parts(tile, turned=turned):
                largest.append(jnp.max(magnitude(rows), axis=1))
                if sums and n == by_columns:
                    sums.take(line_of_sums, taken, rows)
                if line is None:
                    wide = jnp.full(rows.shape, one)
                else:
                    each = plgpu.load(line.at[taken], layout=ONE_A_ROW)  # type: ignore[call-arg]  # of jax before 0.11
                    wide = lax.broadcast_in_dim(each, rows.shape, (0,))
                values[taken] = kernel_cast(rows, wide, format)
            if n == 0:
                largest_out[at, i, j] = jnp.max(jnp.maximum(*largest))
            plgpu.commit_smem()  # so that TMA sees what threads stored
            down, across = (j, i) if turned else (i, j)
            plgpu.copy_smem_to_gmem(values, values_out[n].at[at, pl.ds(down * T, T), pl.ds(across * T, T)])
        if sums:
            sums.write(line_of_sums, sums_out[0], tile if by_columns is None else None)
        plgpu.wait_smem_to_gmem(0)

    staged = [
        (shared_tile(format.dtype, copy.shape), plgpu.SMEM((T,), jnp.float32) if line else None)
        for copy, line in zip(results, along, strict=True)
    ]
    by_columns = next((n for n, turned in enumerate(transposed) if turned), None)
    arrivals = len(source.operands) + sum(along)
    return plgpu.kernel(
        body, out_type=[*results, tiles, *summed],
        scratch_types=[source.staged, plgpu.Barrier(num_arrivals=arrivals), staged, sums.staged if sums else None],
        **grid(source.shape),
    )  # fmt: skip
