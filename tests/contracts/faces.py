"""The three faces of one matmul, and a control that is wrong.

State as a plain cotangent, which JAX sums.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from contracts import own_quantizer
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.nnx import FP8Linear, FP8State
from jaxfp8.quantizers import Current
from jaxfp8.state._state import SeenAmax


def in_tiles(name, *, square, **fields):
    """Tiles of 2, so that the shards of a mesh end where tiles do.

    8 examples over 4 devices, 4 features over 2.
    """
    x = Current(format=fp8.E4M3, granularity=fp8.PerBlock((1, 2)), **fields)
    w = Current(format=fp8.E4M3, granularity=fp8.PerBlock((2, 2) if square else (1, 2)), **fields)
    matmul = lambda lhs, rhs: fp8.recipes.Operands(lhs=lhs, rhs=rhs)
    return fp8.Recipe(name=name, fprop=matmul(x, w), dgrad=matmul(x, w), wgrad=matmul(x, x))


RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "delayed_pow2": fp8.recipes.delayed(history_length=4, power_of_two=True),
    "own": own_quantizer.recipe(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(power_of_two=False),
    "rowwise_hp_wgrad": fp8.recipes.rowwise(power_of_two=False, high_precision_wgrad=True),
    "static": fp8.recipes.static(x_scale=0.11, w_scale=0.013, g_scale=0.0007),
    "blockwise": in_tiles("blockwise", square=True, power_of_two=True),
    "blockwise_f32": in_tiles("blockwise", square=True),
    "mxfp8": in_tiles("mxfp8", square=False, scale_format=fp8.E8M0),
    "mxfp8_2d": in_tiles("mxfp8", square=True, scale_format=fp8.E8M0),
    "identity": fp8.recipes.identity(),
}


@dataclasses.dataclass(frozen=True)
class Face:
    """`apply(w, state, x) -> y` of one matmul, and how a loss with state is differentiated."""

    apply: Callable
    init: Callable  # () -> state
    value_and_grad: Callable = fp8.value_and_grad
    nothing_seen: Callable = fp8.nothing_seen
    merge: Callable = fp8.merge_seen
    commit: Callable = fp8.commit
    fork: Callable = fp8.fork

    def state(self, lead, warm):
        """Stacked by `lead`; a warm one has a scale of its own in each row, and x saturates."""
        state = self.init()
        for size in reversed(lead):
            state = jax.tree.map(
                lambda leaf, size=size: np.broadcast_to(leaf, (size, *leaf.shape)), state
            )
        state = jax.device_put(state)
        if not (warm and jax.tree.leaves(state)):
            return state
        at = np.arange(1, 1 + np.prod(lead), dtype=np.float32).reshape(*lead, 1)
        # eagerly each operation is a program, for each shape
        return jax.jit(fp8.commit)(
            state, SeenAmax(jax.device_put(np.float32([21, 11, 13]) * at), state.rows)
        )


def core(recipe):
    return Face(
        lambda w, s, x: fp8.dot(x, w, recipe=recipe, state=s), lambda: fp8.init_state(recipe)
    )


def linen(recipe):
    def apply(w, s, x):
        variables = {"params": {"kernel": w}}
        if recipe.rows:
            variables[COLLECTION] = {"FP8DotGeneral_0": {"fp8": s}}
        return FP8Dense(w.shape[1], use_bias=False, recipe=recipe).apply(variables, x)

    return Face(apply, lambda: fp8.init_state(recipe))


def of_nnx(recipe):
    layer = FP8Linear(4, 4, use_bias=False, recipe=recipe, rngs=nnx.Rngs(0))
    graphdef, params, states = nnx.split(layer, nnx.Param, FP8State)

    def apply(w, s, x):
        own = jax.tree.map(
            lambda _: s, states, is_leaf=lambda node: isinstance(node, fp8.state.MatmulState)
        )
        return nnx.merge(graphdef, jax.tree.map(lambda _: w, params), own)(x)

    return Face(apply, lambda: fp8.init_state(recipe))


FACES = {"core": core, "linen": linen, "nnx": of_nnx}


def control():
    """flax's scheme, without its rounding.

    The amaxes of a matmul are the cotangent of its state, f32[..., 3].
    """

    @jax.custom_vjp
    def matmul(w, state, x):
        return x @ w

    def backward(saved, g):
        w, x = saved
        return x.T @ g, jnp.stack([jnp.max(jnp.abs(t)) for t in (x, w, g)]), g @ w.T

    matmul.defvjp(lambda w, state, x: (x @ w, (w, x)), backward)

    def value_and_grad(loss, *, commit=True, reduce_axes=None):
        def run(params, state, *batch):
            value, (grads, amax) = jax.value_and_grad(loss, argnums=(0, 1))(params, state, *batch)
            return value, grads, amax

        return run

    return Face(
        matmul,
        lambda: jnp.zeros(3),
        value_and_grad,
        nothing_seen=jnp.zeros_like,
        merge=jnp.add,
        commit=lambda state, seen: seen,
        fork=lambda state: (state, state),
    )
