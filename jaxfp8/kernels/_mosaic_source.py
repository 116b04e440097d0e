"""How a block of threads in Pallas (Mosaic GPU) gets its tile: copied, or computed by a prologue.

A prologue is applied in place. Its result h replaces the tile of its first operand in shared
memory. Only then does the kernel read the tile. h is rounded to its dtype, as if it had been
written to memory and read again. So a kernel does the same in both cases, and it computes h once
for all directions.

Letters: L the leading axes as one, M, K the last two; T = 128.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels._mosaic_tiles import (
    PART,
    RAGGED,
    T,
    check_jax,
    load,
    place,
    shared_tile,
)
from jaxfp8.prologues._prologue import AbstractPrologue, Gathered, Produced, Source

_Kind: TypeAlias = Literal["tile", "rows", "columns"]
"""An operand [L, M, K], or a value for each row [L, M] or column [L, K] in float32."""
# Columns for which a prologue is computed at once. With all T columns, two operands and an
# exponential take all 255 registers of a thread.
_COLUMNS = 64
# The layouts of one value a row, and of one value a column. Each thread gets the values for the
# elements of a tile that it holds, so scaling needs no exchange between threads.
ONE_A_ROW, _ONE_A_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def _check_array(x: Array) -> None:
    """Raise NotImplementedError for an array that TMA or Pallas cannot copy."""
    check_jax()
    if x.dtype.itemsize > 4:
        raise NotImplementedError(
            f"The array is of dtype {x.dtype}. The kernel reads at most 4 bytes a value. Cast it "
            "to float32."
        )
    if x.ndim < 2 or not x.size or x.shape[-1] % RAGGED or x.shape[-2] % RAGGED:
        raise NotImplementedError(
            f"The array has shape {list(x.shape)}. The kernel needs two axes or more, the last two "
            f"multiples of {RAGGED} and not 0. Pad the array, or use another backend."
        )


def _as_matrices(x: Array) -> Array:
    """x [..., M, K] as [L, M, K]. L is 1 if M has whole tiles: then the other axes merge into M."""
    *lead, m, k = x.shape
    return x.reshape(1, -1, k) if m % T == 0 else x.reshape(math.prod(lead), m, k)


def operands_of(x: Source) -> tuple[Array, ...]:
    """The arrays that a kernel reads for x, the first with its shape."""
    if isinstance(x, Gathered):
        raise NotImplementedError(
            f"The rows of {list(x.rows.shape)} are gathered into tiles. This kernel reads whole "
            "arrays. Write casts='xla' in fp8.Kernels."
        )
    operands = x.operands if isinstance(x, Produced) else (x,)
    _check_array(operands[0])
    return operands


class Staged(NamedTuple):
    """The shared memory in which a tile arrives: types for `plgpu.kernel`, then refs."""

    operands: list[Any]  # for each operand a tile, or the values of its rows, or of its columns
    arrived: Any  # the barrier that counts one arrival for each copy to shared memory


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a kernel reads an array [L, M, K]."""

    shape: Axes  # L, M, K
    prologue: AbstractPrologue | None  # None for an array in memory
    operands: tuple[tuple[_Kind, DType], ...]  # one of kind "tile" has the array's shape

    def staged(self, *, beside: int = 0) -> Staged:
        """Shared memory for the operands. `beside` more copies arrive at the same barrier."""
        operands = [
            shared_tile(dtype, self.shape) if kind == "tile" else plgpu.SMEM((T,), dtype)
            for kind, dtype in self.operands
        ]
        return Staged(operands, plgpu.Barrier(num_arrivals=len(operands) + beside))

    def start(self, operands: Sequence[Any], staged: Staged) -> None:
        """Start to copy the operands of this block's tile. Each arrives at `staged.arrived`."""
        at, down, across = place(self.shape).window
        windows = {"tile": (at, down, across), "rows": (at, down), "columns": (at, across)}
        for (kind, _), operand, here in zip(self.operands, operands, staged.operands, strict=True):
            plgpu.copy_gmem_to_smem(operand.at[windows[kind]], here, staged.arrived)

    def tile(self, operands: Sequence[Any], staged: Staged) -> Any:
        """The tile in shared memory, once all copies have arrived and the prologue is applied."""
        del operands
        # The wait is for all copies, those that the kernel started itself included. Before it,
        # shared memory is not written yet.
        plgpu.barrier_wait(staged.arrived)
        tile = staged.operands[0]
        prologue = self.prologue
        if prologue is None:
            return tile

        def make(part: Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(part * PART, PART), PART)
            for first in range(0, T, _COLUMNS):
                columns = pl.ds(first, _COLUMNS)
                loaded = (
                    _loaded(kind, each, rows, columns)
                    for (kind, _), each in zip(self.operands, staged.operands, strict=True)
                )
                # In place: operand and result have one layout, so a warp overwrites only what it
                # has loaded itself.
                tile[rows, columns] = prologue.elementwise(*loaded).astype(tile.dtype)

        # The compiled program has this loop, too. Unrolled, its addresses would take registers from
        # the code after it.
        lax.fori_loop(0, T // PART, make, None)
        # All threads have stored h. Without this, a thread that reads the tile by columns could
        # read the operand where another warp has not stored h yet.
        plgpu.commit_smem()
        return tile


def _loaded(kind: _Kind, staged: Any, rows: Any, columns: Any) -> Array:
    """Some rows and columns of a staged operand, in float32 registers."""
    index = {"tile": (rows, columns), "rows": (rows,), "columns": (columns,)}[kind]
    layout = {"tile": plgpu.Layout.WGMMA, "rows": ONE_A_ROW, "columns": _ONE_A_COLUMN}[kind]
    loaded = load(staged.at[index], layout).astype(jnp.float32)
    if kind == "tile":
        return loaded
    return lax.broadcast_in_dim(loaded, (PART, _COLUMNS), (0 if kind == "rows" else 1,))


def make_reader(
    operands: Sequence[Array],
    prologue: AbstractPrologue | None,
    *,
    separate: bool = False,
    multipliers: Sequence[Array] = (),
) -> tuple[Reader, list[Array]]:
    """The reader, and the operands as it reads them. All but the first may have axes of size 1.

    Matrices [M, K] become one matrix if that cuts no tile, unless `separate`.
    """
    x, *others = operands
    # Matrices also stay separate if each has its own values, or multipliers, for columns: the rows
    # of one matrix share these.
    separate = separate or any(
        each.shape[-2] == 1 and each.size > each.shape[-1] for each in (*others, *multipliers)
    )
    matrices = x.reshape(-1, *x.shape[-2:]) if separate else _as_matrices(x)
    described: list[tuple[_Kind, DType]] = [("tile", x.dtype)]
    arrays = [matrices]
    for each in others:
        if each.shape[-2:] == x.shape[-2:]:
            described.append(("tile", each.dtype))
            arrays.append(jnp.broadcast_to(each, x.shape).reshape(matrices.shape))
        else:
            described.append(("rows" if each.shape[-1] == 1 else "columns", each.dtype))
            arrays.append(pad_lines(each, x.shape, len(matrices)))
    return Reader(matrices.shape, prologue, tuple(described)), arrays


def pad_lines(values: Array, shape: Axes, matrices: int) -> Array:
    """Values of rows [L, M], or of columns [L, K], or [L], as a kernel reads them."""
    *lead, _, _ = shape
    if values.shape[-2] > 1 or matrices > 1:
        values = jnp.broadcast_to(values, (*lead, *values.shape[-2:]))
    flat = values.reshape(matrices, -1)
    # A row must not end inside a tile: Pallas copies one dimension without a check for that.
    return flat[:, 0] if flat.shape[1] == 1 else jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % T)))
