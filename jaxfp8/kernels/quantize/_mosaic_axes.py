"""The quantizer in Pallas (Mosaic GPU) for scales that span x: of the tensor, of rows and of columns.

Such a scale needs its amax before the first value is cast: x is read twice, whatever the number of directions; XLA reads it
three times for rows and columns, and their values have to be transposed after that.

Letters: M, K the last two axes of x; T = 128.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._mosaic_source import Reader, operands_of, reader
from jaxfp8.kernels._mosaic_tiles import T, grid, parts, place
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.kernels._prologue import Produced, Source
from jaxfp8.kernels.cast._mosaic import copies
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._float32 import to_float32
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerAxis, PerTensor
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

Along: TypeAlias = Literal["tensor", "rows", "columns"]
CELLS: dict[Along, Axes] = {"tensor": (T, T), "rows": (1, T), "columns": (T, 1)}


def quantize(
    x: Source,
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    rule: ScaleRule,
    transposed: tuple[bool, ...],
    *,
    column_sums: bool,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """See `kernels.quantize._api.quantize`, of granularities that `along` knows.

    Raises:
      NotImplementedError: see `kernels.cast._mosaic.copies`.
    """
    kinds = tuple(along(granularity, x.ndim) for granularity in granularities)
    largest = largest_of_tiles(x, tuple(dict.fromkeys(kinds)))
    multipliers, scales = zip(
        *(
            rule.apply(to_float32(granularity.maximum(largest[kind])), format)
            for granularity, kind in zip(granularities, kinds, strict=True)
        ),
        strict=True,
    )
    turned = tuple(kind == "columns" or turn for kind, turn in zip(kinds, transposed, strict=True))
    values, met = copies(x, multipliers, format, turned, column_sums=column_sums)
    made = tuple(
        QuantizedTensor(value, scale, granularity, x.dtype, rule.exact)
        for value, scale, granularity in zip(values, scales, granularities, strict=True)
    )
    return made, met


def along(granularity: AbstractGranularity, ndim: int) -> Along:
    """What shares a scale: all of x, what lies along K, or what lies along M (and axes in front).

    Raises:
      NotImplementedError: for another granularity.
    """
    if isinstance(granularity, PerTensor):
        return "tensor"
    if isinstance(granularity, PerAxis) and ndim >= 2:
        kept = {axis % ndim for axis in granularity.axes}
        if ndim - 1 not in kept:
            return "rows"
        if ndim - 2 not in kept:
            return "columns"
    raise NotImplementedError(f"{granularity!r} of an array of {ndim} axes")


def largest_of_tiles(x: Source, kinds: tuple[Along, ...]) -> dict[Along, Array]:
    """For each kind the largest of what a tile has of a scale cell, in one read: [.., M/T, K/T], [.., M, K/T], [.., M/T, K]."""
    operands, prologue = operands_of(x), x.prologue if isinstance(x, Produced) else None

    def local(*arrays: Array) -> tuple[Array, ...]:
        source, read = reader(arrays, prologue)
        *lead, m, k = arrays[0].shape
        results = []
        for kind, largest in zip(kinds, _kernel(source, kinds)(*read), strict=True):
            down, across = CELLS[kind]
            largest = largest.swapaxes(1, 2) if kind == "rows" else largest
            largest = largest[:, : pl.cdiv(source.shape[1], down), : pl.cdiv(k, across)]
            results.append(largest.reshape(*lead, pl.cdiv(m, down), pl.cdiv(k, across)))
        return tuple(results)

    return dict(zip(kinds, on_mesh(local, (T, T), tuple(CELLS[kind] for kind in kinds))(*operands), strict=True))


def _kernel(source: Reader, kinds: Sequence[Along]) -> Callable[..., Sequence[Array]]:
    """The kernel for what is read for x [L, M, K].

    It gives amaxes, of rows [L, K/T, M], of columns [L, M/T, K] (whole tiles), of the tensor [L, M/T, K/T].
    """
    lead, m, k = source.shape
    tall, wide = pl.cdiv(m, T), pl.cdiv(k, T)
    shapes = {"tensor": (lead, tall, wide), "rows": (lead, wide, tall * T), "columns": (lead, tall, wide * T)}

    def body(*refs: Any) -> None:
        operands, refs = refs[: len(source.operands)], refs[len(source.operands) :]
        results, (read, arrived, lines) = refs[: len(kinds)], refs[len(kinds) :]
        at, i, j = place(source.shape)
        source.start(operands, read, arrived)
        plgpu.barrier_wait(arrived)
        tile = source.tile(read)
        for kind, result, line in zip(kinds, results, lines, strict=True):
            of_parts = []
            for taken, rows in parts(tile, turned=kind == "columns"):
                of_parts.append(jnp.max(magnitude(rows), axis=1))
                if line is not None:
                    line[taken] = of_parts[-1]
            if line is None:
                result[at, i, j] = jnp.max(jnp.maximum(*of_parts))
            else:
                plgpu.commit_smem()  # so that TMA sees what threads stored
                down, across = (j, i) if kind == "columns" else (i, j)
                plgpu.copy_smem_to_gmem(line, result.at[at, across, pl.ds(down * T, T)])
        plgpu.wait_smem_to_gmem(0)

    lines = [None if kind == "tensor" else plgpu.SMEM((T,), jnp.float32) for kind in kinds]
    return plgpu.kernel(
        body, out_type=[jax.ShapeDtypeStruct(shapes[kind], jnp.float32) for kind in kinds],
        scratch_types=[source.staged, plgpu.Barrier(num_arrivals=len(source.operands)), lines], **grid(source.shape),
    )  # fmt: skip
