"""The contenders of cpu_train_step.py: one train step of the same MLP in each library.

Letters: B batch, D features, F hidden features.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.nnx import FP8Linear

BASELINE = "nn.Dense, bf16"
SEED = 0


def adamw() -> optax.GradientTransformation:
    """The optimizer of every contender. Its step is part of each time."""
    return optax.adamw(1e-3, weight_decay=0.01)


class Mlp(nn.Module):
    """[B, D] -> [B, D] through F hidden features. `dense` makes the two layers."""

    dense: Callable[..., nn.Module]
    hidden: int

    @nn.compact
    def __call__(self, x):
        # flax draws initial values by the name of a layer. Without these names it would use the
        # name of the class, which differs between contenders.
        h = nn.relu(self.dense(self.hidden, name="up")(x))
        return self.dense(x.shape[-1], name="down")(h)


class NnxMlp(nnx.Module):
    """The same MLP with nnx layers."""

    def __init__(
        self, linear: Callable[..., nnx.Module], features: int, hidden: int, rngs: nnx.Rngs
    ):
        self.up = linear(features, hidden, rngs=rngs)
        self.down = linear(hidden, features, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def mean_squared_error(y, target):
    return jnp.mean(jnp.square(y.astype(jnp.float32) - target))


# Each contender is a function (batch, hidden) -> step. A call of step() trains on the batch once
# and returns the loss.


def linen(
    dense: Callable[..., nn.Module],
    *,
    gradients: str = "jax",
    convert: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Callable[..., Callable[[], jax.Array]]:
    """A linen model in a TrainState.

    Args:
      dense: makes a layer of so many features.
      gradients: how the model is differentiated. "jax": by `jax.value_and_grad`, without FP8 state.
        "overwrite": by `jax.value_and_grad`, with flax's FP8 state. The gradient of that state is
        its new value. "jaxfp8": by `fp8.value_and_grad`.
      convert: returns the model to train, made from the linen model.
    """

    def make(batch, hidden: int):
        x, target = batch
        state = start(convert(Mlp(dense, hidden)), x, gradients)

        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(state, x, target):
            def loss_fn(params, *collections):
                variables = (
                    {"params": params, COLLECTION: collections[0]} if collections else params
                )
                return mean_squared_error(state.apply_fn(variables, x), target)

            if gradients == "jaxfp8":
                params, collection = state.params["params"], state.params.get(COLLECTION, {})
                loss, grads, new = fp8.value_and_grad(loss_fn)(params, collection)
                grads = {"params": grads, COLLECTION: new}
            else:
                loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), loss

        def step():
            nonlocal state
            state, loss = train_step(state, x, target)
            return loss

        return step

    return make


def start(model: nn.Module, x, gradients: str) -> TrainState:
    """A TrainState with the same initial parameters for every contender."""
    variables = jax.jit(model.init)(jax.random.key(SEED), x)
    if gradients == "jaxfp8":
        variables.setdefault(COLLECTION, {})  # a recipe without state has no collection
    return TrainState.create(apply_fn=model.apply, params=variables, tx=adamw())


def nnx_linear(linear: Callable[..., nnx.Module]) -> Callable[..., Callable[[], jax.Array]]:
    """An nnx model with `nnx.Optimizer`."""

    def make(batch, hidden: int):
        x, target = batch
        model = NnxMlp(linear, x.shape[-1], hidden, nnx.Rngs(SEED))
        optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)

        @functools.partial(nnx.jit, donate_argnums=(0, 1))
        def train_step(model, optimizer, x, target):
            loss, grads = fp8.nnx.value_and_grad(
                lambda model: mean_squared_error(model(x), target)
            )(model)
            optimizer.update(model, grads)
            return loss

        return lambda: train_step(model, optimizer, x, target)

    return make


def qwix(batch, hidden: int):
    """qwix with E4M3 forward and E5M2 gradients.

    It has one scale a channel, the default of its rules for quantized training.
    """
    from qwix import QtProvider, QtRule, quantize_model

    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    rule = QtRule(module_path=".*", weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2)

    return linen(bf16_dense, convert=lambda model: quantize_model(model, QtProvider([rule])))(
        batch, hidden
    )


def bf16_dense(features: int, **arguments: Any) -> nn.Module:
    return nn.Dense(features, dtype=jnp.bfloat16, **arguments)


def accumulate_float32(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
    """A matmul of bf16 operands with float32 accumulation, rounded at the end.

    JAX differentiates it, so matmuls of gradients have one float32 and one bf16 operand.
    """
    del preferred_element_type
    return lax.dot_general(lhs, rhs, dimension_numbers, precision, jnp.float32).astype(lhs.dtype)


@jax.custom_vjp
def accumulate_float32_thrice(x, w):
    """x [B, K] times w [K, N] with bf16 operands and float32 accumulation.

    The matmuls of its gradients have bf16 operands and float32 accumulation too.
    """
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _accumulate_backward(operands, g):
    x, w = operands
    dx = jnp.dot(g, w.T, preferred_element_type=jnp.float32).astype(x.dtype)
    dw = jnp.dot(x.T, g, preferred_element_type=jnp.float32).astype(w.dtype)
    return dx, dw


accumulate_float32_thrice.defvjp(
    lambda x, w: (accumulate_float32_thrice(x, w), (x, w)), _accumulate_backward
)


def fp8_dense(recipe: fp8.Recipe) -> Callable[..., Callable[[], jax.Array]]:
    return linen(functools.partial(FP8Dense, dtype=jnp.bfloat16, recipe=recipe), gradients="jaxfp8")


CONTENDERS: dict[str, Callable[..., Callable[[], jax.Array]]] = {
    BASELINE: linen(bf16_dense),
    "bf16, float32 accumulation (forward)": linen(
        functools.partial(bf16_dense, dot_general=accumulate_float32)
    ),
    "bf16, float32 accumulation (all three)": linen(
        functools.partial(
            bf16_dense, dot_general=lambda x, w, *_, **__: accumulate_float32_thrice(x, w)
        )
    ),
    "nn.Dense, float32": linen(nn.Dense),
    "flax Fp8DirectDotGeneralOp": linen(
        functools.partial(bf16_dense, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp),
        gradients="overwrite",
    ),
    "qwix fp8 rule": qwix,
    "jaxfp8 FP8Dense, delayed": fp8_dense(fp8.recipes.delayed()),
    "jaxfp8 FP8Dense, current": fp8_dense(fp8.recipes.current()),
    "jaxfp8 FP8Dense, rowwise": fp8_dense(fp8.recipes.rowwise()),
    "jaxfp8 FP8Dense, rowwise hp-wgrad": fp8_dense(fp8.recipes.rowwise(high_precision_wgrad=True)),
    "jaxfp8 FP8Dense, blockwise": fp8_dense(fp8.recipes.blockwise()),
    "jaxfp8 FP8Dense, blockwise, float32 scales": fp8_dense(
        fp8.recipes.blockwise(power_of_two=False)
    ),
    "jaxfp8 FP8Dense, mxfp8": fp8_dense(fp8.recipes.mxfp8()),
    "jaxfp8 FP8Dense, mxfp8, 32x32 weights": fp8_dense(fp8.recipes.mxfp8(w_tile_dim=2)),
    "jaxfp8 FP8Linear (nnx), delayed": nnx_linear(functools.partial(FP8Linear, dtype=jnp.bfloat16)),
}
