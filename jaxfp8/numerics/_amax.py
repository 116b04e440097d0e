"""Amaxes: of one granularity, or of several in one read."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.numerics._exact import constant_like, widen
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._per_block import PerBlock, is_explicit

# The largest magnitude of each scale cell, that is of the values that share one scale.


def magnitude(x: Array, *, kernel_language: bool = False) -> Array:
    """`|x|`, [...], with inf for NaN."""
    # XLA:CPU's maximum of floats loses NaN in larger arrays (seen with 4,096 elements).
    largest = jnp.abs(x)
    like = lax.full_like if kernel_language else constant_like
    return lax.select(largest == largest, largest, like(largest, np.inf))  # NaN differs from itself


@functools.partial(jax.jit, static_argnames="granularity")  # traced once for each shape
def amax(x: Array, granularity: AbstractGranularity) -> Array:
    """`max |x|` over each scale cell, float32.

    It is inf if the cell holds an inf or a NaN, and 0 if the cell is empty. It may be below 2^-126.
    Scale rules and ledgers count such an amax as zero.

    Args:
      x: [...] floating point.
      granularity: which values share a scale.

    Returns:
      An array of shape `granularity.scale_shape(x.shape)`, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> amax(jnp.array([[1.0, -3.0], [2.0, 0.5]]), fp8.PerAxis(0))
      Array([[3.],
             [2.]], dtype=float32)
    """

    def of_bits(x: Array) -> Array:
        # Magnitudes are ordered as their bits are, and the bits of NaN are above those of inf. For
        # a maximum of 16-bit floats, XLA:CPU would write a float32 copy of x to memory. (On GPUs
        # XLA would send 16-bit integers to other devices as 32 bits.)
        integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        without_sign = (1 << (8 * x.dtype.itemsize - 1)) - 1
        bits = lax.bitcast_convert_type(x, integers) & integers.type(without_sign)
        largest = jnp.minimum(
            _maximum_on_cpu(bits, granularity), np.array(np.inf, x.dtype).view(integers)
        )
        return widen(lax.bitcast_convert_type(largest, x.dtype))

    def of_floats(x: Array) -> Array:
        # The maximum is taken in the dtype of x, because XLA would write a float32 copy of x to
        # memory between two reductions. The conversion is monotonic, so it may follow.
        return widen(granularity.maximum(magnitude(x)))

    def of_wide_floats(x: Array) -> Array:
        # XLA for TPUs reads x once for a cast and its amax if both have the conversion to float32.
        # NaN becomes inf before `abs`: a TPU 7x has one instruction for the maximum of `abs`.
        wide = widen(x)
        wide = lax.select(wide == wide, wide, constant_like(wide, np.inf))
        return granularity.maximum(jnp.abs(wide))

    # A cast of tiles is a kernel of its own.
    tpu = of_floats if granularity.in_tiles else of_wide_floats
    return lax.platform_dependent(x, cpu=of_bits, tpu=tpu, default=of_floats)


# XLA:CPU reduces axes of more than 32 values in two steps, with an array between them. It writes
# the operand of the first step to memory, and runs that step slower than one loop.
_WINDOW = 32


def _maximum_on_cpu(bits: Array, granularity: AbstractGranularity) -> Array:
    """`granularity.maximum`, in one loop where the last axis is reduced."""
    sizes, result = bits.shape, granularity.scale_shape(bits.shape)
    cells = result or (1,) * bits.ndim
    # An Explicit mesh refuses some reshapes of split axes.
    plain = bits.ndim and all(type(size) is int and size for size in sizes)
    # If the last axis is not reduced, XLA vectorizes the two steps, but not one loop.
    if not plain or is_explicit(bits) or cells[-1] == sizes[-1] or _is_ragged(granularity, sizes):
        return granularity.maximum(bits)
    parts = [_parts_of(size // count) for size, count in zip(sizes, cells, strict=True)]
    if any(size > _WINDOW for inside in parts for size in inside):
        return granularity.maximum(bits)
    shape: list[int] = []
    reduced: list[int] = []  # the axes of `shape` that are inside of cells
    for count, inside in zip(cells, parts, strict=True):
        reduced += range(len(shape) + 1, len(shape) + 1 + len(inside))
        shape += [count, *inside]
    return jnp.max(bits.reshape(shape), axis=tuple(reduced), initial=0).reshape(result)


def _is_ragged(granularity: AbstractGranularity, sizes: tuple[int, ...]) -> bool:
    """Whether tiles at an edge are shorter than others."""
    if not isinstance(granularity, PerBlock):
        return False
    sides = granularity.along(len(sizes))
    return any(size > side and size % side for size, side in zip(sizes, sides, strict=True))


def _parts_of(size: int) -> list[int]:
    """Factors of a size. One above `_WINDOW` has no divisor from 2 to `_WINDOW`."""
    parts = []
    while size > _WINDOW:
        factors = [n for n in range(2, _WINDOW + 1) if size % n == 0]
        # A mesh axis that splits the whole axis must also split its first part, or XLA gathers x.
        # The number of devices is most often a power of two.
        part = max(factors, key=lambda n: (n & -n, n), default=size)
        parts.append(part)
        size //= part
    return [*parts, size] if size > 1 else parts


# The amaxes of several granularities of one array.

# The number of groups of rows is a multiple of this power of two. So a mesh axis of up to that many
# devices that splits the rows splits the groups, too.
_GROUPS = 512
# Rows of a group. With fewer, much is written for the second reduction. Each one is a value that a
# thread holds.
_LEAST_ROWS, _MOST_ROWS = 4, 16
_LEAST_PART = 128  # of a row, for a warp to reduce at once


def amaxes(
    x: Array, granularities: Sequence[AbstractGranularity]
) -> dict[AbstractGranularity, Array]:
    """`amax` of each granularity."""
    # XLA reduces rows and columns in two kernels, and each of them reads x. On CUDA a large x is
    # read once for both.
    granularities = tuple(dict.fromkeys(granularities))
    ordered = sorted(granularities, key=lambda each: each.has_cells_along(-1, x.ndim))
    if not _are_rows_and_columns(x, ordered) or not (rows := rows_read_together(x.shape[-2])):
        return {each: amax(x, each) for each in granularities}

    def in_one_read(x: Array) -> list[Array]:
        return _rows_and_columns(x, ordered[1], rows)

    def apart(x: Array) -> list[Array]:
        return [amax(x, each) for each in ordered]

    return dict(
        zip(ordered, lax.platform_dependent(x, cuda=in_one_read, default=apart), strict=True)
    )


def rows_read_together(rows: int) -> int:
    """The size of a group of rows of which one kernel finds all amaxes; 0 for few rows."""
    sizes = range(_LEAST_ROWS, _MOST_ROWS + 1)
    return max((size for size in sizes if rows and rows % (_GROUPS * size) == 0), default=0)


def _are_rows_and_columns(x: Array, ordered: list[AbstractGranularity]) -> bool:
    """Whether the first granularity is all rows of x, and the second is columns."""
    if len(ordered) != 2 or x.ndim < 2:
        return False
    if not all(type(size) is int and size for size in x.shape):  # symbolic, or empty
        return False
    # An Explicit mesh refuses some reshapes of split axes.
    if is_explicit(x):
        return False
    rows, columns = (
        [each.in_rows and each.has_cells_along(axis, x.ndim) for axis in range(x.ndim)]
        for each in ordered
    )
    return rows == [True] * (x.ndim - 1) + [False] and columns[-2:] == [False, True]


def _rows_and_columns(x: Array, columns: AbstractGranularity, rows: int) -> list[Array]:
    """The amaxes of rows [..., M, 1] and those of columns, of x [..., M, N]."""
    *leading, m, n = x.shape
    parts = _parts(n)
    # each [..., M / rows, parts, N / parts]: one row of each group
    members = [
        each.squeeze(-3)
        for each in lax.split(
            magnitude(x).reshape(*leading, m // rows, rows, parts, n // parts),
            (1,) * rows,
            axis=len(leading) + 1,
        )
    ]

    def larger(a: list[Array], b: list[Array]) -> list[Array]:
        return [*map(jnp.maximum, a, b)]

    zero = jnp.zeros((), members[0].dtype)
    # One reduction of all members is one kernel. It can write an elementwise result as well, that
    # is the largest member of each group. The barrier keeps XLA from reducing x for it again.
    found = lax.reduce(members, [zero] * rows, larger, (members[0].ndim - 1,))
    largest = lax.optimization_barrier(functools.reduce(jnp.maximum, members))
    of_rows = jnp.max(jnp.stack(found, axis=-2), axis=-1).reshape(*leading, m, 1)
    of_columns = columns.maximum(largest.reshape(*leading, m // rows, n))
    return [widen(of_rows), widen(of_columns)]


def _parts(columns: int) -> int:
    """In how many parts a row is reduced."""
    # A mesh axis of up to that many devices that splits the columns splits the parts, too. Along a
    # split axis, XLA would gather results of all members.
    parts = 1
    while columns % (2 * parts) == 0 and columns // (2 * parts) >= _LEAST_PART:
        parts *= 2
    return parts
