"""The scaled matmul of operands in tiles, for XLA.

**Scales that are powers of two are folded into the values.** An FP8 value times a power of two is
exact in bfloat16. So one bfloat16 matmul with float32 accumulation has the exact scaled products.
The number of tiles costs nothing. XLA has no block-scaled matmul for Hopper, so this runs there at
the speed of bfloat16.

**Float32 scales** cannot be folded. A loop multiplies one tile of the contracted axis at a time,
scales the partial product in float32, and adds it. Memory holds one partial product at a time.

Letters: T the side of a tile along a contracted axis.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType
from jaxfp8.kernels.scaled_matmul._along_output import along_output, scaled
from jaxfp8.kernels.scaled_matmul._bfloat16_dot import bfloat16_dot
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._exact import converted_factors_of, factors_of, times
from jaxfp8.numerics._per_block import devices_of, is_explicit

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def scaled_matmul(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """See `fp8.scaled_matmul`."""
    if lhs.power_of_two and rhs.power_of_two:
        return bfloat16_dot(fold(lhs), fold(rhs), call)
    return _tile_by_tile(lhs, rhs, call.in_float32).astype(call.out_dtype)


@jax.jit  # traced once for each shape
def fold(operand: QuantizedTensor) -> Array:
    """`values * scale`, [...] bfloat16, exact for scales that are powers of two.

    There is one exception. The largest float32, rounded up to FP8, is 2^128, which bfloat16 cannot
    hold. It becomes the largest bfloat16.
    """

    def product(
        values: Array, scale: Array, *, factors: Callable[[Array], tuple[Array, ...]], dtype: DType
    ) -> Array:
        values = values.astype(dtype)
        expanded = [
            operand.granularity.expand(each.astype(dtype), values.shape) for each in factors(scale)
        ]
        if dtype == jnp.float32:
            values = times(values, expanded)
        else:
            # GPUs keep subnormal numbers, so XLA may multiply factors first. With a bound between
            # them XLA would write a padded operand once more.
            values = functools.reduce(operator.mul, expanded, values)
        # The bounds are scalars. XLA:CPU would write the bounds of `jnp.clip` to memory, each as
        # large as the operand.
        return lax.clamp(dtype(-_LARGEST), values, dtype(_LARGEST)).astype(jnp.bfloat16)

    # XLA:CPU computes in float32, and rounds each product in bfloat16. XLA for GPUs writes factors
    # to memory, which are smaller in bfloat16.
    return lax.platform_dependent(
        operand.values, operand.scale,
        cpu=functools.partial(product, factors=converted_factors_of, dtype=jnp.float32),
        default=functools.partial(product, factors=factors_of, dtype=jnp.bfloat16),
    )  # fmt: skip


def _tile_by_tile(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """The sum over tiles along K of (product of two tiles) * scales, in float32."""
    of_lhs, of_rhs = (axes.contracted for axes in call.geometry.sides)
    if not math.prod(lhs.shape[axis] for axis in of_lhs):  # nothing to sum, no scale to take
        a, b = (operand.values.astype(jnp.bfloat16) for operand in (lhs, rhs))
        return bfloat16_dot(a, b, call)
    tiles = [_tile(lhs, i, rhs, j) for i, j in zip(of_lhs, of_rhs, strict=True)]
    cells = [-(-lhs.shape[axis] // tile) for axis, tile in zip(of_lhs, tiles, strict=True)]
    sides = [
        (operand, axes, *_parts(operand, axes, tiles))
        for operand, axes in ((lhs, of_lhs), (rhs, of_rhs))
    ]

    def partial(step: Array | int) -> Array:
        at = _unravel(step, cells)
        values, scales = [], []
        for side, (operand, axes, whole, scale) in enumerate(sides):
            values.append(_slice(whole, axes, at, tiles).astype(jnp.bfloat16))
            if scale.ndim:
                scale = _slice(scale, axes, at, [1] * len(axes))
                # The scale is expanded along kept axes only. Along contracted axes one cell is
                # left, which broadcasts.
                shape = [1 if axis in axes else size for axis, size in enumerate(operand.shape)]
                scale = operand.granularity.expand(scale, tuple(shape))
            scales.append(along_output(scale, call.geometry, side))
        return scaled(bfloat16_dot(values[0], values[1], call), *scales)

    # The loop starts from the first partial product, not from zeros: a carry must keep its type.
    # Its type has the sharding of the result, and the manual axes over which it varies.
    return lax.fori_loop(1, math.prod(cells), lambda step, total: total + partial(step), partial(0))


def _tile(lhs: QuantizedTensor, i: int, rhs: QuantizedTensor, j: int) -> int:
    """T of a pair of contracted axes: of the operand that is in tiles, else the whole axis."""
    for operand, axis in ((lhs, i), (rhs, j)):
        if operand.granularity.in_tiles:
            return min(operand.granularity.along(operand.ndim)[axis], max(operand.shape[axis], 1))
    return max(lhs.shape[i], 1)


def _parts(operand: QuantizedTensor, axes: Sequence[int], tiles: list[int]) -> tuple[Array, Array]:
    """Values padded with zeros to whole tiles, and float32 scales.

    Scales that are powers of two are folded into the values, which stay exact.
    """
    values, scale = operand.values, operand.scale
    if operand.power_of_two:
        values, scale = fold(operand), jnp.float32(1.0)
    pads = [(0, 0)] * operand.ndim
    for axis, tile in zip(axes, tiles, strict=True):
        if tile < operand.shape[axis]:
            _refuse_sharded(operand, axis)
        pads[axis] = (0, -operand.shape[axis] % tile)
    return (jnp.pad(values, pads) if any(after for _, after in pads) else values), scale


def _refuse_sharded(operand: QuantizedTensor, axis: int) -> None:
    sharding = jax.typeof(operand.values).sharding
    if is_explicit(operand.values) and devices_of(sharding.mesh, sharding.spec[axis]) > 1:
        raise ValueError(
            f"An operand {list(operand.shape)} has float32 scales in tiles along axis {axis}, "
            f"which an Explicit mesh splits over {sharding.spec[axis]!r}. Such tiles are "
            "multiplied one after the other, so the axis must be whole. Use power_of_two=True, or "
            "call it inside jax.shard_map."
        )


def _unravel(step: Array | int, cells: list[int]) -> list[Array | int]:
    """The index of a step along each contracted axis; the last axis is the fastest."""
    at: list[Array | int] = []
    for count in reversed(cells):
        at.insert(0, step % count if count > 1 else 0)
        step = step // max(count, 1)
    return at


def _slice(x: Array, axes: Sequence[int], at: list[Array | int], sizes: list[int]) -> Array:
    """Tile number `at` along each axis. An axis with a single tile stays as it is."""
    for axis, index, size in zip(axes, at, sizes, strict=True):
        if x.shape[axis] > size:
            x = lax.dynamic_slice_in_dim(x, index * size, size, axis)
    return x
