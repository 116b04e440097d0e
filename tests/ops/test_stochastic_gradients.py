"""Stochastic rounding of gradients.

Unbiased, by key, the same on every mesh, refused without one.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hard_inputs import mentions
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8Einsum
from jaxfp8.nnx import FP8DotGeneral, FP8Linear

STATIC = {"x_scale": 1.0, "w_scale": 1.0, "g_scale": 1.0}
RECIPES = {
    name: fp8.recipes.get(
        name, gradient_rounding="stochastic", **(STATIC if name == "static" else {})
    )
    for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8", "static")
}
N = 256
# 1 + 1/64 is between two values of E5M2 (1 and 1.25) and of E4M3 (1 and 1.125).
G = np.full((N, N), 1 + 1 / 64, np.float32)
G[0, 0] = 448  # so that scales are powers of two


EYE = np.eye(N, dtype=np.float32)


# Recipes share nothing, but each of them is one program for all keys. Arrays are arguments: XLA
# would cast constants while it compiles.
@functools.partial(jax.jit, static_argnums=0)
def gradients(recipe, key, x, w, g):
    state = fp8.init_state(recipe)
    run = lambda x, w: fp8.dot(x, w, recipe=recipe, state=fp8.freeze(state), key=key)
    return jax.vjp(run, x, w)[1](g)


def drawn(recipe, key):
    """dx and dw of y = x @ w with w and x the identity: both are g as it was cast."""
    return gradients(recipe, key, EYE, EYE, G)


def rows(*few):
    """Recipes. Those that are not named differ from these in what quantizers have tests for."""
    return [pytest.param(n, marks=() if n in few else pytest.mark.slow) for n in RECIPES]


@pytest.mark.parametrize("name", rows("delayed", "current", "mxfp8", "static"))
def test_the_mean_is_right(name):
    """To nearest, every 1 + 1/64 becomes 1: a gradient that is lost at each step."""
    dx, dw = drawn(RECIPES[name], jax.random.key(0))
    for got in (dx, dw):
        values = np.asarray(got, np.float64)[1:, 1:]
        up = np.mean(values != 1)
        assert len(np.unique(values)) == 2
        # of 255^2 casts; 6 standard deviations
        assert abs(values.mean() - (1 + 1 / 64)) < 6 * values.std() / values.shape[0]
        assert 0 < up < 0.2
    if name != "current":
        return
    nearest = fp8.recipes.get(name, **(STATIC if name == "static" else {}))
    np.testing.assert_array_equal(drawn(nearest, None)[0][1:, 1:], 1.0)


@pytest.mark.parametrize("name", rows("current"))
def test_bits_are_those_of_the_key(name):
    recipe, keys = RECIPES[name], jax.random.split(jax.random.key(0), 2)
    first, again, other = (drawn(recipe, key) for key in (keys[0], keys[0], keys[1]))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.any(a != c)
    raw = drawn(recipe, jax.random.key_data(keys[0]))  # keys as uint32 are keys, too
    np.testing.assert_array_equal(raw[0], first[0])


def test_x_and_w_are_rounded_to_nearest():
    x = np.random.default_rng(1).standard_normal((N, N)).astype(np.float32)

    @jax.jit
    def run(x, key):
        want = fp8.dot(x, x, recipe=fp8.recipes.current())
        return fp8.dot(x, x, recipe=RECIPES["current"], key=key), want

    np.testing.assert_array_equal(*run(x, jax.random.key(0)))


def test_tensors_have_bits_of_their_own():
    """x, w and g of equal values are not rounded alike by one key."""
    q = fp8.quantizers.Static(format=fp8.E4M3, scale=1.0, rounding="stochastic")
    pair = fp8.recipes.Operands(lhs=q, rhs=q)
    recipe = fp8.Recipe(name="all", fprop=pair, dgrad=pair, wgrad=pair)
    t = np.full((N, N), 1 + 1 / 16, np.float32)

    @jax.jit  # eagerly each operation is a program
    def run(t, one, key):
        dot = functools.partial(fp8.dot, recipe=recipe, key=key)
        _, backward = jax.vjp(lambda x: dot(x, one), one)
        return dot(t, one), dot(one, t), *backward(t)

    tensors = [np.asarray(each) for each in run(t, EYE, jax.random.key(0))]
    for first, second in itertools.combinations(tensors, 2):
        assert 0.3 < np.mean(first == 1.125) < 0.7
        assert 0.3 < np.mean(first != second) < 0.7


def step(recipe, key, x, w):
    def loss(x, w):
        y = fp8.dot(x, w, recipe=recipe, state=fp8.freeze(fp8.init_state(recipe)), key=key)
        return jnp.sum(y * jnp.where(y > 0, 1.0, 0.7))

    return jax.grad(loss, argnums=(0, 1))(x, w)


ON_MESHES = {("current", AxisType.Explicit), ("mxfp8", AxisType.Auto)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*row, marks=() if row in ON_MESHES else pytest.mark.slow)
        for row in itertools.product(
            ("current", "delayed", "rowwise", "mxfp8"), (AxisType.Auto, AxisType.Explicit)
        )
    ],
    ids=str,
)
def test_a_mesh_does_not_change_them(name, kind):
    recipe, key = RECIPES[name], jax.random.key(3)
    x, w = (np.random.default_rng(s).integers(-8, 9, (N, N)).astype(np.float32) for s in (0, 1))
    run = jax.jit(step, static_argnums=0)
    want, _ = run(recipe, key, x, w)
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        x, w = (
            jax.device_put(t, NamedSharding(mesh, spec))
            for t, spec in ((x, P("data")), (w, P(None, None)))
        )
        got, _ = run(recipe, key, x, w)
    assert got.sharding.spec[0] == "data"
    np.testing.assert_array_equal(got, want)  # rows of dx: no sum crosses devices


def inside(recipe, *, axes="data", check_vma=True):
    """dx as each of 4 x 2 devices has it; rows of x are split over axes, the rest replicates."""
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    rows = P(axes)
    one_block = np.tile(G[:16], (8, 1))  # every part of g is equal

    def local(key, x, w, g):
        _, backward = jax.vjp(
            lambda x: fp8.dot(
                x, w, recipe=recipe, key=key, reduce_axes=None if check_vma else ("data",)
            ),
            x,
        )
        (dx,) = backward(g)
        return dx[None]

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), rows, P(), rows), out_specs=rows,
        check_vma=check_vma,
    )  # fmt: skip
    run = jax.jit(sharded)  # without jit each operation would be compiled for eight devices
    return run(jax.random.key(0), np.ones((128, N), np.float32), EYE, one_block)


@pytest.mark.parametrize(
    ("axes", "count"), [("data", 4), pytest.param(("data", "tp"), 8, marks=pytest.mark.slow)]
)
def test_parts_inside_shard_map_have_bits_of_their_own(axes, count):
    """And replicas the same ones: `out_specs` says that dx does not vary over the other axis."""
    parts = np.asarray(inside(RECIPES["current"], axes=axes))
    assert parts.shape == (count, 128 // count, N)
    for first, second in itertools.combinations(parts, 2):
        assert np.any(first != second)


def test_without_types_parts_cannot_be_told_from_replicas():
    with pytest.raises(
        ValueError, match=mentions("rounds g", "check_vma=False", "shard_map(check_vma=True)")
    ):
        inside(RECIPES["current"], check_vma=False)


MISSING = mentions("key=None", "rounds g stochastically", "key=", "rngs={'fp8': key}", "nnx.Rngs")


def test_without_a_key_only_the_backward_pass_is_refused():
    recipe, x = RECIPES["current"], jnp.ones((4, 4))
    assert fp8.dot(x, x, recipe=recipe).shape == (4, 4)
    for call in (fp8.dot, functools.partial(fp8.einsum, "ij,jk->ik")):
        with pytest.raises(ValueError, match=MISSING):
            jax.grad(lambda x, call=call: call(x, x, recipe=recipe).sum())(x)
    key = jax.random.key(0)
    given = lambda x: fp8.einsum("ij,jk->ik", x, x, recipe=recipe, key=key).sum()
    assert jax.jit(jax.grad(given))(x).shape == (4, 4)
    with pytest.raises(ValueError, match=mentions("rounding='up'", "'stochastic'")):
        fp8.recipes.current(gradient_rounding="up")


class Two(nn.Module):
    """A dense layer and an einsum, one after the other."""

    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x):
        x = FP8Dense(N, use_bias=False, recipe=self.recipe, kernel_init=nn.initializers.ones)(x)
        return FP8Einsum((N, N), "bd,dk->bk", use_bias=False, recipe=self.recipe)(x)


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
def test_linen(name):
    model, x = Two(RECIPES[name]), np.ones((N, N), np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    state = variables.get(COLLECTION, {})

    def loss(params, state, x, rngs):
        y = model.apply({"params": params, COLLECTION: state}, x, rngs=rngs)
        return jnp.sum(y * G)

    run = jax.jit(fp8.value_and_grad(loss))
    grads = [run(variables["params"], state, x, {"fp8": jax.random.key(k)})[1] for k in (0, 0, 1)]
    first, again, other = (jax.tree.leaves(each) for each in grads)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.any(a != c)
    with pytest.raises(ValueError, match=MISSING):
        run(variables["params"], state, x, {})
    # Evaluation needs no key.
    jax.eval_shape(model.apply, {"params": variables["params"], COLLECTION: state}, x)


class Pair(nn.Module):
    """Two equal layers of one input."""

    @nn.compact
    def __call__(self, x):
        dense = lambda: FP8Dense(N, use_bias=False, recipe=RECIPES["current"])
        return dense()(x) + dense()(x)


def test_equal_linen_layers_have_bits_of_their_own():
    names = jax.eval_shape(Pair().init, jax.random.key(0), EYE)
    params, rngs = jax.tree.map(lambda _: EYE, names), {"fp8": jax.random.key(1)}
    run = lambda p, x: jnp.sum(Pair().apply(p, x, rngs=rngs) * G)
    first, second = jax.tree.leaves(jax.jit(jax.grad(run))(params, EYE))
    assert np.any(first != second)


def test_linen_scan_splits_keys():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return FP8Dense(N, use_bias=False, recipe=RECIPES["current"])(x), None

    blocks = nn.scan(
        Block, length=2, variable_axes={"params": 0}, split_rngs={"params": True, "fp8": True}
    )()
    shapes = jax.eval_shape(blocks.init, jax.random.key(0), EYE, None)
    params = jax.tree.map(lambda leaf: np.broadcast_to(EYE, leaf.shape), shapes)
    run = lambda p, x: jnp.sum(blocks.apply(p, x, None, rngs={"fp8": jax.random.key(1)})[0] * G)
    (grads,) = jax.tree.leaves(jax.jit(jax.grad(run))(params, EYE))
    assert np.any(grads[0] != grads[1])


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
def test_nnx(name):
    make = lambda: FP8Linear(
        N, N, use_bias=False, recipe=RECIPES[name], rngs=nnx.Rngs(0, fp8=1),
        kernel_init=nnx.initializers.ones,
    )  # fmt: skip

    @nnx.jit
    def run(model, x):
        loss = lambda model, x: jnp.sum(model(x) * G)
        return fp8.nnx.value_and_grad(loss)(model, x)[1]

    model, twin, x = make(), make(), EYE
    first, second, of_twin = (jax.tree.leaves(run(m, x))[0] for m in (model, model, twin))
    np.testing.assert_array_equal(first, of_twin)
    assert np.any(first != second)  # the stream of keys moves on


def test_nnx_refuses_a_plug_without_rngs():
    with pytest.raises(ValueError, match=mentions("rngs=None", "FP8DotGeneral(recipe, rngs=")):
        FP8DotGeneral(RECIPES["current"])
    assert FP8DotGeneral(fp8.recipes.current()).keys is None


def test_a_state_does_not_depend_on_the_rounding():
    """So that a run can turn it on without losing its state."""
    prints = [fp8.init_state(r).fingerprint for r in (RECIPES["delayed"], fp8.recipes.delayed())]
    np.testing.assert_array_equal(*prints)


def test_a_run_can_turn_it_on_and_off():
    x, key = jnp.ones((4, 4)), jax.random.key(0)
    state = fp8.init_state(fp8.recipes.delayed())
    for recipe in (fp8.recipes.delayed(), RECIPES["delayed"], fp8.recipes.delayed()):
        multiply = functools.partial(fp8.dot, x, recipe=recipe, key=key)
        run = fp8.value_and_grad(lambda w, s, f=multiply: f(w, state=s).sum())
        _, _, state = jax.jit(run)(x, state)
    assert state.amax_history[0, -3:].tolist() == [1, 1, 1]


@pytest.mark.parametrize("key", [3, "junk", jnp.ones(2), jax.random.split(jax.random.key(0), 2)])
def test_a_key_that_is_none(key):
    with pytest.raises(TypeError, match=mentions("key=", "not one PRNG key", "jax.random.key(0)")):
        fp8.dot(jnp.ones((2, 2)), jnp.ones((2, 2)), recipe=RECIPES["current"], key=key)


def test_nnx_evaluation_takes_no_key():
    model = FP8Linear(8, 8, recipe=RECIPES["current"], rngs=nnx.Rngs(0))
    model.eval()
    jax.jit(lambda x: model(x))(jnp.ones((2, 8)))  # closed over: a key could not be counted
    assert model.dot_general.keys.count[...] == 0
    model.train()
    model(jnp.ones((2, 8)))
    assert model.dot_general.keys.count[...] == 1


def test_nnx_kernels_do_not_depend_on_the_rounding():
    make = lambda recipe: FP8Linear(8, 8, recipe=recipe, rngs=nnx.Rngs(0)).kernel[...]
    np.testing.assert_array_equal(make(RECIPES["current"]), make(fp8.recipes.current()))


@pytest.mark.parametrize("rngs", [nnx.Rngs(params=0), 7])
def test_nnx_rngs_without_a_stream(rngs):
    with pytest.raises(ValueError, match=mentions("rngs=", "rounds stochastically", "fp8=1")):
        FP8DotGeneral(RECIPES["current"], rngs=rngs)
