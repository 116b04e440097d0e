"""Features for `tpu_program.py`: layers of linen and nnx, converted models, and diagnostics."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from tpu_matmuls import (
    Feature,
    K,
    L,
    M,
    N,
    Rows,
    array,
    one,
    preset,
    size_of,
    state_of,
    training,
)

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION
from jaxfp8.matmul._stats import watch_casts

BF16 = jnp.bfloat16


# Models of linen.


def linen(model: nn.Module, *inputs: Any) -> Feature:
    """The loss, the gradients and the next state of a linen model."""
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), *inputs))
    params, state = variables["params"], variables.get(COLLECTION, {})

    def forward(params: Any, state: Any, *inputs: Any) -> Any:
        y = model.apply({"params": params, COLLECTION: state}, *inputs)
        return y[0] if isinstance(y, tuple) else y

    return training(forward, params, state, *inputs)


class Scanned(nn.Module):
    """Layers in `nn.scan`, with or without `nn.remat`."""

    recipe: fp8.Recipe
    remat: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        class Block(nn.Module):
            recipe: fp8.Recipe

            @nn.compact
            def __call__(self, x: Any, _: Any = None) -> Any:
                return x + fp8.linen.FP8Dense(K, dtype=BF16, recipe=self.recipe)(x), None

        body = Block
        if self.remat:
            body = nn.remat(Block, prevent_cse=False, policy=fp8.save_fp8_residuals())
        axes = {"params": 0, COLLECTION: 0}
        stack = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=L)
        return stack(self.recipe)(x, None)[0]


class OwnEinsum(nn.Module):
    """A matmul of a module's own, by `FP8EinsumOp`."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.lecun_normal(), (K, 4, 128), BF16)
        return fp8.linen.FP8EinsumOp()("bk,khf->bhf", x, w)


class Block(nn.Module):
    """A transformer block as flax writes it."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm(dtype=BF16)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, dtype=BF16, name="attention")(h, h)
        h = nn.gelu(nn.Dense(4 * K, dtype=BF16, name="up")(nn.LayerNorm(dtype=BF16)(x)))
        return x + nn.Dense(K, dtype=BF16, name="down")(h)


class Own(nn.Module):
    """A model whose matmul is code of its own."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.lecun_normal(), (K, N), BF16)
        return jnp.einsum("bk,kn->bn", jnp.tanh(x), w)


def converted(model: nn.Module, name: str, *inputs: Any) -> Feature:
    return linen(fp8.convert(model, preset(name), inputs=inputs)[0], *inputs)


def attention(recipe: fp8.Recipe) -> nn.Module:
    """flax's attention, with projections in FP8."""
    using = fp8.linen.FP8DotGeneral.using(recipe)
    return nn.SelfAttention(
        num_heads=2, dtype=BF16, qkv_dot_general_cls=using, out_dot_general_cls=using
    )


def linen_rows() -> Rows:
    x, tokens, delayed = array(M, K), array(4, 128, K), preset("delayed")
    rows: Rows = {}
    for name in ("delayed", "mxfp8"):
        given = {"dtype": BF16, "recipe": preset(name)}
        layers = {
            "FP8Dense": (fp8.linen.FP8Dense(N, **given), x),
            "FP8DenseGeneral": (fp8.linen.FP8DenseGeneral((4, 128), **given), x),
            "FP8Einsum": (fp8.linen.FP8Einsum((K, 4, 128), "bk,khf->bhf", **given), x),
            "FP8MoE": (fp8.linen.FP8MoE(experts=4, hidden=256, k=2, **given), tokens),
            "nn.scan": (Scanned(preset(name), False), x),
            "nn.scan and nn.remat": (Scanned(preset(name), True), x),
            "nn.SelfAttention, FP8DotGeneral": (attention(preset(name)), tokens),
        }
        for words, (model, inputs) in layers.items():
            rows[f"linen: {words}, {name}"] = one(linen, model, inputs)
        rows[f"convert: linen, a block, {name}"] = one(converted, Block(), name, tokens)
        rows[f"convert: linen, its own code, {name}"] = one(converted, Own(), name, x)
    sizes = array(4, dtype=jnp.int32)
    grouped = fp8.linen.FP8GroupedLinear(N, dtype=BF16, recipe=delayed)
    rows["linen: FP8GroupedLinear, delayed"] = one(linen, grouped, x, sizes)
    rows["linen: FP8EinsumOp, delayed"] = one(linen, OwnEinsum(), x)
    return rows


# Models of nnx.


def nnx_model(make: Callable[[], nnx.Module], *inputs: Any) -> Feature:
    """The loss, the gradients and the next state of an nnx model."""
    graph, variables = nnx.split(nnx.eval_shape(make))

    def step(variables: Any, *inputs: Any) -> Any:
        model = nnx.merge(graph, variables)

        def loss(model: Any, *inputs: Any) -> Any:
            y = model(*inputs)
            return size_of(y[0] if isinstance(y, tuple) else y)

        value, grads = fp8.nnx.value_and_grad(loss)(model, *inputs)
        return value, grads, nnx.state(model, fp8.nnx.FP8State)

    return Feature(step, (variables, *inputs))


class Stack(nnx.Module):
    """Layers in `nnx.scan`."""

    def __init__(self, recipe: fp8.Recipe, rngs: nnx.Rngs):
        make = nnx.vmap(
            lambda rngs: fp8.nnx.FP8Linear(K, K, dtype=BF16, recipe=recipe, rngs=rngs),
            in_axes=(0,),
            out_axes=0,
        )
        self.layers = make(rngs.fork(split=L))

    def __call__(self, x: Any) -> Any:
        scan = nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.layers)


class MLP(nnx.Module):
    """A model of flax's layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(K, N, dtype=BF16, rngs=rngs)
        self.down = nnx.Linear(N, K, dtype=BF16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.gelu(self.up(x)))


class Attention(nnx.Module):
    """flax's attention, with projections in FP8."""

    def __init__(self, recipe: fp8.Recipe, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, K, decode=False, dtype=BF16, rngs=rngs)
        here = self.attention
        for layer in (here.query, here.key, here.value, here.out):
            layer.dot_general = nnx.data(fp8.nnx.FP8DotGeneral(recipe))

    def __call__(self, x: Any) -> Any:
        return self.attention(x)


def nnx_rows() -> Rows:
    x, tokens, sizes = array(M, K), array(4, 128, K), array(4, dtype=jnp.int32)
    rows: Rows = {}
    for name in ("delayed", "mxfp8"):
        recipe, given = preset(name), {"dtype": BF16, "recipe": preset(name)}
        layers: dict[str, tuple[Callable[..., Any], Any]] = {
            "FP8Linear": (lambda r, g=given: fp8.nnx.FP8Linear(K, N, rngs=r, **g), x),
            "FP8LinearGeneral": (
                lambda r, g=given: fp8.nnx.FP8LinearGeneral(K, (4, 128), rngs=r, **g),
                x,
            ),
            "FP8Einsum": (
                lambda r, g=given: fp8.nnx.FP8Einsum("bk,khf->bhf", (K, 4, 128), rngs=r, **g),
                x,
            ),
            "FP8MoE": (lambda r, g=given: fp8.nnx.FP8MoE(4, K, 256, 2, rngs=r, **g), tokens),
            "nnx.scan and nnx.vmap": (lambda r, recipe=recipe: Stack(recipe, r), x),
            "nnx.MultiHeadAttention, FP8DotGeneral": (
                lambda r, recipe=recipe: Attention(recipe, r),
                tokens,
            ),
        }
        for words, (make, inputs) in layers.items():
            made = lambda make=make: make(nnx.Rngs(0))
            rows[f"nnx: {words}, {name}"] = one(nnx_model, made, inputs)
        rows[f"convert: nnx, {name}"] = one(
            nnx_model, lambda recipe=recipe: fp8.convert(MLP(nnx.Rngs(0)), recipe)[0], x
        )
    grouped = lambda: fp8.nnx.FP8GroupedLinear(4, K, N, dtype=BF16, rngs=nnx.Rngs(0))
    rows["nnx: FP8GroupedLinear, delayed"] = one(nnx_model, grouped, x, sizes)
    return rows


# A function, and what is seen of a step.


def converted_function(name: str) -> Feature:
    """A loss of plain JAX."""
    forward = lambda params, x: jax.nn.relu(x @ params["up"]) @ params["down"]
    params, x = {"up": array(K, N), "down": array(N, K)}, array(M, K)
    function = fp8.convert(forward, preset(name), inputs=(params, x))[0]
    state = jax.eval_shape(function.init_state)
    return training(lambda params, state, x: function(params, x, fp8_state=state), params, state, x)


def watched() -> Feature:
    """A step inside of `fp8.diagnostics.collect`, whose statistics leave by a callback."""
    recipe = preset("current")

    def step(w: Any, x: Any) -> Any:
        loss = lambda w: size_of(fp8.dot(x, w, recipe=recipe, name="up"))
        with watch_casts(lambda *_: None):
            return jax.value_and_grad(loss)(w)

    return Feature(step, (array(K, N), array(M, K)))


def reported(devices: list[Any]) -> Feature:
    """`fp8.memory_report` of a step for the chip. It compiles the step and its twin itself."""
    recipe, here = preset("delayed"), jax.sharding.SingleDeviceSharding(devices[0])
    loss = lambda w, state, x: size_of(fp8.dot(x, w["w"], recipe=recipe, state=state))

    def step(w: Any, state: Any, x: Any) -> Any:
        value, grads, state = fp8.value_and_grad(loss)(w, state, x)
        return jax.tree.map(lambda w, g: w - jnp.bfloat16(1e-3) * g, w, grads), state, value

    arguments = {"w": array(K, N)}, state_of(recipe), array(M, K)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), arguments
    )
    report = fp8.memory_report(jax.jit(step, donate_argnums=(0, 1)), *placed)
    if not 0 < report.fp8["weights"] == K * N * 2:
        raise AssertionError(f"the report counts {report.fp8['weights']} bytes of weights")
    return Feature(step, arguments, donate=(0, 1))


def seen_rows() -> Rows:
    return {
        "convert: a function, delayed": one(converted_function, "delayed"),
        "convert: a function, mxfp8": one(converted_function, "mxfp8"),
        "diagnostics: collect, current": one(watched),
        "diagnostics: memory_report, delayed": reported,
    }
