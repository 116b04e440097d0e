"""Tokens, experts and recipes of the tests of `fp8.moe`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

T, K, F, E, CHOICES = 256, 136, 72, 8, 2  # whole tiles of 128, and parts of one
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "identity": fp8.recipes.identity(),
}
EXACT = {"delayed", "current", "identity"}  # wgrad reads the copy that was sent


@functools.cache
def arrays(dtype=jnp.bfloat16, tokens=T, spread=0.5):
    """x [T, K], gates [T, k], chosen [T, k], w_in [E, K, 2 F], w_out [E, F, K], g [T, K], in NumPy.

    The sizes of tokens, and of their gradients, differ, so that casts along rows and along columns
    have different scales. `spread` is the standard deviation of the logarithm of a size.
    """
    normal = np.random.default_rng(0).standard_normal  # NumPy compiles nothing
    size = lambda: np.exp(spread * normal((tokens, 1)))
    x = normal((tokens, K)) * size()
    w_in = normal((E, K, 2 * F)) * 0.05
    w_out = normal((E, F, K)) * 0.1
    g = normal((tokens, K)) * size() * 1e-4
    # Expert 5 gets nothing, expert 0 a lot.
    logits = normal((tokens, E)) + np.array([2.0, 0, 0, 0, 0, -50.0, 0, 1.0])
    chosen = np.argsort(-logits, axis=1)[:, :CHOICES]
    power = np.exp(np.take_along_axis(logits, chosen, axis=1))
    gates = power / power.sum(axis=1, keepdims=True)
    x, w_in, w_out, g = (each.astype(dtype) for each in (x, w_in, w_out, g))
    return x, np.float32(gates), np.int32(chosen), w_in, w_out, g


def states(recipe, stacked):
    """The states of two matmuls: of each expert, or of all."""
    if not recipe.rows:
        return (), ()
    one = jax.device_get(fp8.init_state(recipe))
    if stacked:
        one = jax.tree.map(lambda leaf: np.stack([leaf] * E), one)
    return one, one


def step(recipe, parallel, given, state, **options):
    """y, the gradients of x, gates, w_in and w_out, the next states, and the dropped choices."""
    x, gates, chosen, w_in, w_out, g = given

    def loss(params, state):
        x, gates, w_in, w_out = params
        out = fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=recipe, states=state, parallel=parallel,
            **options,
        )  # fmt: skip
        return jnp.sum(out.y.astype(jnp.float32) * g.astype(jnp.float32)), out

    run = fp8.value_and_grad(loss, has_aux=True)
    (_, out), grads, state = run((x, gates, w_in, w_out), state)
    return out.y, grads, state, out.dropped


@functools.cache
def program(name, *, forward=True, backward=True):
    """A step by a recipe on one device: one program for all numbers, and for all files."""
    parallel = fp8.moe.ExpertParallel(sent_in_fp8=forward, gradient_sent_in_fp8=backward)

    @jax.jit
    def moe_step(given, state):
        return step(RECIPES[name], parallel, given, state)

    return moe_step


def specs_of(recipe, stacked, tokens):
    """The specs of the operands and of the states."""
    experts = P("expert")
    of_state = experts if stacked else P()
    of_states = jax.tree.map(lambda _: of_state, states(recipe, stacked))
    return (tokens, tokens, tokens, experts, experts, tokens), of_states


def put(mesh, tree, specs):
    place = lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec))
    return jax.tree.map(place, tree, specs)


@functools.cache
def program_of_global_arrays(name, kind, *, data=2, experts=4, backward=False, stacked=True):
    """The same of global arrays. Both axes of the mesh split tokens."""
    tokens = ("data", "expert")
    parallel = fp8.moe.ExpertParallel(axis="expert", tokens=tokens, gradient_sent_in_fp8=backward)
    mesh = jax.make_mesh(
        (data, experts), tokens, axis_types=(kind,) * 2, devices=jax.devices()[: data * experts]
    )
    specs = specs_of(RECIPES[name], stacked, P(tokens))

    @jax.jit
    def moe_step(given, state):
        return step(RECIPES[name], parallel, given, state)

    def run(given, state):
        with jax.set_mesh(mesh):
            return moe_step(put(mesh, given, specs[0]), put(mesh, state, specs[1]))

    return run


def distance(got, want):
    """The Frobenius norm of the difference, over that of `want`."""
    got, want = (np.asarray(each, np.float64) for each in (got, want))
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) + 1e-30))


def assert_same(got, want):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))
