"""The kernel of Hopper's scaled matmul.

A block of threads computes one tile of the product after the other. It has three warpgroups:

  one producer     copies steps of 128 along K to shared memory          `_producer.produce`
  two consumers    multiply the steps, add them, scale, store a tile     `_consumer.consume`

The producer passes steps to the consumers in a ring of slots (`_ring`). A consumer adds them in
float32 registers (`_in_registers`), or in the tensor cores (`_in_tensor_cores`, fast accumulation).
Then it stores the result (`_epilogue`). `_matmul` has the sizes, which are known before the kernel
runs. `_memory` has the memory of a block.

Letters: B batch, M N K the axes of the matmul, C the array that the product is added to, S the side
  of a tile along K that shares a scale; T = 128.

References:
  Pallas Mosaic GPU reference, docs.jax.dev/en/latest/pallas/gpu/reference.html; CUDA C++
  Programming Guide, "Asynchronous Barrier" and "Tensor Memory Access".
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._consumer import consume
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Matmul
from jaxfp8.kernels.scaled_matmul.hopper._memory import (
    Block,
    Given,
    Shared,
    shared_memory,
    whole_row,
)
from jaxfp8.kernels.scaled_matmul.hopper._producer import produce
from jaxfp8.kernels.scaled_matmul.hopper._tiling import WARPGROUPS


def kernel(matmul: Matmul) -> Callable[..., Array]:
    """The kernel of one matmul: `multiply(lhs, rhs, lhs_scale, rhs_scale[, C])`.

    Values are [B, M, K] and [B, N, K]. C and the result are [B, M, N], with N rounded up by
    `whole_row`. The shapes of scales depend on `scaling`, with P = `scaling.parts`:

      scales of                lhs              rhs
      tiles 1xS                [B, P K/T, M]    [B, P K/T, N]
      square tiles, S = 128                     [B, N/T, K/T]
      square tiles, S = 32                      [B, K/T, P N/S]
      all of K (`at_end`)      [B, 1, M]        [B, 1, N]

    In scales M and N are rounded up to whole tiles. With a cluster, N is rounded up to two tiles.

    With C the product is added to C, and the sum is rounded once. If C has the dtype of the result,
    the result is written over C. XLA copies C before that, unless nothing else reads C.
    """
    launch = _over_addend if matmul.in_place else _to_new_array

    def multiply(
        lhs: Array, rhs: Array, lhs_scale: Array, rhs_scale: Array, addend: Array | None = None
    ) -> Array:
        return launch(matmul, Given(lhs, rhs, lhs_scale, rhs_scale, addend))

    return multiply


def grouped_kernel(matmul: Matmul) -> Callable[..., Array]:
    """The kernel of a grouped matmul: `multiply(lhs, rhs, lhs_scale, rhs_scale, groups)`.

    With grouping "rows" values are [1, M, K] and [E, N, K], the result is [1, T, N], and `groups`
    are `RowTiles`. With grouping "groups" values are [1, M, K] and [1, N, K], K counts the values
    of all groups, the result is [E, M, N], and `groups` are `GroupSteps`. Scales that all of K
    shares, [.., 1, M] and [.., 1, N], have the matrix of rhs, or the group, in front.
    """

    def multiply(lhs: Array, rhs: Array, lhs_scale: Array, rhs_scale: Array, groups: Any) -> Array:
        return _to_new_array(matmul, Given(lhs, rhs, lhs_scale, rhs_scale, groups=groups))

    return multiply


def _to_new_array(matmul: Matmul, given: Given) -> Array:
    rows = matmul.m if matmul.out_rows is None else matmul.out_rows
    shape = (matmul.batch, rows, whole_row(matmul.n, matmul.out_dtype.itemsize))
    return _launched(matmul, jax.ShapeDtypeStruct(shape, matmul.out_dtype))(given)


def _over_addend(matmul: Matmul, given: Given) -> Array:
    """The kernel that writes its result over C.

    That is safe: each patch belongs to one warpgroup, and it reads the patch of C before it writes.
    """
    result = jax.new_ref(given.addend)
    _launched(matmul, ())(given._replace(addend=None), result)
    return jax.freeze(result)


def _launched(matmul: Matmul, out_type: Any) -> Callable[..., Any]:
    """The kernel as a function of `Given`, and of the result if the result is no new array."""

    def body(given: Given, result: Any, shared: Shared) -> None:
        block, warpgroup = Block(matmul, given, result, shared), lax.axis_index("warpgroup")
        pl.when(warpgroup == WARPGROUPS)(lambda: produce(block))
        pl.when(warpgroup < WARPGROUPS)(lambda: consume(block, warpgroup))

    cluster: dict[str, Any] = {}
    if matmul.tiling.cluster == 2:
        cluster = {"cluster": (2,), "cluster_names": ("cluster",)}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[shared_memory(matmul)],
        grid=(matmul.clusters,),
        grid_names=("clusters",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        **cluster,
    )
