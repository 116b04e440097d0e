"""Who multiplies in `layers` and `steps`: bfloat16, jaxfp8, flax, and a plain pattern.

The plain pattern is what a JAX user writes without a library. It quantizes, converts back and
multiplies in bfloat16. XLA for GPUs makes an FP8 matmul of cuBLASLt from that (NVIDIA/JAX-Toolbox,
rosetta/docs/NATIVE_FP8.md, "Exact pattern that XLA can match"). Its scales come from the amax of
the same array.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

import jaxfp8 as fp8

FLAX, PLAIN = "flax", "plain pattern"
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def bf16_options(chip: str) -> dict[str, bool]:
    """Compiler options of the baseline. It uses cuBLASLt, as FP8 per tensor does."""
    return fp8.Kernels(chip).compiler_options(fp8.recipes.current())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """A way to multiply activations with a weight, and to train with it.

    Attributes:
      dot: takes x [..., K], w [K, N] and a state, and returns y [..., N]. All are in bfloat16.
      state: makes the state of one matmul. Its scales are 1 or unset, so use it for some steps
        before a step is timed.
      value_and_grad: takes `loss(params, state)` and `has_aux=`. It returns a function that returns
        the value, the gradients of the parameters, and the next state.
      options: takes the chip, and returns compiler options of XLA.
      named: arguments of `fp8.Kernels` that name backends.
    """

    dot: Callable[[jax.Array, jax.Array, Any], jax.Array]
    state: Callable[[], Any] = tuple
    value_and_grad: Callable[..., Any]
    options: Callable[[str], dict[str, Any]] = bf16_options
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)


def bf16() -> Library:
    return Library(dot=lambda x, w, state: jnp.dot(x, w), value_and_grad=without_state)


def without_state(loss: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    def run(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(loss, has_aux=has_aux)(params, state)
        return value, gradients, state

    return run


# jaxfp8


def ours(
    recipe: fp8.Recipe, chip: str, named: Mapping[str, str], *, settled: bool = False
) -> Library:
    """`fp8.dot`. If `settled`, XLA compiles the step for states whose scales are all set."""

    def dot(x: jax.Array, w: jax.Array, state: Any) -> jax.Array:
        return fp8.dot(x, w, recipe=recipe, state=state, kernels=fp8.Kernels(chip, **named))

    def state() -> Any:
        unset: Any = fp8.init_state(recipe)
        if not settled or not recipe.rows:
            return unset
        # Unset scales are 0, with which a settled state would give NaN.
        return dataclasses.replace(unset, scale=jnp.ones_like(unset.scale), settled=True)

    return Library(
        dot=dot,
        state=state,
        value_and_grad=fp8.value_and_grad,
        options=lambda chip: dict(fp8.Kernels(chip).compiler_options(recipe)),
        named=named,
    )


# flax

COLLECTION = nn.fp8_ops.OVERWRITE_WITH_GRADIENT


def flax() -> Library:
    """flax's layer in FP8, with delayed scaling. It is used as flax's FP8 guide says.

    `Fp8DirectDotGeneralOp` is the class that the guide and a warning of `Fp8DotGeneralOp` name. Its
    state is a collection of the layer, and the gradient of the state is the next state.
    """

    def dense(features: int) -> nn.Module:
        return nn.Dense(
            features,
            use_bias=False,
            dtype=jnp.bfloat16,
            dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp,
        )

    def dot(x: jax.Array, w: jax.Array, state: Any) -> jax.Array:
        variables = {"params": {"kernel": w}, COLLECTION: state}
        return dense(w.shape[1]).apply(variables, x)

    def state() -> Any:
        # The shapes of the state do not depend on those of x and w.
        return dense(1).init(jax.random.key(0), jnp.zeros((1, 1), jnp.bfloat16))[COLLECTION]

    def value_and_grad(loss: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
        def run(params: Any, state: Any) -> Any:
            transform = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)
            value, (gradients, state) = transform(params, state)
            return value, gradients, state

        return run

    return Library(dot=dot, state=state, value_and_grad=value_and_grad)


# The plain pattern. The functions below use no part of jaxfp8.


def plain() -> Library:
    product = plain_product(jnp.dot)
    return Library(dot=lambda x, w, state: product(x, w), value_and_grad=without_state)


def scale_of(amax: jax.Array, dtype: Any) -> jax.Array:
    """amax / the largest value of the format. 1 if the array is 0 everywhere."""
    return jnp.where(amax > 0, amax / float(jnp.finfo(dtype).max), jnp.ones_like(amax))


def saturated(x: jax.Array, dtype: Any) -> jax.Array:
    # JAX converts what is too large to NaN or inf, and a rounded scale may be too small.
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Values, and one scale of the same dtype as x."""
    scale = scale_of(jnp.max(jnp.abs(x)), dtype)
    return saturated(x / scale, dtype), scale


def dequantize(values: jax.Array, scale: jax.Array) -> jax.Array:
    return values.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)


def plain_product(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`product(x, w, *rest)` with x and w in E4M3, and the gradient of the result in E5M2.

    It saves x and w in FP8. If it saved what it multiplies, a scan over blocks would store that in
    bfloat16. Then XLA finds no FP8 in the backward pass: for `steps` it made 4 of 12 matmuls in FP8
    (compiled for an H200, jax 0.12).
    """

    @jax.custom_vjp
    def run(x: jax.Array, w: jax.Array, *rest: Any) -> jax.Array:
        return forward(x, w, *rest)[0]

    def forward(x: jax.Array, w: jax.Array, *rest: Any) -> Any:
        x, w = quantize(x, E4M3), quantize(w, E4M3)
        return product(dequantize(*x), dequantize(*w), *rest), (x, w, rest)

    def backward(saved: Any, g: jax.Array) -> Any:
        x, w, rest = saved
        _, pull = jax.vjp(lambda x, w: product(x, w, *rest), dequantize(*x), dequantize(*w))
        return *pull(dequantize(*quantize(g, E5M2))), *[None for _ in rest]

    run.defvjp(forward, backward)
    return run


def plain_matmul(dimension_numbers: Any) -> Callable[..., jax.Array]:
    """The matmul of two operands that are quantized already, as `fp8.scaled_matmul` takes them."""

    def run(lhs: Any, rhs: Any) -> jax.Array:
        lhs, rhs = (dequantize(each.values, each.scale) for each in (lhs, rhs))
        return lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=jnp.bfloat16)

    return run


# Casts to E4M3, in the plain pattern. They write the same arrays as the casts of `casts.py`. Their
# scales are amax / 448 in float32, while most recipes round theirs to powers of two.


def cast_known(x: jax.Array, multiplier: jax.Array) -> tuple[jax.Array, ...]:
    """Values with a known scale, and the amax."""
    return saturated(x * multiplier, E4M3), jnp.max(jnp.abs(x)).astype(jnp.float32)


def cast_tensor(x: jax.Array) -> tuple[jax.Array, ...]:
    return _cast(x, None)


def cast_rows(x: jax.Array) -> tuple[jax.Array, ...]:
    return _cast(x, 1)


def _cast(x: jax.Array, axis: int | None) -> tuple[jax.Array, ...]:
    amax = jnp.max(jnp.abs(x), axis=axis, keepdims=True).astype(jnp.float32)
    scale = scale_of(amax, E4M3)
    return saturated(x / scale, E4M3), scale.ravel()


def cast_tiles(x: jax.Array) -> tuple[jax.Array, ...]:
    """Values [M, K] with a scale for each 1x128 values. The scales are transposed: [K / 128, M]."""
    tiles = x.reshape(x.shape[0], -1, 128)
    scale = scale_of(jnp.max(jnp.abs(tiles), axis=-1).astype(jnp.float32), E4M3)
    return saturated(tiles / scale[..., None], E4M3).reshape(x.shape), scale.T


def cast_tiles_twice(x: jax.Array) -> tuple[jax.Array, ...]:
    """1x128 tiles of x, and 1x128 tiles of its transpose."""
    return *cast_tiles(x), *cast_tiles(x.T)


CASTS = {
    "tensor, scale known, and amax": cast_known,
    "tensor": cast_tensor,
    "rows": cast_rows,
    "1x128": cast_tiles,
    "1x128 and 128x1": cast_tiles_twice,
}
"""The casts by the name of their `casts.Way`."""
