"""The scaled matmul for XLA: one spelling that NVIDIA's compiler turns into cuBLASLt, one for CPUs, one for the rest.

On CUDA the operands are dequantized in the graph ("QDQ"): XLA's GEMM rewriter recognises
`dot(convert(values) * broadcast(scale), ...)` with scalar scales and emits one `__cublas$lt$matmul$f8` call that takes the
FP8 payloads and the float32 scales. Scales that vary along an axis never match, be it an axis of the operand or one that
`jax.vmap` adds (experts); then the bare payloads are multiplied (which matches too) and the result is scaled by one more
elementwise pass.

Elsewhere every FP8 value is exact in bfloat16, so the payloads are multiplied as bfloat16 with float32 accumulation, and
the float32 product is scaled. On CPUs this is the fastest matmul that XLA has, twice as fast as float32, but it is found
only if the left operand lies in memory with the contracted axis last. That of wgrad does not; so it is transposed first,
which costs a few percent of the matmul.

References:
  XLA, gpu/transforms/gemm_rewriter.cc, cpu/dot_library_rewriter; JAX-Toolbox, NATIVE_FP8.md.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array, Axes, DotDimensionNumbers, DType
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers,
    out_dtype: DType,
    fast_accumulation: bool,
    out_sharding: Any,
) -> Array:
    """See `kernels.scaled_matmul._api.scaled_matmul`."""
    # XLA passes HIGHEST on to cuBLASLt as "no fast accumulation".
    precision = lax.Precision.DEFAULT if fast_accumulation else lax.Precision.HIGHEST
    dot = functools.partial(
        lax.dot_general, dimension_numbers=dimension_numbers, precision=precision, out_sharding=out_sharding
    )
    per_tensor = isinstance(lhs.granularity, PerTensor) and isinstance(rhs.granularity, PerTensor)
    scales = [_along_output(lhs, rhs, dimension_numbers, side) for side in (0, 1)]
    # cuBLASLt writes bfloat16 or float32; a float16 result is rounded from float32.
    matmul_dtype = out_dtype if out_dtype == jnp.bfloat16 else jnp.float32

    def scale_by_rows(product: Array, *scales: Array) -> Array:
        # The smaller scale first, so that a finite result never overflows on the way.
        small, large = jnp.minimum(*scales), jnp.maximum(*scales)
        return ((product.astype(jnp.float32) * small) * large).astype(out_dtype)

    def bare(a: Array, b: Array, *scales: Array) -> Array:
        return scale_by_rows(dot(a, b, preferred_element_type=matmul_dtype), *scales)

    def dequantizing(a: Array, b: Array, *scales: Array) -> Array:
        # The scales' cast to bfloat16 is not rounding: the rewriter passes the float32 scalars to the call. Of a constant
        # it would be, for that is folded before the rewriter comes; hence the barrier.
        scales = lax.optimization_barrier(scales)
        a, b = (v.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for v, scale in zip((a, b), scales, strict=True))
        return dot(a, b, preferred_element_type=matmul_dtype).astype(out_dtype)

    def portable(a: Array, b: Array, *scales: Array) -> Array:
        product = dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return scale_by_rows(product, *scales)

    def cpu(a: Array, b: Array, *scales: Array) -> Array:
        ((contracted, _), (batch, _)) = dimension_numbers
        kept = (axis for axis in range(a.ndim) if axis not in (*contracted, *batch))
        order = (*batch, *kept, *contracted)
        rows = tuple(tuple(order.index(axis) for axis in axes) for axes in (contracted, batch))
        canonical = ((rows[0], dimension_numbers[0][1]), (rows[1], dimension_numbers[1][1]))
        operands = (_as_laid_out(v.astype(jnp.bfloat16)) for v in (a.transpose(order), b))
        return scale_by_rows(dot(*operands, dimension_numbers=canonical, preferred_element_type=jnp.float32), *scales)

    cuda = _unless_scales_are_mapped(dequantizing, bare) if per_tensor else bare
    return lax.platform_dependent(lhs.values, rhs.values, *scales, cpu=cpu, cuda=cuda, default=portable)


def _unless_scales_are_mapped(function: Callable[..., Array], otherwise: Callable[..., Array]) -> Callable[..., Array]:
    """`function(lhs, rhs, *scales)`, or `otherwise` under a `jax.vmap` that maps a scale."""

    @custom_vmap
    def product(*arguments: Array) -> Array:
        return function(*arguments)

    @product.def_vmap
    def batched(size: int, mapped: list[bool], *arguments: Array) -> tuple[Array, bool]:
        axes = [0 if m else None for m in mapped]
        batch = functools.partial(jax.vmap, in_axes=axes, axis_size=size)
        if any(mapped[2:]):
            return batch(otherwise)(*arguments), True
        return _unless_scales_are_mapped(batch(function), batch(otherwise))(*arguments), True

    return product


def _as_laid_out(x: Array) -> Array:
    """x [...], which XLA:CPU has to take as an array in row-major order that is already there.

    It chooses a matmul by the layout of the operands, and may fold a transposition into the matmul afterwards: into one
    that then fails ("Unsupported element type for DotThunk"). The barrier keeps transpositions out, and the new axis makes
    a reshape of what would otherwise be a transposed view.
    """
    return jnp.squeeze(lax.optimization_barrier(jnp.expand_dims(x, 0)), 0)


def _along_output(
    lhs: QuantizedTensor, rhs: QuantizedTensor, dimension_numbers: DotDimensionNumbers, side: int
) -> Array:
    """The scale of one operand, laid along the axes of the product (batch, lhs kept, rhs kept)."""
    operand = (lhs, rhs)[side]
    if isinstance(operand.granularity, PerTensor):
        return operand.scale
    contracted, batch = ((tuple(lhs_axes), tuple(rhs_axes)) for lhs_axes, rhs_axes in dimension_numbers)
    kept: list[Axes] = [
        tuple(axis for axis in range(tensor.ndim) if axis not in contracted[i] + batch[i])
        for i, tensor in enumerate((lhs, rhs))
    ]
    scale = operand.scale.transpose(batch[side] + kept[side] + contracted[side])
    n_batch, n_kept = len(batch[side]), len(kept[side])
    scale = jnp.squeeze(
        scale, axis=tuple(range(n_batch + n_kept, scale.ndim))
    )  # contracted: size 1, or it had been refused
    first = n_batch if side == 1 else n_batch + n_kept
    return jnp.expand_dims(scale, tuple(range(first, first + len(kept[1 - side]))))
