"""The kernel of Hopper's scaled matmul.

One warpgroup brings steps of 128 along K to shared memory by TMA, a ring of them, and runs ahead of the others from one tile
of the product into the next. The other two multiply: `wgmma` gives the product of a step, which is scaled and added in
float32 registers, for the tensor cores of Hopper keep about 14 bits of a sum. What is scaled at the end is added without
scales, or stays in the tensor cores (fast accumulation).

Letters: B batch, M N K matmul, C = ceil(K/T) steps; T = 128.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2; Pallas Mosaic GPU reference,
  docs.jax.dev/en/latest/pallas/gpu/reference.html.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels.scaled_matmul._mosaic_memory import load, shared_memory, whole_row
from jaxfp8.kernels.scaled_matmul._mosaic_scaling import Scaling, T, of_step, scaled_sum
from jaxfp8.kernels.scaled_matmul._mosaic_tiling import (
    COPYING_REGISTERS,
    MULTIPLYING_REGISTERS,
    ROWS,
    WARPGROUPS,
    Tiling,
)


def kernel(
    batch: int,
    m: int,
    n: int,
    k: int,
    formats: tuple[DType, DType],
    out_dtype: DType,
    tiling: Tiling,
    scaling: Scaling,
    add_to: DType | None = None,
) -> Callable[..., Array]:
    """The kernel for values [B, M, K] and [B, N, K] and their scales; K is a multiple of T, M and N are of 8.

    Scales of lhs are [B, C, M], those of rhs [B, C, N], or of square tiles [B, N/T, C]; each with M and N up to the next
    multiple of the tile (of a cluster). The result [B, M, N] has N up to the next multiple of 32 bytes, and so has C, of the
    dtype `add_to`, to which the product is added before it is rounded. Where that is the result's dtype, C becomes the result:
    XLA copies it before, unless nothing else reads it.
    """
    sizes: dict[str, Any] = {"scaling": scaling, "itemsize": out_dtype.itemsize}
    sizes["added"] = 0 if add_to is None else add_to.itemsize
    tiling.check(**sizes)
    (tile_m, tile_n), steps, stages = tiling.tile, k // T, tiling.stages
    tiles_m, tiles_n = pl.cdiv(m, tile_m), pl.cdiv(n, tile_n * tiling.cluster)  # the latter of a cluster
    tiles = batch * tiles_m * tiles_n
    clusters = min(tiles, tiling.blocks // tiling.cluster)
    width = tiling.width(**sizes)
    corners = [(above, left) for above in range(0, tiling.rows, ROWS) for left in range(0, tiling.columns, width)]
    slots = tiling.slots(**sizes)
    boxes = scaling.box(0, tile_m), scaling.box(1, tile_n)

    def where(index: Array) -> tuple[Array, Array, Array]:
        """Batch, tile along M and tile along N of a block's turn."""
        lead, index = lax.div(index, tiles_m * tiles_n), lax.rem(index, tiles_m * tiles_n)
        first = lax.div(index, tiling.group * tiles_n) * tiling.group
        index = lax.rem(index, tiling.group * tiles_n)
        rows = jnp.minimum(tiles_m - first, tiling.group)
        across = lax.div(index, rows)
        if tiling.cluster == 2:
            across = across * tiling.cluster + lax.axis_index("cluster")
        return lead, first + lax.rem(index, rows), across

    def body(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, *rest: Any) -> None:
        *given, (a, b, a_scale, b_scale), (results, addend, added), filled, emptied = rest
        before, out = given[0], given[-1]  # the same where C becomes the result
        warpgroup = lax.axis_index("warpgroup")

        def at(turn: Array, step: Array) -> tuple[Array, Array]:
            count = turn * steps + step
            return count, lax.rem(count, stages)

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
            shared: dict[str, Any] = {"collective_axes": "cluster"} if tiling.cluster == 2 else {}

            @plgpu.nd_loop((tiles,), collective_axes="clusters")
            def _tile(turn: Any) -> None:
                lead, down, across = where(turn.index[0])

                @pl.loop(0, steps)
                def _step(step: Array) -> None:
                    count, slot = at(turn.local_index, step)

                    @pl.when(count >= stages)
                    def _wait() -> None:
                        plgpu.barrier_wait(emptied.at[slot])

                    rows, columns = pl.ds(down * tile_m, tile_m), pl.ds(across * tile_n, tile_n)
                    along = pl.ds(step * T, T)
                    plgpu.copy_gmem_to_smem(lhs.at[lead, rows, along], a.at[slot], filled.at[slot], **shared)
                    plgpu.copy_gmem_to_smem(rhs.at[lead, columns, along], b.at[slot], filled.at[slot])
                    for scales, to, first, box in (
                        (lhs_scale, a_scale, down * tile_m, boxes[0]),
                        (rhs_scale, b_scale, across * tile_n, boxes[1]),
                    ):
                        if box is not None:
                            there, here = _of_step(box[0], scaling, step, first)
                            plgpu.copy_gmem_to_smem(scales.at[lead, *there], to.at[slot, *here], filled.at[slot])

            index, size = lax.axis_index("clusters"), clusters
            total = (tiles // size + (index < tiles % size).astype(jnp.int32)) * steps

            @pl.loop(jnp.maximum(total - stages, 0), total)
            def _finish(count: Array) -> None:  # a block must not end while its neighbour writes to it
                plgpu.barrier_wait(emptied.at[lax.rem(count, stages)])

        @pl.when(warpgroup < WARPGROUPS)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
            own = warpgroup * tiling.columns if tiling.beside else warpgroup * tiling.rows
            row, column = (0, own) if tiling.beside else (own, 0)

            @plgpu.nd_loop((tiles,), collective_axes="clusters")
            def _tile(turn: Any) -> None:
                lead, down, across = where(turn.index[0])
                first = across * tile_n + column

                def place(part: int) -> tuple[Any, Any]:
                    above, left = corners[part]
                    return pl.ds(down * tile_m + row + above, ROWS), pl.ds(first + left, width)

                def bring(part: int) -> None:
                    if add_to is not None and part < len(corners):
                        there = before.at[lead, *place(part)]
                        plgpu.copy_gmem_to_smem(there, addend.at[warpgroup], added.at[warpgroup])

                bring(0)

                def step(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                    _, slot = at(turn.local_index, step)
                    plgpu.barrier_wait(filled.at[slot])
                    summed, last = list(sums), (scaling.parts - 1, *corners[-1])
                    for part, above in itertools.product(range(scaling.parts), range(0, tiling.rows, ROWS)):
                        rows, along = pl.ds(row + above, ROWS), pl.ds(part * scaling.tile, scaling.tile)
                        of_square = rhs_scale[lead, lax.div(first, T), step] if boxes[1] is None and boxes[0] else None
                        of_rows = load(a_scale.at[slot, part, rows], 1) if boxes[0] else None
                        product = _product(a.at[slot, rows, along], b.at[slot, pl.ds(column, tiling.columns), along])
                        for left in range(0, tiling.columns, width):
                            # Not sooner: there are registers for the scales of a part's columns, not of all.
                            of_columns = of_square
                            if boxes[1] and scaling.square:
                                cell = lax.div(column + left, scaling.tile)
                                of_columns = b_scale[slot, cell * scaling.parts + part]
                            elif boxes[1]:
                                of_columns = load(b_scale.at[slot, part, pl.ds(column + left, width)], 0)
                            if (part, above, left) == last:
                                if boxes[0]:
                                    plgpu.commit_smem()  # so that TMA overwrites no scale that is still to be read
                                plgpu.barrier_arrive(emptied.at[slot])
                            more, index = product[:, left : left + width], corners.index((above, left))
                            if of_rows is not None and of_columns is not None:
                                more *= of_step(of_rows, of_columns, more.shape)
                            summed[index] += more
                    return tuple(summed)

                def accumulated(*sums: Any) -> tuple[Array, ...]:
                    """All of K in the tensor cores; a step is waited for when the next one has begun."""

                    @pl.loop(0, steps)
                    def _step(step: Array) -> None:
                        count, slot = at(turn.local_index, step)
                        plgpu.barrier_wait(filled.at[slot])
                        for above, into in zip(range(0, tiling.rows, ROWS), sums, strict=True):
                            values = a.at[slot, pl.ds(row + above, ROWS)], b.at[slot, pl.ds(column, tiling.columns)]
                            plgpu.wgmma(into, values[0], values[1].transpose((1, 0)))
                        plgpu.wgmma_wait(len(sums))

                        @pl.when(step > 0)
                        def _free() -> None:
                            plgpu.barrier_arrive(emptied.at[lax.rem(count - 1, stages)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(emptied.at[at(turn.local_index, jnp.int32(steps - 1))[1]])
                    whole = [into[...] for into in sums]
                    return tuple(whole[above // ROWS][:, left : left + width] for above, left in corners)

                if scaling.fast:
                    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, tiling.columns), jnp.float32)
                    sums = pl.run_scoped(accumulated, *[accumulator] * (tiling.rows // ROWS))
                else:
                    zero = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
                    sums = lax.fori_loop(0, steps, step, (zero,) * len(corners))
                for part, result in enumerate(sums):
                    slot, (rows, columns) = part % slots, place(part)
                    if scaling.at_end:
                        of_rows, of_columns = lhs_scale.at[lead, 0, rows], rhs_scale.at[lead, 0, columns]
                        result = scaled_sum(result, load(of_rows, 1), load(of_columns, 0))
                    if add_to is not None:
                        plgpu.barrier_wait(added.at[warpgroup])
                        there = addend.at[warpgroup]
                        result += plgpu.load(there, layout=plgpu.Layout.WGMMA).astype(jnp.float32)  # type: ignore[call-arg]
                    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    results[warpgroup, slot] = result.astype(out_dtype)
                    plgpu.commit_smem()  # also so that TMA overwrites nothing of C that is still to be read
                    bring(part + 1)
                    plgpu.copy_smem_to_gmem(results.at[warpgroup, slot], out.at[lead, rows, columns])

            plgpu.wait_smem_to_gmem(0)

    out_shape = (batch, m, whole_row(n, out_dtype.itemsize))
    cluster: dict[str, Any] = {"cluster": (2,), "cluster_names": ("cluster",)} if tiling.cluster == 2 else {}
    scratch = shared_memory(n, formats, out_dtype, tiling, scaling, add_to)
    in_place = add_to == out_dtype
    call = plgpu.kernel(
        body, out_type=() if in_place else jax.ShapeDtypeStruct(out_shape, out_dtype), scratch_types=scratch,
        grid=(clusters,), grid_names=("clusters",), num_threads=WARPGROUPS + 1, thread_name="warpgroup",
        **cluster,
    )  # fmt: skip

    def overwrite(*arguments: Array) -> Array:
        result = jax.new_ref(arguments[-1])
        call(*arguments[:-1], result)
        return jax.freeze(result)

    return overwrite if in_place else call


def _of_step(box: Axes, scaling: Scaling, step: Array, first: Array) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where the scales of a step lie in global memory, behind B, and in a slot; `first`, row of lhs or column of rhs."""
    if len(box) == 1:
        return (step, pl.ds(lax.div(first, scaling.tile) * scaling.parts, box[0])), (pl.ds(0, box[0]),)
    return (pl.ds(step * scaling.parts, box[0]), pl.ds(first, box[1])), ()


def _product(a: Any, b: Any) -> Array:
    """[64, C] float32 of a part of a step, a [64, S] and b [C, S] in shared memory."""

    def product(sums: Any) -> Array:
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))
