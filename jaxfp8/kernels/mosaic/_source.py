"""How a block of threads in Pallas (Mosaic GPU) gets its tile: from memory, or by a prologue.

A prologue is applied in place. The tile of its first operand becomes that of h, the result of the
prologue, before the kernel reads it. h is rounded to its dtype, as if it had been written and read.
So a kernel does the same in both cases, and computes h once for all directions.

Letters: L the leading axes as one, M, K the last two; T = 128.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels.mosaic._tiles import PART, T, as_matrices, check_array, place, shared_tile
from jaxfp8.prologues._prologue import AbstractPrologue, Produced, Source

Kind: TypeAlias = Literal["tile", "rows", "columns"]
"""An operand [L, M, K], or a value for each row [L, M] or column [L, K] in float32."""
# Columns of a part: with all T of them two operands and an exponential take all 255 registers of a
# thread.
_COLUMNS = 64
# Where the values of rows and of columns are, in the registers that hold a tile.
ONE_A_ROW, _ONE_A_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def operands_of(x: Source) -> tuple[Array, ...]:
    """The arrays that a kernel reads for x, the first with its shape.

    Raises:
      NotImplementedError: see `check_array`.
    """
    operands = x.operands if isinstance(x, Produced) else (x,)
    check_array(operands[0])
    return operands


class Staged(NamedTuple):
    """What a kernel has in shared memory to get its tile: types for `plgpu.kernel`, then refs.

    Attributes:
      operands: a tile, a line of rows or a line of columns for each operand.
      arrived: the barrier at which every operand arrives.
    """

    operands: list[Any]
    arrived: Any


@dataclasses.dataclass(frozen=True)
class Reader:
    """What a kernel reads for an array [L, M, K].

    Attributes:
      shape: L, M, K.
      prologue: what makes the array of its operands; None for an array in memory.
      operands: the kind and the dtype of each; those that are tiles have the shape of the array.
    """

    shape: Axes
    prologue: AbstractPrologue | None
    operands: tuple[tuple[Kind, DType], ...]

    def staged(self, *, beside: int = 0) -> Staged:
        """Shared memory for what is read.

        Args:
          beside: how many arrays of its own the kernel brings to the same barrier.
        """
        operands = [
            shared_tile(dtype, self.shape) if kind == "tile" else plgpu.SMEM((T,), dtype)
            for kind, dtype in self.operands
        ]
        return Staged(operands, plgpu.Barrier(num_arrivals=len(operands) + beside))

    def start(self, operands: Sequence[Any], staged: Staged) -> None:
        """Start to bring in what the tile of this block of threads is made of: one arrival each."""
        at, down, across = place(self.shape).window
        windows = {"tile": (at, down, across), "rows": (at, down), "columns": (at, across)}
        for (kind, _), operand, here in zip(self.operands, operands, staged.operands, strict=True):
            plgpu.copy_gmem_to_smem(operand.at[windows[kind]], here, staged.arrived)

    def tile(self, staged: Staged) -> Any:
        """The tile in shared memory. Waits until all has arrived."""
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
                tile[rows, columns] = prologue.elementwise(*loaded).astype(tile.dtype)

        # A loop in the program, too, or its addresses take registers from what follows.
        lax.fori_loop(0, T // PART, make, None)
        plgpu.commit_smem()  # other threads read it, by columns too
        return tile


def _loaded(kind: Kind, staged: Any, rows: Any, columns: Any) -> Array:
    """These rows and columns of what is staged for an operand, in float32 registers."""
    index = {"tile": (rows, columns), "rows": (rows,), "columns": (columns,)}[kind]
    layout = {"tile": plgpu.Layout.WGMMA, "rows": ONE_A_ROW, "columns": _ONE_A_COLUMN}[kind]
    load: Any = plgpu.load  # before jax 0.11 it has no layout=
    loaded = load(staged.at[index], layout=layout).astype(jnp.float32)
    if kind == "tile":
        return loaded
    return lax.broadcast_in_dim(loaded, (PART, _COLUMNS), (0 if kind == "rows" else 1,))


def reader(
    operands: Sequence[Array], prologue: AbstractPrologue | None, *, separate: bool = False
) -> tuple[Reader, list[Array]]:
    """The reader, and the operands as it reads them.

    Args:
      operands: the first [..., M, K], the others with its axes or 1.
      prologue: see `Reader`.
      separate: keep the matrices of the array separate. Else they become one where that cuts no
        tile.
    """
    x, *others = operands
    # Matrices stay separate, too, if each has its own values for columns.
    separate = separate or any(
        each.shape[-2] == 1 and each.size > each.shape[-1] for each in others
    )
    matrices = x.reshape(-1, *x.shape[-2:]) if separate else as_matrices(x)
    described: list[tuple[Kind, DType]] = [("tile", x.dtype)]
    arrays = [matrices]
    for each in others:
        if each.shape[-2:] == x.shape[-2:]:
            described.append(("tile", each.dtype))
            arrays.append(jnp.broadcast_to(each, x.shape).reshape(matrices.shape))
        else:
            described.append(("rows" if each.shape[-1] == 1 else "columns", each.dtype))
            arrays.append(lined(each, x.shape, len(matrices)))
    return Reader(matrices.shape, prologue, tuple(described)), arrays


def lined(values: Array, shape: Axes, matrices: int) -> Array:
    """Values of rows or columns as a kernel reads them.

    [L], or [L, M] (of columns [L, K]) for whole tiles.

    A copy in one dimension does not look where a row ends. So no row ends inside a tile.
    """
    *lead, _, _ = shape
    if values.shape[-2] > 1 or matrices > 1:
        values = jnp.broadcast_to(values, (*lead, *values.shape[-2:]))
    flat = values.reshape(matrices, -1)
    return flat[:, 0] if flat.shape[1] == 1 else jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % T)))
