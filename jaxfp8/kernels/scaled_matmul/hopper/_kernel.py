"""The kernel: the warpgroup that copies, and the warpgroups that multiply.

A block of threads computes one tile of the product after the other. It has three warpgroups:

  one producer     copies steps of 128 along K to shared memory          `_produce`
  two consumers    multiply the steps, add them, scale, store a tile     `_consumer.consume`

The producer passes steps to the consumers in a ring of slots. A consumer adds them in float32
registers, or in the tensor cores (fast accumulation). Then it stores the result. `_matmul` has the
sizes, which are known before the kernel runs. `_memory` has the memory of a block.

Letters: B batch, M N K the axes of the matmul, C the array that the product is added to, S the side
  of a tile along K that shares a scale; T = 128.

References:
  Pallas Mosaic GPU reference, docs.jax.dev/en/latest/pallas/gpu/reference.html; CUDA C++
  Programming Guide, "Asynchronous Barrier" and "Tensor Memory Access".
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels._dispatch import traced_once
from jaxfp8.kernels.scaled_matmul.hopper._consumer import consume
from jaxfp8.kernels.scaled_matmul.hopper._matmul import (
    Matmul,
    Tile,
    lay_out_scales,
    pad_to_multiple,
)
from jaxfp8.kernels.scaled_matmul.hopper._memory import (
    Block,
    Given,
    Shared,
    for_each_tile,
    round_up_row,
    shared_memory,
)
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import WARPGROUPS, GroupSteps, RowTiles, Tiling

_COPYING_REGISTERS = 40
_MULTIPLYING_REGISTERS = 232
"""The registers that a thread asks for while it copies, and while it multiplies.

128 threads copy and 256 multiply: 128 * 40 + 256 * 232 registers, as many as 384 * 168. A
multiprocessor has 65536.
"""

# The producer: one warpgroup that copies steps to shared memory by TMA.
#
# It runs ahead of the consumers while the ring has free slots, also into the next tile of the
# product. So copies for the next tile are under way while the consumers store the previous one.


def _produce(block: Block) -> None:
    """Fill slot after slot with the steps of all tiles of the block."""
    ring = block.ring
    # It needs few registers. The consumers' request waits until it has given back the rest.
    plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")

    def fill(tile: Tile, before: Array) -> None:
        @pl.loop(0, tile.steps)
        def _step(step: Array) -> None:
            count, slot = ring.at(before, step)
            # Consumers have read the step that was in this slot. In a cluster those of both blocks
            # have: `_copy_values` writes to both.
            ring.wait_emptied(count, slot)
            _copy_values(block, tile, tile.first_step + step, slot)
            _copy_scales(block, tile, tile.first_step + step, slot)

    ring.drain(for_each_tile(block, fill))


def _copy_values(block: Block, tile: Tile, step: Array, slot: Array) -> None:
    """Start to copy the values of a step. Each copy arrives once at `filled`."""
    given, staged, tiling = block.given, block.shared.staged, block.matmul.tiling
    filled = block.shared.barriers.filled.at[slot]
    # The two blocks of a cluster need the same rows of lhs. Each block reads half of them, and TMA
    # writes this half to both blocks.
    shared: dict[str, Any] = {"collective_axes": "cluster"} if tiling.cluster == 2 else {}
    tile_m, tile_n = tiling.tile
    rows, columns = pl.ds(tile.down * tile_m, tile_m), pl.ds(tile.across * tile_n, tile_n)
    along = pl.ds(step * T, T)
    lhs, rhs = given.lhs.at[tile.of_lhs, rows, along], given.rhs.at[tile.of_rhs, columns, along]
    plgpu.copy_gmem_to_smem(lhs, staged.lhs.at[slot], filled, **shared)
    plgpu.copy_gmem_to_smem(rhs, staged.rhs.at[slot], filled)


def _copy_scales(block: Block, tile: Tile, step: Array, slot: Array) -> None:
    """Start to copy the scales of a step, for operands that have a box in `Matmul.boxes`."""
    given, staged, matmul = block.given, block.shared.staged, block.matmul
    filled = block.shared.barriers.filled.at[slot]
    tile_m, tile_n = matmul.tiling.tile
    firsts = tile.down * tile_m, tile.across * tile_n
    sources, slots = (given.lhs_scale, given.rhs_scale), (staged.lhs_scale, staged.rhs_scale)
    leads = tile.of_lhs, tile.of_rhs
    for box, lead, first, source, to in zip(
        matmul.boxes, leads, firsts, sources, slots, strict=True
    ):
        if box is not None:
            there, here = _of_step(box[0], matmul.scaling, step, first)
            # It arrives at `filled`, like the values. So one wait covers them all.
            plgpu.copy_gmem_to_smem(source.at[lead, *there], to.at[slot, *here], filled)


def _of_step(
    box: Axes, scaling: Scaling, step: Array, first: Array
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Indices of a step's scales: in global memory (without B), and in a slot."""
    # Square tiles of 32: `lay_out_scales` makes the scales of a step adjacent. A slot may be longer
    # than the box, because it is rounded up to whole units of TMA.
    if len(box) == 1:
        cells = pl.ds(lax.div(first, scaling.tile) * scaling.parts, box[0])
        return (step, cells), (pl.ds(0, box[0]),)
    return (pl.ds(step * scaling.parts, box[0]), pl.ds(first, box[1])), ()


# The whole kernel, for one matmul or for groups.

_BOX = 8  # rows of a box in shared memory (`_memory._permuted`): arrays have whole boxes


def multiply(
    values: Sequence[Array],
    scales: Sequence[Array],
    tiling: Tiling,
    scaling: Scaling,
    *,
    batch: int,
    out_dtype: DType,
    add_to: Array | None = None,
    groups: RowTiles | GroupSteps | None = None,
    out_rows: int | None = None,
) -> Array:
    """[B, M, N] of values [B, M, K] and [B, N, K], whose scales are those of `scale_matrix`.

    See `launch` for the other shapes of groups. K is a multiple of T.
    """
    m, n = (x.shape[1] for x in values)
    lhs, rhs = (pad_to_multiple(x, 1, _BOX) for x in values)
    # The kernel copies the scales of whole tiles, so they are padded to these. Along N the unit is
    # the two tiles of a cluster.
    down, across = tiling.tile
    extents = down, across * tiling.cluster
    lhs_scale, rhs_scale = (
        lay_out_scales(scale, side, extent, scaling)
        for side, (scale, extent) in enumerate(zip(scales, extents, strict=True))
    )
    if add_to is not None:
        row = round_up_row(1, add_to.dtype.itemsize)
        add_to = pad_to_multiple(pad_to_multiple(add_to, 1, _BOX), 2, row)
    matmul = Matmul(
        batch=batch, m=lhs.shape[1], n=rhs.shape[1], k=lhs.shape[2], formats=(lhs.dtype, rhs.dtype),
        out_dtype=out_dtype, tiling=tiling, scaling=scaling, out_rows=out_rows,
        add_to=None if add_to is None else add_to.dtype,
        grouping=None if groups is None else "rows" if isinstance(groups, RowTiles) else "groups",
    )  # fmt: skip
    given = Given(lhs, rhs, lhs_scale, rhs_scale, add_to, groups)
    result: Array = traced_once(launch, matmul, given)
    return result[:, :m, :n]


def launch(matmul: Matmul, given: Given) -> Array:
    """Run the kernel.

    Values are [B, M, K] and [B, N, K]. C and the result are [B, M, N], with N rounded up by
    `round_up_row`. The shapes of scales depend on `scaling`, with P = `scaling.parts`:

      scales of                lhs              rhs
      tiles 1xS                [B, P K/T, M]    [B, P K/T, N]
      square tiles, S = 128                     [B, N/T, K/T]
      square tiles, S = 32                      [B, K/T, P N/S]
      all of K (`at_end`)      [B, 1, M]        [B, 1, N]

    In scales M and N are rounded up to whole tiles. With a cluster, N is rounded up to two tiles.

    With C the product is added to C, and the sum is rounded once. If C has the dtype of the result,
    the result is written over C. XLA copies C before that, unless nothing else reads C.

    With grouping "rows" values are [1, M, K] and [E, N, K], the result is [1, T, N], and `groups`
    are `RowTiles`. With grouping "groups" values are [1, M, K] and [1, N, K], K counts the values
    of all groups, the result is [E, M, N], and `groups` are `GroupSteps`. Scales that all of K
    shares, [.., 1, M] and [.., 1, N], have the matrix of rhs, or the group, in front.
    """

    def body(given: Given, result: Any, shared: Shared) -> None:
        block, warpgroup = Block(matmul, given, result, shared), lax.axis_index("warpgroup")
        pl.when(warpgroup == WARPGROUPS)(lambda: _produce(block))

        @pl.when(warpgroup < WARPGROUPS)
        def _consume() -> None:
            # They take the registers that the producer gives back (`_produce`).
            plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
            consume(block, warpgroup)

    cluster: dict[str, Any] = {}
    if matmul.tiling.cluster == 2:
        cluster = {"cluster": (2,), "cluster_names": ("cluster",)}
    rows = matmul.m if matmul.out_rows is None else matmul.out_rows
    shape = (matmul.batch, rows, round_up_row(matmul.n, matmul.out_dtype.itemsize))
    kernel: Any = plgpu.kernel(
        body,
        out_type=() if matmul.in_place else jax.ShapeDtypeStruct(shape, matmul.out_dtype),
        scratch_types=[shared_memory(matmul)],
        grid=(matmul.clusters,),
        grid_names=("clusters",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        **cluster,
    )
    if not matmul.in_place:
        product: Array = kernel(given)
        return product
    # Each patch belongs to one warpgroup, which reads the patch of C before it writes.
    result = jax.new_ref(given.addend)
    kernel(given._replace(addend=None), result)
    return jax.freeze(result)
