"""The grouped matmul of a TPU 7x, in Pallas: rows in groups are read where they are.

Two kernels. `_rows_kernel` multiplies the rows of each group by the group's matrix, for fprop and
dgrad. `_sums_kernel` sums over the rows of each group, for wgrad. The matrix unit reads E4M3 and
E5M2, also one of each. Products are summed in float32, scaled in the kernel, and rounded once.

The rows of an array are split into blocks of B rows, whatever the groups are. A step of the grid is
a visit: one block for one group. A block that holds rows of several groups is visited once for each
of them, and rows of other groups are masked. So nothing is padded, gathered or scattered. The
number of visits depends on shapes alone. Visits that no group needs do nothing.

The contracted axis of `_rows_kernel` is not split, so a block of the matrix has all of it. Between
visits of one group the matrix stays in VMEM. `_fitting` chooses the sizes of blocks by the memory
that they need.

Letters: T rows, E groups, B rows of a block, V visits; K N the axes of matrices.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType
from jaxfp8.kernels.grouped_matmul._groups import Groups, on_one_device
from jaxfp8.kernels.scaled_matmul._call import MatmulCall

_LANES = 128  # columns of blocks are multiples of it
# A core has 64 MiB of VMEM. The compiler's own buffers need some of it.
_VMEM_LIMIT, _VMEM_FOR_BLOCKS = 60 * 2**20, 44 * 2**20
_FIRST = np.int32(0)  # of blocks. With 64 bits enabled, Pallas would make an int64 of 0.
# B. With 512 or 1024 rows the compiler's code is as good for each row, and groups of other sizes
# waste more at their ends.
_ROWS = 256


def grouped_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    groups: Groups,
    call: MatmulCall,
    *,
    interpret: Any = False,
) -> Array:
    """See `kernels.grouped_matmul._api.multiply`. P is 1: lhs is [T, 1, K].

    Raises NotImplementedError for scales of rows and of tiles, for another P, and for features that
    do not fit into VMEM. Also for several devices, except inside `jax.shard_map` with all axes
    manual. `interpret` is that of `pallas_call`.
    """
    if not (lhs.granularity.in_one and rhs.granularity.in_one):
        raise NotImplementedError(
            f"The operands have scales of {lhs.granularity!r} and {rhs.granularity!r}. This kernel "
            "multiplies scales of tensors. jax.lax.ragged_dot multiplies those of rows."
        )
    if groups.tile != 1:
        raise NotImplementedError(
            f"Rows are in padded tiles of {groups.tile}, for a kernel of another matmul of the "
            "layer. This kernel reads rows where they are."
        )

    def product(lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups) -> Array:
        return _product(lhs, rhs, groups, call, interpret)

    return on_one_device(product, lhs, rhs, groups)


def _product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall, interpret: Any
) -> Array:
    # The first row of a group has its scale. A group without rows gets 1, and never uses it.
    first, live = jnp.minimum(groups.first_tile, groups.count - 1), groups.tiles > 0
    b_scale = rhs.scale[first] if call.sums_rows else rhs.scale
    a, b = (jnp.where(live, each, 1.0) for each in (lhs.scale[first], b_scale))
    # The smaller scale first, as in `scale_product`.
    scales = jnp.minimum(a, b), jnp.maximum(a, b)
    # Pallas writes these dtypes. Float16 is rounded once more, as everywhere, from float32.
    writes = call.out_dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    out = call.out_dtype if writes else jnp.dtype(jnp.float32)
    x, columns = _whole_lanes(lhs.values[:, 0], -1), rhs.shape[-1]
    if call.sums_rows:
        k, y = lhs.shape[-1], _whole_lanes(rhs.values[:, 0], -1)
        found = _sum_rows(x, y, groups, scales, out, interpret)[:, :k, :columns]
    else:
        transposed = call.geometry.rhs.contracted == (1,)
        columns = rhs.shape[1] if transposed else columns
        w = _whole_lanes(_whole_lanes(rhs.values, 1), 2)
        found = _multiply_rows(x, w, groups, scales, out, transposed, interpret)[:, :columns]
    return found.astype(call.out_dtype)


def _whole_lanes(x: Array, axis: int) -> Array:
    """x with zeros behind an axis, up to a multiple of `_LANES`."""
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -x.shape[axis] % _LANES)
    return jnp.pad(x, pads) if pads[axis][1] else x


# Visits.


class _Visits(NamedTuple):
    """Which block of rows each step works on, and for which group. The kernels read it as scalars.

    Groups of [5, 0, 3] rows in blocks of 4 are visited as (0, 0), (0, 1), (2, 1): group, block.
    """

    group: Array  # i32[V]
    block: Array  # i32[V]
    start: Array  # i32[groups], the first row of each group
    end: Array  # i32[groups], the row behind its last one
    used: Array  # i32[1], how many visits are needed. The others are behind them.

    @classmethod
    def of(cls, groups: Groups, rows: int, *, tail: bool) -> "_Visits":
        """The visits of blocks of `rows` rows. In order of groups, and so of blocks.

        With `tail`, rows of no group are one more group, and groups without rows are not visited.
        Otherwise each group is visited at least once.
        """
        start, end = groups.first_tile, groups.first_tile + groups.tiles
        if tail:
            live = jnp.sum(groups.tiles, dtype=jnp.int32)[None]
            start = jnp.append(start, live)
            end = jnp.append(end, jnp.full_like(live, groups.tokens))
        blocks = pl.cdiv(groups.tokens, rows)
        first = jnp.minimum(start // rows, blocks - 1)
        count = jnp.where(end > start, -(-end // rows) - first, 0 if tail else 1)
        last = jnp.cumsum(count, dtype=jnp.int32)
        visit = jnp.arange(blocks + groups.experts, dtype=jnp.int32)
        group = jnp.sum(last[None, :] <= visit[:, None], axis=1, dtype=jnp.int32)
        # Visits behind the last one keep its group and block, so that nothing is copied for them.
        latest = jnp.max(jnp.where(count > 0, jnp.arange(count.size, dtype=jnp.int32), 0))
        group = jnp.minimum(group, latest)
        place = jnp.minimum(visit - (last - count)[group], count[group] - 1)
        return cls(group, first[group] + place, start, end, last[-1:])


# Rows times matrices.


def _multiply_rows(
    x: Array, w: Array, groups: Groups, scales: tuple[Array, Array], out_dtype: DType,
    transposed: bool, interpret: Any,
) -> Array:  # fmt: skip
    """[T, N]: each row of a group of x [T, K] times its matrix, of w [E, K, N] or [E, N, K]."""
    (tokens, k), n = x.shape, w.shape[1 if transposed else 2]
    rows, size = _ROWS, jnp.dtype(out_dtype).itemsize
    # Two buffers of each block, and the product in float32.
    columns = _fitting(n, lambda n: 2 * (rows * k + k * n + rows * n * size) + 4 * rows * n)
    visits = _Visits.of(groups, rows, tail=True)

    def of_matrix(n: Any, visit: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        matrix = jnp.minimum(group[visit], groups.experts - 1)
        return (matrix, n, _FIRST) if transposed else (matrix, _FIRST, n)

    shape = (None, columns, k) if transposed else (None, k, columns)
    return _call(
        functools.partial(_rows_kernel, transposed=transposed, experts=groups.experts),
        visits, scales, (x, w), grid=(pl.cdiv(n, columns), visits.group.size),
        in_specs=[
            pl.BlockSpec((rows, k), lambda n, visit, group, block, *_: (block[visit], _FIRST)),
            pl.BlockSpec(shape, of_matrix),
        ],
        out_specs=pl.BlockSpec(
            (rows, columns), lambda n, visit, group, block, *_: (block[visit], n)
        ),
        out=((tokens, n), out_dtype), name="grouped_rows", interpret=interpret,
    )  # fmt: skip


def _rows_kernel(
    group: Any, block: Any, start: Any, end: Any, used: Any, smaller: Any, larger: Any,
    x: Any, w: Any, y: Any, *, transposed: bool, experts: int,
) -> None:  # fmt: skip
    visit = pl.program_id(1)
    of = group[visit]
    row = block[visit] * y.shape[0] + lax.broadcasted_iota(jnp.int32, (y.shape[0], 1), 0)
    own = (row >= start[of]) & (row < end[of])

    def write(found: Array) -> None:
        # The block stays in VMEM until the visits of all groups that have rows in it are done.
        y[...] = jnp.where(own, found.astype(y.dtype), y[...])

    @pl.when((visit < used[0]) & (of < experts))
    def _() -> None:
        found = _dot(x[...], w[...], 1, 1 if transposed else 0)
        write((found * smaller[of]) * larger[of])

    @pl.when((visit < used[0]) & (of == experts))
    def _() -> None:
        write(jnp.zeros(y.shape, jnp.float32))


# Sums over rows.


def _sum_rows(
    x: Array, y: Array, groups: Groups, scales: tuple[Array, Array], out_dtype: DType,
    interpret: Any,
) -> Array:  # fmt: skip
    """[E, K, N]: for each group the sum of the products of its rows of x [T, K] and y [T, N]."""
    k, n, rows = x.shape[1], y.shape[1], _ROWS
    size = jnp.dtype(out_dtype).itemsize

    def bytes_of(k: int, n: int) -> int:
        return 2 * (rows * (k + n) + k * n * size) + 4 * k * n

    # As square as possible: x is read once for each block of columns of y, and y for those of x.
    side = _fitting(max(k, n), lambda side: bytes_of(min(k, side), min(n, side)))
    of_k, of_n = min(k, side), min(n, side)
    visits = _Visits.of(groups, rows, tail=False)
    return _call(
        _sums_kernel, visits, scales, (x, y),
        grid=(pl.cdiv(k, of_k), pl.cdiv(n, of_n), visits.group.size),
        in_specs=[
            pl.BlockSpec((rows, of_k), lambda k, n, visit, group, block, *_: (block[visit], k)),
            pl.BlockSpec((rows, of_n), lambda k, n, visit, group, block, *_: (block[visit], n)),
        ],
        out_specs=pl.BlockSpec(
            (None, of_k, of_n), lambda k, n, visit, group, *_: (group[visit], k, n)
        ),
        out=((groups.experts, k, n), out_dtype), name="grouped_sums", interpret=interpret,
        scratch=[pltpu.VMEM((of_k, of_n), jnp.float32)],
    )  # fmt: skip


def _sums_kernel(
    group: Any, block: Any, start: Any, end: Any, used: Any, smaller: Any, larger: Any,
    x: Any, y: Any, result: Any, total: Any,
) -> None:  # fmt: skip
    visit, rows = pl.program_id(2), x.shape[0]
    of = group[visit]
    last_of_group = group[jnp.minimum(visit + 1, used[0] - 1)] != of

    @pl.when((visit == 0) | (group[jnp.maximum(visit - 1, 0)] != of))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(visit < used[0])
    def _() -> None:
        first, last = start[of] - block[visit] * rows, end[of] - block[visit] * rows
        # Both are masked, because rows of other groups may hold NaN.
        total[...] += _dot(_masked(x[...], first, last), _masked(y[...], first, last), 0, 0)

    @pl.when((visit == used[0] - 1) | (last_of_group & (visit < used[0])))
    def _() -> None:
        result[...] = ((total[...] * smaller[of]) * larger[of]).astype(result.dtype)


def _masked(x: Array, first: Array, last: Array) -> Array:
    """x [B, K] of 8 bits, with 0 in the rows before `first` and from `last` on."""
    # Four rows are in one word, and the vector unit has no masks of bytes.
    words = pltpu.bitcast(x, jnp.uint32)
    row = 4 * lax.broadcasted_iota(jnp.int32, words.shape, 0)
    mask = jnp.zeros_like(words)
    for byte in range(4):
        own = (row + byte >= first) & (row + byte < last)
        mask |= jnp.where(own, jnp.uint32(0xFF << 8 * byte), jnp.uint32(0))
    return pltpu.bitcast(words & mask, x.dtype)


# What both kernels share.


def _dot(a: Array, b: Array, contracted_of_a: int, contracted_of_b: int) -> Array:
    dimension_numbers = (((contracted_of_a,), (contracted_of_b,)), ((), ()))
    # The kernel does not compile for FP8 at the precision that `jax_default_matmul_precision` may
    # ask for.
    return lax.dot_general(
        a, b, dimension_numbers, precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _fitting(size: int, bytes_of: Callable[[int], int]) -> int:
    """The largest block of an axis whose blocks fit into VMEM. The axis is split evenly."""
    for parts in range(1, size // _LANES + 1):
        block = pl.cdiv(pl.cdiv(size, parts), _LANES) * _LANES
        if bytes_of(block) <= _VMEM_FOR_BLOCKS:
            return block
    raise NotImplementedError(
        f"A block of {_LANES} of {size} features needs {bytes_of(_LANES):,} bytes of VMEM. This "
        f"kernel has {_VMEM_FOR_BLOCKS:,}. Split the features over more devices."
    )


def _call(
    kernel: Callable[..., None], visits: _Visits, scales: tuple[Array, Array],
    operands: tuple[Array, Array], *, grid: tuple[int, ...], in_specs: list[Any], out_specs: Any,
    out: tuple[tuple[int, ...], DType], name: str, interpret: Any, scratch: Any = (),
) -> Array:  # fmt: skip
    """The kernel with one step of the last axis of the grid for each visit."""
    scalars = (*visits, *scales)
    found: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(
            *out, manual_axis_type=jax.typeof(operands[0]).manual_axis_type
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            # Visits write the same block one after the other.
            dimension_semantics=[pltpu.ARBITRARY] * len(grid),
            vmem_limit_bytes=_VMEM_LIMIT,
        ),
        interpret=interpret,
        name=f"{name}_{_ROWS}",  # benchmarks/programs/_tpu_clocks.py reads it
    )(*scalars, *operands)
    return found
