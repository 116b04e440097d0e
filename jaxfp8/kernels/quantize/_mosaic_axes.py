"""The quantizer in Pallas (Mosaic GPU) for scales that span x: of the tensor, of rows, of columns.

Such a scale needs its amax before the first value is cast. So x is read twice, once for all amaxes
and once for all copies. XLA reads x three times for rows and columns, and then transposes values.

Letters: L the leading axes as one, M, K the last two axes of x; T = 128.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.kernels._mosaic_source import Reader, Staged, operands_of, reader
from jaxfp8.kernels._mosaic_tiles import T, grid, parts, place, tiles_of
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.kernels.cast._mosaic import copies
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._exact import to_float32
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.prologues._prologue import Source, prologue_of

Along: TypeAlias = Literal["tensor", "rows", "columns"]
_CELLS: dict[Along, Axes] = {"tensor": (T, T), "rows": (1, T), "columns": (T, 1)}


def quantize(x: Source, cast: Cast) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.quantize._api.quantize`; for the granularities that `_along` accepts.

    Raises:
      NotImplementedError: see `_along` and `kernels.cast._mosaic.copies`.
    """
    kinds = tuple(_along(granularity, x.ndim) for granularity in cast.granularities)
    largest = _largest_of_tiles(x, tuple(dict.fromkeys(kinds)))
    multipliers, scales = zip(
        *(
            cast.rule.apply(to_float32(granularity.maximum(largest[kind])), cast.format)
            for granularity, kind in zip(cast.granularities, kinds, strict=True)
        ),
        strict=True,
    )
    values, extras = copies(x, cast, multipliers)
    return cast.copies(values, scales, x.dtype), extras


def _along(granularity: AbstractGranularity, ndim: int) -> Along:
    """Which values share a scale: all of x, those along K, or those along M (and axes in front).

    Raises:
      NotImplementedError: for another granularity.
    """
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


def _largest_of_tiles(x: Source, kinds: tuple[Along, ...]) -> dict[Along, Array]:
    """Partial amaxes in one read of x: a scale cell is cut at the borders of tiles T x T.

    There is one array for each kind: "tensor" [.., M/T, K/T], "rows" [.., M, K/T], "columns"
    [.., M/T, K]. XLA reduces them to the amaxes of the cells.
    """
    operands, prologue = operands_of(x), prologue_of(x)

    def local(*arrays: Array) -> tuple[Array, ...]:
        source, read = reader(arrays, prologue)
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
    """The kernel that finds amaxes in x [L, M, K].

    It writes amaxes of rows [L, K/T, M], of columns [L, M/T, K], and of tiles [L, M/T, K/T] for the
    tensor. For rows and columns, M and K are rounded up to whole tiles. Pallas copies one dimension
    without a check for the end of a row.
    """

    source: Reader
    kinds: Sequence[Along]

    def __call__(self, operands: Sequence[Array]) -> Sequence[Array]:
        lead, (down, across) = self.source.shape[0], tiles_of(self.source.shape)
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
            for index, rows in parts(tile, transposed=kind == "columns"):
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
