"""The scaled matmul for XLA.

It has three forms: one that XLA turns into cuBLASLt on CUDA, one for CPUs, and one for the rest.

On CUDA the operands are dequantized in the graph ("QDQ"). XLA's GEMM rewriter recognises
`dot(convert(values) * broadcast(scale), ...)` with scalar scales. It emits one
`__cublas$lt$matmul$f8` call, which takes the FP8 payloads and the float32 scales. A scale that
varies along an axis never matches. It may vary along an axis of the operand, or along one that
`jax.vmap` adds (experts). Then the bare payloads are multiplied, which matches, too. One more
elementwise pass scales the result.

On other platforms the payloads are multiplied as bfloat16 with float32 accumulation, because every
FP8 value is exact in bfloat16. Then the float32 product is scaled.

Operands in tiles go to `_xla_blocks.py`.

References:
  XLA, gpu/transforms/gemm_rewriter.cc; JAX-Toolbox, NATIVE_FP8.md.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul import _xla_blocks
from jaxfp8.kernels.scaled_matmul._along_output import along_output, scaled
from jaxfp8.kernels.scaled_matmul._bfloat16_dot import cpu_dot
from jaxfp8.kernels.scaled_matmul._call import MatmulCall


def scaled_matmul(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """See `fp8.scaled_matmul`. One program runs on all chips."""
    if lhs.granularity.in_tiles or rhs.granularity.in_tiles:
        return _xla_blocks.scaled_matmul(lhs, rhs, call)
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
    # cuBLASLt writes bfloat16 or float32. A float16 result is rounded from float32.
    matmul_dtype = out_dtype if out_dtype == jnp.bfloat16 else jnp.float32

    def scale_by_rows(product: Array, *scales: Array) -> Array:
        return scaled(product.astype(jnp.float32), *scales).astype(out_dtype)

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
        return scale_by_rows(cpu_dot(a, b, call), *scales)

    per_tensor = lhs.granularity.in_one and rhs.granularity.in_one
    cuda = _unless_scales_are_mapped(dequantizing, bare) if per_tensor else bare
    return lax.platform_dependent(
        lhs.values, rhs.values, *scales, cpu=cpu, cuda=cuda, default=portable
    )


def _unless_scales_are_mapped(
    function: Callable[..., Array], otherwise: Callable[..., Array]
) -> Callable[..., Array]:
    """`function(lhs, rhs, *scales)`, or `otherwise` under a `jax.vmap` that maps a scale.

    A mapped scale is no scalar in the graph, so XLA's rewriter would not recognise `function`.
    """

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
