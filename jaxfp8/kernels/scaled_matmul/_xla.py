"""The scaled matmul for XLA.

It has four forms: one that XLA turns into cuBLASLt on CUDA, one for TPUs, one for CPUs, and one for
the rest.

On CUDA the operands are dequantized in the graph ("QDQ"). XLA's GEMM rewriter recognises
`dot(convert(values) * broadcast(scale), ...)` with scalar scales. It emits one
`__cublas$lt$matmul$f8` call, which takes the FP8 payloads and the float32 scales. A scale that
varies along an axis never matches. It may vary along an axis of the operand, or along one that
`jax.vmap` adds (experts). Then the bare payloads are multiplied, which matches, too. One more
elementwise pass scales the result.

On TPUs the bare payloads are multiplied, too. The matrix unit of a TPU 7x reads them as they are.
For those of other TPUs XLA widens them inside of the matmul.

On other platforms the payloads are multiplied as bfloat16 with float32 accumulation, because every
FP8 value is exact in bfloat16. Then the float32 product is scaled.

References:
  XLA, gpu/transforms/gemm_rewriter.cc; JAX-Toolbox, NATIVE_FP8.md.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxfp8._geometry import Geometry
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._exact import TINY, constant_like, factors_of, times
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._per_block import (
    devices_of,
    fitting_side,
    is_at_least,
    is_explicit,
    missing_values,
)

# A matmul of bfloat16 operands, accumulated in float32, on every device.
#
# FP8 values become bfloat16 where no FP8 unit is used. Every FP8 value is exact in bfloat16.
#
# On CPUs this is the fastest matmul that XLA has, twice as fast as float32. XLA takes it only if
# the left operand has its contracted axis last in memory. The left operand of wgrad has another
# layout. So it is transposed first, which costs a few percent of the matmul.
#
# References:
#     XLA, cpu/dot_library_rewriter.


def _bfloat16_dot(lhs: Array, rhs: Array, call: MatmulCall) -> Array:
    """The matmul of two bfloat16 arrays with float32 accumulation, in `call.out_dtype`."""

    def cpu(a: Array, b: Array) -> Array:
        return _cpu_dot(a, b, call).astype(call.out_dtype)

    def elsewhere(a: Array, b: Array) -> Array:
        # GPUs accumulate in float32, whatever dtype they write. A float16 result is rounded from
        # float32.
        written = call.out_dtype if call.out_dtype == jnp.bfloat16 else jnp.float32
        product = lax.dot_general(
            a, b, call.geometry.dimension_numbers,
            preferred_element_type=written, out_sharding=call.out_sharding,
        )  # fmt: skip
        return product.astype(call.out_dtype)

    return lax.platform_dependent(lhs, rhs, cpu=cpu, default=elsewhere)


def _cpu_dot(a: Array, b: Array, call: MatmulCall) -> Array:
    """`_bfloat16_dot` on a CPU, with a result in float32."""
    lhs = call.geometry.lhs
    in_order = call.geometry.with_lhs_in_order
    product = lax.dot_general(
        _as_laid_out(a.transpose(lhs.order)), _as_laid_out(b), in_order.dimension_numbers,
        preferred_element_type=jnp.float32, out_sharding=call.out_sharding,
    )  # fmt: skip
    # XLA folds a transposition of the product into the matmul, too, and that matmul fails.
    return lax.optimization_barrier(product)


def _as_laid_out(x: Array) -> Array:
    """x [...], as an array that XLA:CPU must read in row-major order."""
    # XLA:CPU chooses a matmul by the layouts of the operands. Afterwards it may fold a
    # transposition into it, which then fails ("Unsupported element type for DotThunk"). The barrier
    # keeps transpositions out of it. The added axis makes a reshape of a transposed view.
    return jnp.squeeze(lax.optimization_barrier(jnp.expand_dims(x, 0)), 0)


# Scales that are constant along contracted axes: they are multiplied onto the product.


def along_output(scale: Array, geometry: Geometry, side: int) -> Array:
    """A scale of lhs (side 0) or rhs, with the axes of the product, of size 1 where it has none."""
    if not scale.ndim:
        return scale
    axes = geometry.sides[side]
    contracted = axes.in_order.contracted  # of size 1: other scales are rejected before
    scale = jnp.squeeze(scale.transpose(axes.order), contracted)
    return jnp.expand_dims(scale, geometry.added_axes[side])


def scale_product(product: Array, *scales: Array) -> Array:
    """`product * scale * scale`, [batch, lhs kept, rhs kept] float32."""
    first, second = scales
    if jax.sharding.AxisType.Explicit in jax.typeof(product).sharding.mesh.axis_types:
        first, second = (_laid_as(each, product) if each.ndim else each for each in scales)
    # The smaller scale first. Otherwise a product times the larger scale could overflow, although
    # the result is finite.
    return (product * jnp.minimum(first, second)) * jnp.maximum(first, second)


def _laid_as(scale: Array, product: Array) -> Array:
    """A scale with the sharding of the product, which it must have in an Explicit mesh."""
    sharding = jax.typeof(product).sharding
    axes = zip(sharding.spec, scale.shape, strict=True)
    spec = jax.P(*(along if size > 1 else None for along, size in axes))
    return jax.sharding.reshard(scale, jax.sharding.NamedSharding(sharding.mesh, spec))


# The scaled matmul of operands in tiles, for XLA.
#
# **Scales that are powers of two are folded into the values.** An FP8 value times a power of two is
# exact in bfloat16. So one bfloat16 matmul with float32 accumulation has the exact scaled products.
# The number of tiles costs nothing. XLA has no block-scaled matmul for Hopper, so this runs there
# at the speed of bfloat16.
#
# **Float32 scales** cannot be folded. A loop multiplies one tile of the contracted axis at a time,
# scales the partial product in float32, and adds it. Memory holds one partial product at a time.
#
# Letters: T the side of a tile along a contracted axis.

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def scaled_matmul_in_blocks(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """See `fp8.scaled_matmul`."""
    if lhs.power_of_two and rhs.power_of_two:
        return _bfloat16_dot(_fold(lhs), _fold(rhs), call)
    return _tile_by_tile(lhs, rhs, call.in_float32).astype(call.out_dtype)


@jax.jit  # traced once for each shape
def _fold(operand: QuantizedTensor) -> Array:
    """`values * scale`, [...] bfloat16, exact for scales that are powers of two."""

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
        # The largest float32, rounded up to FP8, is 2^128. bfloat16 cannot hold that, and takes its
        # largest value. The bounds are scalars. XLA:CPU would write the bounds of `jnp.clip` to
        # memory, each as large as the operand.
        return lax.clamp(dtype(-_LARGEST), values, dtype(_LARGEST)).astype(jnp.bfloat16)

    # XLA:CPU computes in float32, and rounds each product in bfloat16. XLA for GPUs writes factors
    # to memory, which are smaller in bfloat16. TPUs flush subnormal numbers, so no two factors may
    # be multiplied first.
    return lax.platform_dependent(
        operand.values, operand.scale,
        cpu=functools.partial(product, factors=_converted_factors_of, dtype=jnp.float32),
        tpu=functools.partial(product, factors=factors_of, dtype=jnp.float32),
        default=functools.partial(product, factors=factors_of, dtype=jnp.bfloat16),
    )  # fmt: skip


def _converted_factors_of(scale: Array) -> tuple[Array, ...]:
    """`factors_of` for CPUs: other factors with the same product, in half the operations.

    XLA:CPU converts E8M0 to float32 correctly, but it may flush 2^-127 to zero.
    """
    if scale.dtype != E8M0.dtype:
        return (scale,)
    power = scale.astype(jnp.float32)
    first = lax.max(power, constant_like(power, TINY))
    second = lax.select(power == first, constant_like(power, 1.0), constant_like(power, 0.5))
    return first, second


def _tile_by_tile(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """The sum over tiles along K of (product of two tiles) * scales, in float32."""
    of_lhs, of_rhs = (axes.contracted for axes in call.geometry.sides)
    if not math.prod(lhs.shape[axis] for axis in of_lhs):  # nothing to sum, no scale to take
        a, b = (operand.values.astype(jnp.bfloat16) for operand in (lhs, rhs))
        return _bfloat16_dot(a, b, call)
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
        return scale_product(_bfloat16_dot(values[0], values[1], call), *scales)

    # The loop starts from the first partial product, not from zeros: a carry must keep its type.
    # Its type has the sharding of the result, and the manual axes over which it varies.
    return lax.fori_loop(1, math.prod(cells), lambda step, total: total + partial(step), partial(0))


def _tile(lhs: QuantizedTensor, i: int, rhs: QuantizedTensor, j: int) -> int:
    """T of a pair of contracted axes: of the operand that is in tiles, else the whole axis."""
    for operand, axis in ((lhs, i), (rhs, j)):
        if operand.granularity.in_tiles:
            return fitting_side(operand.granularity.along(operand.ndim)[axis], operand.shape[axis])
    return max(lhs.shape[i], 1)


def _parts(operand: QuantizedTensor, axes: Sequence[int], tiles: list[int]) -> tuple[Array, Array]:
    """Values padded with zeros to whole tiles, and float32 scales unless they are folded."""
    values, scale = operand.values, operand.scale
    if operand.power_of_two:
        values, scale = _fold(operand), jnp.float32(1.0)
    pads = [(0, 0)] * operand.ndim
    for axis, tile in zip(axes, tiles, strict=True):
        if is_at_least(operand.shape[axis], tile + 1):
            _refuse_sharded(operand, axis)
        pads[axis] = (0, missing_values(operand.shape[axis], tile))
    return (jnp.pad(values, pads) if any(after != 0 for _, after in pads) else values), scale


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
        # A symbol is no operand of the array `step`. It has a value where the program runs.
        number = count if isinstance(count, int) else jnp.asarray(count)
        at.insert(0, step % number if is_at_least(count, 2) else 0)
        step = step // (number if is_at_least(count, 1) else 1)
    return at


def _slice(x: Array, axes: Sequence[int], at: list[Array | int], sizes: list[int]) -> Array:
    """Tile number `at` along each axis. An axis with a single tile stays as it is."""
    for axis, index, size in zip(axes, at, sizes, strict=True):
        if is_at_least(x.shape[axis], size + 1):
            x = lax.dynamic_slice_in_dim(x, index * size, size, axis)
    return x


# The backend, which chooses the form.


def scaled_matmul(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """See `fp8.scaled_matmul`. One program runs on all chips."""
    if lhs.granularity.in_tiles or rhs.granularity.in_tiles:
        return scaled_matmul_in_blocks(lhs, rhs, call)
    out_dtype = call.out_dtype
    # XLA passes HIGHEST on to cuBLASLt as "no fast accumulation".
    precision = lax.Precision.DEFAULT if call.fast_accumulation else lax.Precision.HIGHEST
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=call.geometry.dimension_numbers,
        precision=precision,
        out_sharding=call.out_sharding,
    )
    scales = [
        along_output(operand.scale, call.geometry, side) if operand.scale.ndim else operand.scale
        for side, operand in enumerate((lhs, rhs))
    ]
    # cuBLASLt writes bfloat16 or float32. A float16 result is rounded from float32. In an Auto mesh
    # XLA sums over devices what the matmul writes. As float32, gradients of weights would be twice
    # the bytes on the wire.
    matmul_dtype = out_dtype if out_dtype == jnp.bfloat16 else jnp.float32

    def scale_by_rows(product: Array, *scales: Array) -> Array:
        return scale_product(product.astype(jnp.float32), *scales).astype(out_dtype)

    def bare(a: Array, b: Array, *scales: Array) -> Array:
        return scale_by_rows(dot(a, b, preferred_element_type=matmul_dtype), *scales)

    def dequantizing(a: Array, b: Array, *scales: Array) -> Array:
        # This cast of the scales does not round them: the rewriter passes the float32 scalars to
        # cuBLASLt. But XLA folds the cast of a constant before the rewriter runs, and that rounds.
        # The barrier hides that a scale is constant.
        scales = lax.optimization_barrier(scales)
        a, b = (
            v.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
            for v, scale in zip((a, b), scales, strict=True)
        )
        return dot(a, b, preferred_element_type=matmul_dtype).astype(out_dtype)

    def portable(a: Array, b: Array, *scales: Array) -> Array:
        product = dot(
            a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        return scale_by_rows(product, *scales)

    def cpu(a: Array, b: Array, *scales: Array) -> Array:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        return scale_by_rows(_cpu_dot(a, b, call), *scales)

    per_tensor = lhs.granularity.in_one and rhs.granularity.in_one
    cuda = _unless_scales_are_mapped(dequantizing, bare) if per_tensor else bare
    return lax.platform_dependent(
        lhs.values, rhs.values, *scales, cpu=cpu, cuda=cuda, tpu=bare, default=portable
    )


def _unless_scales_are_mapped(
    function: Callable[..., Array], otherwise: Callable[..., Array]
) -> Callable[..., Array]:
    """`function(lhs, rhs, *scales)`, or `otherwise` under a `jax.vmap` that maps a scale."""

    @custom_vmap
    def product(*arguments: Array) -> Array:
        return function(*arguments)

    @product.def_vmap
    def batched(size: int, mapped: list[bool], *arguments: Array) -> tuple[Array, bool]:
        axes = [0 if m else None for m in mapped]
        batch = functools.partial(jax.vmap, in_axes=axes, axis_size=size)
        # A mapped scale is no scalar in the graph, so XLA would not recognise `function`.
        if any(mapped[2:]):
            return batch(otherwise)(*arguments), True
        return _unless_scales_are_mapped(batch(function), batch(otherwise))(*arguments), True

    return product
