"""Weights in FP8 in einsums of several axes, and under the transformations of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from same_bits import assert_same_bits
from weight_cases import RECIPES, WAYS, K, M, N, dot, held, init, normal, rows

import jaxfp8 as fp8
from jaxfp8.weights import WeightAxes

EQUATIONS = {
    "heads": ("bshd,hdk->bsk", (2, 5, 4, 64), (4, 64, 40), WeightAxes(contracted=(0, 1))),
    "heads last": ("bshd,khd->bsk", (2, 5, 4, 64), (40, 4, 64), WeightAxes(contracted=(1, 2))),
    "another order": ("bshd,dhk->bsk", (2, 5, 4, 24), (24, 4, 40), WeightAxes(contracted=(1, 0))),
    "kept heads": ("bd,dhk->bhk", (6, 160), (160, 4, 24), WeightAxes()),
    "kept on both sides": ("bd,hdk->bhk", (6, 160), (4, 160, 24), WeightAxes(contracted=(1,))),
    "experts": ("ebk,ekn->ebn", (3, 6, 160), (3, 160, 24), WeightAxes(contracted=(1,), batch=(0,))),
    "experts inside": (
        "ebk,nek->ebn", (3, 6, 160), (24, 3, 160), WeightAxes(contracted=(2,), batch=(1,)),
    ),
}  # fmt: skip


QUICK = ("heads", "another order", "kept on both sides", "experts inside")


@functools.partial(jax.jit, static_argnums=(0, 1))
def in_ways(run, ways, *given):
    """The results of a function in each way: one program, whose parts share much."""
    return [run(way, *given) for way in ways]


def equations(recipe, way, operands):
    """y, gradients and state of each equation."""
    found = {}
    for name, (x, w) in operands.items():
        equation, _, _, axes = EQUATIONS[name]
        state = init(recipe)

        def loss(params, state, x, equation=equation):
            y = fp8.einsum(
                equation, x, params["w"], recipe=recipe, state=state["w"] if recipe.rows else None
            )
            return jnp.sum(jnp.where(y > 0, y, 2 * y)), y

        params = held(way, {"w": w}, recipe, state, rules=[("w", axes)])
        (_, y), *rest = fp8.value_and_grad(loss, has_aux=True)(params, state, x)
        found[name] = y, rest
    return found


@pytest.mark.parametrize(
    ("name", "names"),
    [
        pytest.param("mxfp8", QUICK, id="mxfp8-few"),
        *(pytest.param(name, EQUATIONS, id=name, marks=pytest.mark.slow) for name in RECIPES),
    ],
)
def test_einsum(name, names):
    """Several contracted axes, which tiles see as one; experts; axes in every order."""
    shapes = {each: EQUATIONS[each][1:3] for each in names}
    operands = {each: (normal(1, *x), normal(0, *w)) for each, (x, w) in shapes.items()}
    run = functools.partial(equations, RECIPES[name])
    want, got = in_ways(run, ("plain", "primary"), operands)
    assert_same_bits(got, want)


def test_merged_axes_cost_no_bytes():
    """A head [64, 40] is half a tile of 128, so two heads share scales."""
    weight = held("primary", {"w": jnp.ones((4, 64, 40))}, RECIPES["blockwise"],
                  rules=[("w", WeightAxes(contracted=(0, 1)))])["w"]  # fmt: skip
    assert weight.shape == (4, 64, 40)
    assert weight.scales[0].shape == (2, 1)


def transformed(recipe, transform, way, w, x, c):
    """y and the gradients of x and w, with a transformation between the loss and the matmul."""
    layer = lambda w, x: jnp.maximum(dot(x, w, recipe, ()), 0)

    def loss(params, _):
        y = transform(layer)(params["w"], params["x"])
        return jnp.sum(y * c), y

    params = held(way, {"w": w, "x": x}, recipe)
    (_, y), grads, _ = fp8.value_and_grad(loss, has_aux=True)(params, ())
    return y, grads


def in_while(layer):
    """Forward only: JAX has no gradient of a `while_loop`."""

    def run(w, x):
        body = lambda carry: (carry[0] + 1, layer(*lax.stop_gradient((carry[2], x))), carry[2])
        none = jnp.zeros((*x.shape[:-1], N))
        return lax.while_loop(lambda carry: carry[0] < 2, body, (0, none, w))[1] + layer(w, x)

    return run


TRANSFORMS = {
    "vmap over examples": lambda layer: jax.vmap(layer, in_axes=(None, 0)),
    "cond": lambda layer: (
        lambda w, x: lax.cond(x[0, 0, 0] > 0, lambda w: layer(w, x), lambda w: layer(w, 2 * x), w)
    ),
    "two uses": lambda layer: lambda w, x: layer(w, x) + layer(w, -x),
    "stop_gradient": lambda layer: lambda w, x: layer(lax.stop_gradient(w), x),
    "while": in_while,
    "remat": jax.checkpoint,
} | {
    f"remat, {options}": functools.partial(
        jax.checkpoint, policy=fp8.save_fp8_residuals(**options)
    )
    for options in ({}, {"weights": True}, {"inputs": False})
}  # fmt: skip


@pytest.mark.parametrize("name", rows(("mxfp8",)))
@pytest.mark.parametrize(
    "transform",
    [
        # test_remat_of_delayed_scaling has each policy.
        pytest.param(name, marks=pytest.mark.slow if name.startswith("remat") else ())
        for name in TRANSFORMS
    ],
)
def test_transformations(name, transform):
    if RECIPES[name].rows:
        pytest.skip("a state has one use; see test_same_bits and test_remat_of_delayed")
    arrays = normal(0, K, N), normal(1, 3, M, K), normal(2, 3, M, N)
    run = functools.partial(transformed, RECIPES[name], TRANSFORMS[transform])
    ways = ("plain", *(("primary",) if transform != "two uses" else WAYS))
    want, *got = in_ways(run, ways, *arrays)
    for each in got:
        assert_same_bits(each, want)
    assert np.any(np.asarray(want[1]["w"]) != 0) == (transform != "stop_gradient")


@pytest.mark.parametrize("options", [{}, {"weights": True}, {"inputs": False}], ids=str)
def test_remat_of_delayed_scaling(options):
    """The amax of the weight leaves the backward pass once, with every policy."""
    recipe = RECIPES["delayed"]
    policy = fp8.save_fp8_residuals(**options)

    def step(way, w, x):
        state = init(recipe)
        layer = jax.checkpoint(lambda w, s, x: jnp.tanh(dot(x, w, recipe, s)), policy=policy)
        loss = lambda params, state: jnp.sum(layer(params["w"], state, x).astype(jnp.bfloat16))
        return fp8.value_and_grad(loss)(held(way, {"w": w}, recipe, state), state)[1:]

    assert_same_bits(*in_ways(step, ("primary", "plain"), normal(0, K, N), normal(1, M, K)))
