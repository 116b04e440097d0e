"""A matmul with a prologue.

The result, gradients and quantizer state of the two steps, to the bit.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from interpreter import LOADS_TRANSPOSED, interpreted, needs_mosaic
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "careful": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "identity": fp8.recipes.identity(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "mxfp8 2d": fp8.recipes.mxfp8(w_tile_dim=2),
    "static": fp8.recipes.static(x_scale=0.01, w_scale=0.01, g_scale=0.01),
}
PROLOGUES = {"swiglu": fp8.prologues.SwiGLU(), "rms_norm": fp8.prologues.RMSNorm()}
B, S, D, F = 8, 64, 160, 96
STATIC = ("prologue", "kernels")


def normal(seed, *shape, dtype=jnp.bfloat16, size=1.0):
    """Of NumPy: of jax.random each shape is a program."""
    return jnp.asarray((size * np.random.default_rng(seed).standard_normal(shape)).astype(dtype))


def arrays(name, batch=2):
    x, up = (normal(seed, batch, S, D, size=3) for seed in (0, 1))
    gain = 1 + normal(2, D, dtype=np.float32)
    w, c = normal(3, D, F), normal(4, batch, S, F)
    return (x, up if name == "swiglu" else gain), w, c


def matmul(recipe, prologue, lhs, w, state, *, fused, casts=None, **how):
    how["kernels"] = fp8.Kernels(casts=casts)
    if fused:
        return fp8.dot(lhs, w, recipe=recipe, state=state, prologue=prologue, **how)
    return fp8.dot(prologue(*lhs), w, recipe=recipe, state=state, **how)


def step(recipe, prologue, given, state, dot=matmul, **how):
    def loss(params, state, c):
        y = dot(recipe, prologue, *params, state, **how)
        return jnp.sum((y * c).astype(jnp.float32)), y

    *params, c = given
    return fp8.value_and_grad(loss, has_aux=True)(params, state, c)


jitted = jax.jit(step, static_argnums=(0, 1), static_argnames=("dot", "fused", "casts"))


FEW = [
    ("delayed", "swiglu"),
    ("careful", "swiglu"),
    ("blockwise", "rms_norm"),
    ("identity", "rms_norm"),
]


def cases(few):
    """Each recipe with each prologue; by default a few."""
    every = itertools.product(RECIPES, PROLOGUES)
    return [pytest.param(*case, marks=() if case in few else pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("recipe", "name"), cases(FEW))
def test_same_bits(recipe, name):
    recipe, prologue, given = RECIPES[recipe], PROLOGUES[name], arrays(name)
    state = fp8.init_state(recipe)
    for _ in range(2 if recipe.rows else 1):  # the second step finds its scales set
        one, two = (jitted(recipe, prologue, given, state, fused=fused) for fused in (True, False))
        assert_same_bits(one, two)
        state = two[2]
    if recipe.rows:  # the amax of h
        assert (
            state.amax_history[0, -1]
            == np.abs(np.asarray(jax.jit(prologue)(*given[0]), np.float32)).max()
        )


@needs_mosaic
@pytest.mark.parametrize(
    ("recipe", "name"), cases([("delayed", "swiglu"), ("blockwise", "rms_norm")])
)
def test_same_bits_in_kernels(recipe, name):
    if recipe == "identity":
        pytest.skip("it casts nothing")
    recipe, prologue, given = RECIPES[recipe], PROLOGUES[name], arrays(name)
    state = fp8.init_state(recipe)
    if recipe.rows:
        state = jitted(recipe, prologue, given, state, fused=False)[2]
    mine = interpreted(lambda: jitted(recipe, prologue, given, state, fused=True, casts="mosaic"))
    assert_same_bits(mine, jitted(recipe, prologue, given, state, fused=False))


def of_experts(recipe, prologue, lhs, w, state, *, fused):
    """vmap: rows of states, weights and gates of their own; one gain."""
    axes = (0, 0 if lhs[1].ndim > 1 else None)
    dot = functools.partial(matmul, recipe, prologue, fused=fused)
    return jax.vmap(dot, in_axes=(axes, None, None))(lhs, w, state)


def of_layers(recipe, prologue, lhs, w, state, *, fused):
    """scan over remat, residuals in FP8 kept."""
    dot = functools.partial(matmul, recipe, prologue, fused=fused)
    again = jax.checkpoint(dot, policy=fp8.save_fp8_residuals())
    per_layer = lambda carry, x: (
        carry,
        again((x, lhs[1][0] if lhs[1].ndim > 1 else lhs[1]), w, state),
    )
    return jax.lax.scan(per_layer, None, lhs[0])[1]


@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dot", "name"), [(of_experts, "rms_norm"), (of_layers, "swiglu")])
def test_transformations(dot, name, recipe):
    recipe, prologue, given = RECIPES[recipe], PROLOGUES[name], arrays(name)
    state = fp8.init_state(recipe)
    one, two = (
        jitted(recipe, prologue, given, state, dot=dot, fused=fused) for fused in (True, False)
    )
    assert_same_bits(one, two)


@pytest.mark.parametrize(
    ("kind", "name", "recipe"),
    [
        *(
            (kind, name, "current")
            for kind, name in (
                ("explicit", "swiglu"),
                ("shard_map", "rms_norm"),
            )
        ),
        pytest.param("auto", "rms_norm", "current", marks=pytest.mark.slow),
        *(
            pytest.param(kind, name, "delayed", marks=pytest.mark.slow)
            for kind in ("auto", "explicit", "shard_map")
            for name in PROLOGUES
        ),
    ],
)
def test_on_a_mesh(kind, name, recipe):
    """Amaxes are those of all of h, gradients of a gain are summed over devices."""
    recipe, prologue, (lhs, w, c) = RECIPES[recipe], PROLOGUES[name], arrays(name, batch=B)
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    specs = ((P("d"), P("d") if name == "swiglu" else P()), P(), P("d"))
    state = fp8.init_state(recipe)

    def run(fused):
        go = functools.partial(step, recipe, prologue, fused=fused)
        if kind == "shard_map":
            go = functools.partial(inside, recipe, prologue, fused)
            go = jax.shard_map(
                go, in_specs=(specs, P()), out_specs=((P(), P("d")), [specs[0], P()], P())
            )
        with jax.set_mesh(mesh):
            given = jax.tree.map(
                lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)),
                (lhs, w, c),
                specs,
            )
            return jax.jit(go)(given, state)

    one, two = run(True), run(False)
    assert_same_bits(one, two)
    if recipe.rows:
        assert one[2].amax_history[0, -1] == jnp.max(jnp.abs(prologue(*lhs))).astype(jnp.float32)


def inside(recipe, prologue, fused, given, state):
    def loss(params, state, c):
        y = matmul(recipe, prologue, *params, state, fused=fused)
        return jax.lax.psum(jnp.sum((y * c).astype(jnp.float32)), "d"), y

    *params, c = given
    return fp8.value_and_grad(loss, has_aux=True)(params, state, c)


def test_a_part_of_the_axis_that_is_normalized_is_refused():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    (x, gain), w, _ = arrays("rms_norm")

    def run(x, gain, w):
        shard = fp8.sharding.Shard(-1, "d")
        return fp8.dot(
            (x, gain), w, recipe=RECIPES["current"], prologue=fp8.prologues.RMSNorm(), x_shard=shard
        )

    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=mentions("needs all of axis -1 of lhs", "split another")),
    ):
        jax.shard_map(run, in_specs=(P(None, None, "d"), P("d"), P()), out_specs=P())(x, gain, w)


def test_tiles_over_merged_axes():
    """Tokens of 4 sequences of 32 are rows of one tile.

    Heads of 64 are contracted as one axis, and a gain with them.
    """
    recipe = RECIPES["blockwise"]
    x, gain, w = normal(0, 4, 32, 2, 64), normal(1, 64), normal(2, 2, 64, 96)
    numbers = (((2, 3), (0, 1)), ((), ()))
    run = jax.jit(
        functools.partial(fp8.dot_general, dimension_numbers=numbers, recipe=recipe),
        static_argnames=STATIC,
    )
    h = jax.jit(fp8.prologues.RMSNorm())(x, gain)
    wanted = run(h, w)
    assert_same_bits(run((x, gain), w, prologue=fp8.prologues.RMSNorm()), wanted)
    if LOADS_TRANSPOSED:
        by_kernels = fp8.Kernels(casts="mosaic")
        mine = interpreted(
            lambda: run((x, gain), w, prologue=fp8.prologues.RMSNorm(), kernels=by_kernels)
        )
        assert_same_bits(mine, wanted)
