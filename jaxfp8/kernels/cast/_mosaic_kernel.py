"""The kernel of the cast in Pallas (Mosaic GPU): copies with known multipliers.

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

from jaxfp8._typing import Array
from jaxfp8.kernels.mosaic._source import ONE_A_ROW, Reader, Staged
from jaxfp8.kernels.mosaic._sums import ColumnSums
from jaxfp8.kernels.mosaic._tiles import Place, T, grid, parts, place, shared_tile, tiles_of
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._rounding import kernel_cast


class Written(NamedTuple):
    """What the kernel writes: types, refs inside the kernel, arrays after it.

    Attributes:
      copies: [L, M, K] each, or [L, K, M] if the copy is transposed.
      largest: float32 [L, M/T, K/T], the amax of each tile.
      sums: `ColumnSums.result`, or None.
    """

    copies: Sequence[Any]
    largest: Any
    sums: Any


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
class CopiesKernel:
    """The kernel that writes copies of x [L, M, K], the amax of each tile, and sums of columns.

    Attributes:
      source: how x is read.
      format: of the values.
      transposed: for each copy, whether it is transposed.
      in_lines: for each copy, whether its multipliers are [L, M], or [L, K] if it is transposed.
        Otherwise they are [L].
      sums: how columns are summed; None if they are not.
    """

    source: Reader
    format: Format
    transposed: tuple[bool, ...]
    in_lines: tuple[bool, ...]
    sums: ColumnSums | None

    def __call__(self, operands: Sequence[Array], multipliers: Sequence[Array]) -> Written:
        written = self._written()
        (result,) = plgpu.kernel(
            self.body,
            out_type=(written,),
            scratch_types=(self._scratch(written),),
            **grid(self.source.shape),
        )(_Read(operands, multipliers))
        return result

    def _written(self) -> Written:
        lead, m, k = shape = self.source.shape
        copies = [
            jax.ShapeDtypeStruct((lead, k, m) if each else (lead, m, k), self.format.dtype)
            for each in self.transposed
        ]
        largest = jax.ShapeDtypeStruct((lead, *tiles_of(shape)), jnp.float32)
        return Written(copies, largest, self.sums.result if self.sums else None)

    def _scratch(self, written: Written) -> _Scratch:
        copies = [
            _StagedCopy(
                shared_tile(self.format.dtype, copy.shape),
                plgpu.SMEM((T,), jnp.float32) if in_lines else None,
            )
            for copy, in_lines in zip(written.copies, self.in_lines, strict=True)
        ]
        read = self.source.staged(beside=sum(self.in_lines))
        return _Scratch(read, copies, self.sums.staged if self.sums else None)

    def body(self, read: _Read, written: Written, scratch: _Scratch) -> None:
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
            for index, rows in parts(tile, transposed=transposed):
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
        """Start to copy the multipliers of the tile's rows. Each copy is one arrival.

        They arrive at the reader's barrier, so one wait covers the operands and the multipliers.
        """
        for transposed, multipliers, staged in zip(
            self.transposed, read.multipliers, scratch.copies, strict=True
        ):
            if staged.multipliers is not None:
                at = here.of_copy(transposed=transposed)
                line = multipliers.at[at.matrix, pl.ds(at.row * T, T)]
                plgpu.copy_gmem_to_smem(line, staged.multipliers, scratch.read.arrived)

    def _cast(self, staged: _StagedCopy, index: Any, rows: Array, one: Array | None) -> None:
        """Cast rows [R, T] of a tile, with one multiplier or with a multiplier for each row."""
        if one is not None:
            multiplier = jnp.full(rows.shape, one)
        else:
            load: Any = plgpu.load  # before jax 0.11 it has no layout=
            line = load(staged.multipliers.at[index], layout=ONE_A_ROW)
            multiplier = lax.broadcast_in_dim(line, rows.shape, (0,))
        staged.values[index] = kernel_cast(rows, multiplier, self.format)
