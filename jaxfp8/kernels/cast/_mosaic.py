"""The cast in Pallas (Mosaic GPU), for Hopper and Blackwell.

It reads x once for all copies and its amax. XLA reads x once for a cast and an amax, but a second
time for a transposed copy.

Letters: L the leading axes as one, M, K the last two; T = 128.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._quantized_tensor import Cast, CastExtras
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import traced_once
from jaxfp8.kernels._mosaic_source import (
    ONE_A_ROW,
    Reader,
    Staged,
    make_reader,
    operands_of,
    pad_lines,
)
from jaxfp8.kernels._mosaic_tiles import (
    ColumnSums,
    Place,
    T,
    count_tiles,
    grid,
    load,
    load_parts,
    place,
    shared_tile,
)
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._rounding import kernel_cast
from jaxfp8.prologues._prologue import Source, prologue_of

# The kernel: copies with known multipliers.


class _Written(NamedTuple):
    """What the kernel writes: types, refs inside the kernel, arrays after it."""

    copies: Sequence[Any]  # [L, M, K] each, or [L, K, M] if the copy is transposed
    largest: Any  # float32 [L, M/T, K/T], the amax of each tile
    sums: Any  # `ColumnSums.result`, or None


class _Read(NamedTuple):
    """What the kernel reads: the operands of the reader, and the multipliers of each copy."""

    operands: Sequence[Any]
    multipliers: Sequence[Any]


class _StagedCopy(NamedTuple):
    """A tile of a copy in shared memory, and the multipliers of its rows (None: one for all)."""

    values: Any
    multipliers: Any


class _Scratch(NamedTuple):
    """Shared memory of the kernel."""

    read: Staged
    copies: Sequence[_StagedCopy]
    sums: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CopiesKernel:
    """The kernel that writes copies of x [L, M, K], the amax of each tile, and sums of columns."""

    source: Reader
    format: Format
    transposed: tuple[bool, ...]  # for each copy
    # For each copy, whether its multipliers are [L, M], or [L, K] if it is transposed. Else [L].
    in_lines: tuple[bool, ...]
    sums: ColumnSums | None

    def run(self, read: _Read) -> _Written:
        """What the kernel writes."""
        types = self._written()
        (result,) = plgpu.kernel(
            self.body,
            out_type=(types,),
            scratch_types=(self._scratch(types),),
            **grid(self.source.shape),
        )(read)
        written: _Written = result
        return written

    def _written(self) -> _Written:
        lead, m, k = shape = self.source.shape
        copies = [
            jax.ShapeDtypeStruct((lead, k, m) if each else (lead, m, k), self.format.dtype)
            for each in self.transposed
        ]
        largest = jax.ShapeDtypeStruct((lead, *count_tiles(shape)), jnp.float32)
        return _Written(copies, largest, self.sums.result if self.sums else None)

    def _scratch(self, written: _Written) -> _Scratch:
        copies = [
            _StagedCopy(
                shared_tile(self.format.dtype, copy.shape),
                plgpu.SMEM((T,), jnp.float32) if in_lines else None,
            )
            for copy, in_lines in zip(written.copies, self.in_lines, strict=True)
        ]
        read = self.source.staged(beside=sum(self.in_lines))
        return _Scratch(read, copies, self.sums.staged if self.sums else None)

    def body(self, read: _Read, written: _Written, scratch: _Scratch) -> None:
        """The work of a block of threads. The name "body" is the kernel's name in the program."""
        here = place(self.source.shape)
        self.source.start(read.operands, scratch.read)
        self._start_multipliers(here, read, scratch)
        tile = self.source.tile(read.operands, scratch.read)
        # Columns are summed while the first transposed copy has them in registers. Without such a
        # copy, `ColumnSums.write` loads them.
        summing = self.transposed.index(True) if self.sums and any(self.transposed) else None
        for n, transposed in enumerate(self.transposed):
            at = here.of_copy(transposed=transposed)
            # One multiplier for the tile is a scalar in global memory: it needs no shared memory.
            one = None if self.in_lines[n] else read.multipliers[n][at.matrix]
            amaxes = []
            for index, rows in load_parts(tile, transposed=transposed):
                amaxes.append(jnp.max(magnitude(rows, kernel_language=True), axis=1))
                if self.sums and n == summing:
                    self.sums.take(scratch.sums, index, rows)
                self._cast(scratch.copies[n], index, rows, one)
            # Every copy sees all of the tile, so the first one has its amax. There are two parts,
            # of PART = T / 2 rows each.
            if n == 0:
                written.largest[tuple(here)] = jnp.max(jnp.maximum(*amaxes))
            # All threads have stored their values (and sums), and TMA sees them. Without this, TMA
            # would write values that a slower warp has not stored yet.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch.copies[n].values, written.copies[n].at[at.window])
        if self.sums:
            self.sums.write(scratch.sums, written.sums, tile if summing is None else None)
        # TMA has read all copies. Before that the block must not end: its shared memory would go to
        # another block. No copy waits for another one, because each has its own shared memory.
        plgpu.wait_smem_to_gmem(0)

    def _start_multipliers(self, here: Place, read: _Read, scratch: _Scratch) -> None:
        """Start to copy the multipliers of the tile's rows. Each copy is one arrival."""
        for transposed, multipliers, staged in zip(
            self.transposed, read.multipliers, scratch.copies, strict=True
        ):
            if staged.multipliers is not None:
                at = here.of_copy(transposed=transposed)
                line = multipliers.at[at.matrix, pl.ds(at.row * T, T)]
                # At the reader's barrier, so one wait covers operands and multipliers.
                plgpu.copy_gmem_to_smem(line, staged.multipliers, scratch.read.arrived)

    def _cast(self, staged: _StagedCopy, index: Any, rows: Array, one: Array | None) -> None:
        """Cast rows [R, T] of a tile, with one multiplier or with a multiplier for each row."""
        if one is not None:
            multiplier = jnp.full(rows.shape, one)
        else:
            line = load(staged.multipliers.at[index], ONE_A_ROW)
            multiplier = lax.broadcast_in_dim(line, rows.shape, (0,))
        staged.values[index] = kernel_cast(rows, multiplier, self.format)


# The call of the kernel.


def copies(
    x: Source, cast: Cast, multipliers: tuple[Array, ...]
) -> tuple[tuple[Array, ...], CastExtras]:
    """The values of each copy of x [..., M, K], and the amax of each tile T x T, in one read of x.

    A copy is written transposed if its direction says so, or if it has a multiplier for each
    column: a matmul then contracts it along M. There is an array of multipliers for each copy, of
    shape [] or with the axes of x, whose size may be 1. Axis K must have size 1; if the copy is
    transposed, axis M must.

    Raises NotImplementedError for other multipliers, for an array that `operands_of` refuses, and
    for a mesh that `on_mesh` refuses.
    """
    operands, prologue = operands_of(x), prologue_of(x)
    transposed = tuple(
        each.transposed or each.granularity.has_cells_along(-1, x.ndim) for each in cast.directions
    )
    multipliers = tuple(
        each.reshape((1,) * x.ndim) if each.ndim == 0 else each for each in multipliers
    )
    for multiplier, is_transposed in zip(multipliers, transposed, strict=True):
        if multiplier.shape[-2 if is_transposed else -1] > 1:
            raise NotImplementedError(
                f"The multipliers are {list(multiplier.shape)}, x is {list(x.shape)}, and "
                f"transposed={is_transposed}. A copy needs one multiplier for each of its rows, or "
                "fewer. Write casts='xla' in fp8.Kernels."
            )

    def local(*arrays: Array) -> tuple[Array, ...]:
        x, multipliers = arrays[0], arrays[len(operands) :]
        source, read = make_reader(
            arrays[: len(operands)], prologue, separate=cast.separate, multipliers=multipliers
        )
        lines = [pad_lines(each, x.shape, source.shape[0]) for each in multipliers]
        kernel = _CopiesKernel(
            source=source,
            format=cast.format,
            transposed=transposed,
            in_lines=tuple(each.ndim > 1 for each in lines),
            sums=ColumnSums(source.shape, T) if cast.column_sums else None,
        )
        written: _Written = traced_once(_CopiesKernel.run, kernel, _Read(read, lines))
        values = [
            each.swapaxes(1, 2) if is_transposed else each
            for each, is_transposed in zip(written.copies, transposed, strict=True)
        ]
        sums = [] if kernel.sums is None else [kernel.sums.shaped(written.sums, x.shape)]
        tiles = *x.shape[:-2], *count_tiles(x.shape)
        return *(each.reshape(x.shape) for each in values), written.largest.reshape(tiles), *sums

    # The kernel returns one amax for each T x T, so each shard must have whole tiles.
    cells = *[(1, 1)] * len(transposed), (T, T), *[(T, 1)] * cast.column_sums
    results = on_mesh(local, (T, T), cells)(*operands, *multipliers)
    return results[: len(transposed)], CastExtras(*results[len(transposed) :])
