"""Microbatches read weights that were cast once: the same bits, and the casts are counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from same_bits import assert_same_bits
from weight_cases import COPIES, RECIPES, WAYS, dot, held, init, normal, rows

import jaxfp8 as fp8
from jaxfp8.weights import WeightAxes

# Layers under a scan, and microbatches under another one.
LAYERS, MICRO, D = 2, 8, 32


@functools.cache
def compiled(name, way):
    return jax.jit(functools.partial(accumulated, RECIPES[name], way))


def accumulated(recipe, way, w, state, xs):
    """A step of MICRO microbatches: loss, gradients, next state."""

    def loss(params, state, x):
        def layer(x, own):
            w, s = own
            return jnp.tanh(dot(x, w, recipe, {"w": s})), None

        y, _ = lax.scan(layer, x, (params["w"], state["w"] if recipe.rows else None))
        return jnp.sum(y.astype(jnp.float32))

    params = held(way, {"w": w}, recipe, state, rules=[("w", WeightAxes(stacked=1))])
    grad = fp8.value_and_grad(loss, commit=False)

    def micro(total, x):
        value, grads, seen = grad(params, state, x)
        seen = fp8.merge_seen(total[2], seen) if recipe.rows else ()
        grads = total[1] + grads["w"].astype(jnp.float32)
        return (total[0] + value, grads, seen), None

    nothing = fp8.nothing_seen(state) if recipe.rows else ()
    start = jnp.float32(0), jnp.zeros(w.shape), nothing
    (value, grads, seen), _ = lax.scan(micro, start, xs)
    return value, grads, fp8.commit(state, seen) if recipe.rows else ()


STACK = (normal(0, LAYERS, D, D) / 4).astype(jnp.bfloat16)
BATCHES = normal(1, MICRO, 16, D, dtype="bfloat16")


def work(jaxpr, shape, times=1):
    """The values of arrays [..., *shape] that are cast to FP8, and that amaxes are taken of.

    Those of a loop count as often as it runs.
    """
    cast = reduced = 0
    for e in jaxpr.eqns:
        like = [v.aval.shape for v in (*e.invars, *e.outvars)]
        size = max((np.prod(s, dtype=int) for s in like if s[-2:] == shape), default=0) * times
        if e.primitive.name == "convert_element_type" and size:
            cast += size * e.params["new_dtype"].name.startswith("float8_e4m3")
        elif e.primitive.name.startswith("reduce_max"):
            reduced += size
        inner = times * e.params["length"] if e.primitive.name == "scan" else times
        parameters = jax.tree.leaves(
            list(e.params.values()), is_leaf=lambda n: hasattr(n, "eqns") or hasattr(n, "jaxpr")
        )
        for p in parameters:
            p = getattr(p, "jaxpr", p)
            if hasattr(p, "eqns"):
                more = work(p, shape, inner)
                cast, reduced = cast + more[0], reduced + more[1]
    return cast, reduced


@pytest.mark.parametrize("name", rows(("delayed",)))
def test_microbatches_of_a_scanned_stack(name):
    """The same bits in two steps. The weights are cast, and their amaxes found, once a step."""
    recipe = RECIPES[name]
    state = init(recipe, (LAYERS,))
    want = None
    for way in ("plain", *WAYS):
        step = compiled(name, way)
        first = step(STACK, state, BATCHES)
        results = first, step(STACK, first[2], BATCHES) if recipe.rows else ()
        want = results if want is None else want
        assert_same_bits(results, want)
        cast, reduced = work(step.trace(STACK, state, BATCHES).jaxpr.jaxpr, (D, D))
        # Each cast is traced with a conversion for CPUs and one for TPUs.
        assert cast == 2 * COPIES[name] * STACK.size * (MICRO if way == "plain" else 1)
        if way == "plain":
            reduced_each = reduced / MICRO
        assert reduced == reduced_each * (MICRO if way == "plain" else 1)
        assert reduced or not recipe.rows


def test_amaxes_of_microbatches_are_those_of_the_weights():
    """Each layer has its own, counted once."""
    state = init(RECIPES["delayed"], (LAYERS,))
    history = compiled("delayed", "primary")(STACK, state, BATCHES)[2]["w"].amax_history
    np.testing.assert_array_equal(
        history[:, 1, -1], np.max(np.abs(STACK.astype(np.float32)), (1, 2))
    )
    np.testing.assert_array_equal(history[:, 1, :-1], 0)


# equation, shapes of x and w, and what the matmul does with the axes of w
