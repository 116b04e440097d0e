"""Calls that type checkers must refuse. mypy reports a `type: ignore` that is not needed."""

import jax.numpy as jnp
from flax import nnx

import jaxfp8 as fp8
from jaxfp8 import linen
from jaxfp8.nnx import FP8Einsum, FP8Linear, FP8LinearGeneral

rngs = nnx.Rngs(0)

FP8Linear(8, 4, use_bias=False, dtype=jnp.bfloat16, precision="highest", rngs=rngs)
FP8Linear(8, 4, use_bais=False, rngs=rngs)  # type: ignore[call-arg]
FP8Linear(8, 4, use_bias="no", rngs=rngs)  # type: ignore[arg-type]
FP8Linear(8, 4)  # type: ignore[call-arg]
FP8Linear(8, 4, dot_general=jnp.dot, rngs=rngs)  # type: ignore[call-arg]

FP8LinearGeneral(8, (2, 3), axis=-1, batch_axis={0: 2}, rngs=rngs)
FP8LinearGeneral(8, (2, 3), axes=-1, rngs=rngs)  # type: ignore[call-arg]
FP8LinearGeneral(8, "4", rngs=rngs)  # type: ignore[arg-type]

FP8Einsum("bd,dk->bk", (8, 4), (4,), kernel_init=nnx.initializers.ones, rngs=rngs)
FP8Einsum("bd,dk->bk", (8, 4), use_bias=True, rngs=rngs)  # type: ignore[call-arg]

swiglu = fp8.prologues.SwiGLU()
FP8Linear(8, 4, prologue=swiglu, rngs=rngs)((jnp.ones(8), jnp.ones(8)))
FP8Linear(8, 4, prologue=fp8.prologues.SwiGLU, rngs=rngs)  # type: ignore[arg-type]
FP8Einsum("bd,dk->bk", (8, 4), prologue=swiglu, rngs=rngs)
FP8LinearGeneral(8, (2, 3), prologue=swiglu, rngs=rngs)  # type: ignore[call-arg]
linen.FP8Dense(4, prologue=swiglu)
linen.FP8Einsum((8, 4), "bd,dk->bk", prologue="swiglu")  # type: ignore[arg-type]
linen.FP8DenseGeneral(4, prologue=swiglu)  # type: ignore[call-arg]

linen.FP8Dense(4, use_bias=False)
linen.FP8Dense(4, use_bais=False)  # type: ignore[call-arg]
linen.FP8Dense(4, recipe="delayed")  # type: ignore[arg-type]
linen.FP8EinsumOp(recipe="delayed")  # type: ignore[arg-type]

x = jnp.ones((2, 64))
fp8.quantize(x, fp8.E4M3, power_of_two=True, rounding="nearest", scale_rounding="rceil")
fp8.quantize(x, fp8.E4M3, power_of_tow=True)  # type: ignore[call-overload]
fp8.quantize(x, fp8.E4M3, rounding="up")  # type: ignore[call-overload]
fp8.quantize(x, fp8.E4M3, scale_format="e8m0")  # type: ignore[call-overload]
fp8.fake_quantize(x, fp8.E4M3, fp8.PerBlock((1, 32)), scale_format=fp8.E8M0)
fp8.fake_quantize(x, fp8.E4M3, scale_formt=fp8.E8M0)  # type: ignore[call-arg]
fp8.fake_quantize(x, fp8.E4M3, power_of_two="yes")  # type: ignore[arg-type]
