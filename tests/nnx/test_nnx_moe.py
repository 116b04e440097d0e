"""`nnx.FP8MoE`: the layer of linen, with the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION
from jaxfp8.moe import ExpertParallel
from jaxfp8.nnx import FP8MoE, FP8State
from jaxfp8.state._state import is_state

E, F, K = 8, 24, 32
NAMES = ("w_in", "w_out", "shared_in", "shared_out")


def tokens():
    return np.random.default_rng(1).normal(size=(4, 6, K)).astype(np.float32)


def moe(**fields):
    """A layer whose initial values are drawn by one program."""
    return nnx.jit(lambda: FP8MoE(E, K, F, 2, rngs=nnx.Rngs(0), **fields))()


call = nnx.jit(lambda layer, x: layer(x))


def params_of(layer):
    """The parameters as those of linen."""
    found = {"router": layer.router[...]}
    for name in NAMES:
        if (part := getattr(layer, name)) is not None:
            found[name] = {"kernel": part.kernel[...]}
    return found


def states_of(layer):
    """The states as those of linen."""
    if not layer.w_in.recipe.rows:
        return {}
    found = {name: {"fp8": getattr(layer, name).state.get_value()} for name in ("w_in", "w_out")}
    if layer.shared_in is not None:
        for name in ("shared_in", "shared_out"):
            state = getattr(layer, name).dot_general.state.get_value()
            found[name] = {"FP8DotGeneral_0": {"fp8": state}}
    return found


def weighted(y):
    weight = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(y.astype(jnp.float32) * weight)


def test_kernels_of_experts_stay_in_high_precision():
    layer = moe(recipe=fp8.recipes.blockwise())
    held = nnx.jit(lambda layer: fp8.quantize_params(layer, layer.w_in.recipe))(layer)
    with pytest.raises(TypeError, match=r"w_in is QuantizedWeight.*FP8MoE takes matrices in high"):
        held(tokens())


def twin_of(layer, x, **fields):
    """The layer of linen, and its parameters and states, which are those of a layer of nnx."""
    twin, params, state = fp8.linen.FP8MoE(E, F, 2, **fields), params_of(layer), states_of(layer)
    variables = jax.eval_shape(twin.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, params)
    assert jax.tree.structure(variables.get(COLLECTION, {})) == jax.tree.structure(state)
    return twin, params, state


def test_a_result_has_the_bits_of_linen():
    """With the defaults of both. The steps below have other values of each field."""
    fields, x = {"recipe": fp8.recipes.delayed(), "state_per_expert": False}, tokens()
    layer = moe(**fields)
    twin, params, state = twin_of(layer, x, **fields)
    want = jax.jit(twin.apply)({"params": params, COLLECTION: state}, x)
    jax.tree.map(np.testing.assert_array_equal, tuple(call(layer, x)), tuple(want))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {
                "recipe": fp8.recipes.delayed(), "shared": 16, "clamp": (0.5, 0.4),
                "scores": "sigmoid", "dtype": jnp.bfloat16, "normalized": False,
            },
            id="shared",
        ),
        pytest.param(
            {"recipe": fp8.recipes.delayed(), "state_per_expert": False},
            id="one-state",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"recipe": fp8.recipes.blockwise(), "dtype": jnp.bfloat16, "normalized": False},
            id="blockwise",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_steps_have_the_bits_of_linen(fields):
    x = tokens().astype(fields.get("dtype", jnp.float32))
    layer = moe(**fields)
    twin, params, state = twin_of(layer, x, **fields)

    def ours(layer, x):
        def loss(layer):
            y, stats = layer(x)
            return weighted(y) + stats.load_balancing_loss + stats.z_loss, (y, stats)

        return fp8.nnx.value_and_grad(loss, has_aux=True)(layer)

    def theirs(params, state, x):
        def loss(params, state):
            y, stats = twin.apply({"params": params, COLLECTION: state}, x)
            return weighted(y) + stats.load_balancing_loss + stats.z_loss, (y, stats)

        return fp8.value_and_grad(loss, has_aux=True)(params, state)

    @nnx.jit  # one program, whose two parts share much
    def steps(layer, params, state, x):
        return ours(layer, x), theirs(params, state, x)

    for _ in range(2):  # the second step reads the states of the first
        (got, grads), (want, wanted, state) = steps(layer, params, state, x)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)
        np.testing.assert_array_equal(grads.router[...], wanted["router"])
        for name in wanted.keys() - {"router"}:
            np.testing.assert_array_equal(
                np.asarray(grads[name].kernel[...]), np.asarray(wanted[name]["kernel"])
            )
        jax.tree.map(np.testing.assert_array_equal, states_of(layer), state)
    for have in states_of(layer).values():
        assert (np.asarray(jax.tree.leaves(have, is_leaf=is_state)[0].scale) > 0).any()


@pytest.mark.slow  # the gradients are those of linen
def test_steps_of_an_optimizer_lower_the_loss():
    layer = moe(recipe=fp8.recipes.delayed())
    optimizer = nnx.Optimizer(layer, optax.sgd(0.3), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        def loss(layer):
            y, stats = layer(x)
            return jnp.mean((y - 1.0) ** 2) + 0.01 * stats.load_balancing_loss

        value, grads = fp8.nnx.value_and_grad(loss)(layer)
        optimizer.update(layer, grads)
        return value

    losses = [float(step(layer, optimizer, tokens())) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert len(jax.tree.leaves(nnx.state(layer, FP8State), is_leaf=is_state)) == 2


@functools.cache
def on_one_device():
    return call(moe(recipe=fp8.recipes.delayed()), tokens())


@pytest.mark.slow  # as tests/linen/test_linen_moe_on_meshes.py, by the same function
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_gives_the_results_of_one_device(kind):
    want, stats = on_one_device()
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(kind,))
    with jax.set_mesh(mesh):
        layer = moe(parallel=ExpertParallel(axis="expert"), recipe=fp8.recipes.delayed())
        got, meshed = call(layer, jax.device_put(tokens(), jax.P("expert")))
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), 1e-5, 1e-5)
    np.testing.assert_array_equal(np.asarray(meshed.load), np.asarray(stats.load))
    np.testing.assert_allclose(float(meshed.z_loss), float(stats.z_loss), rtol=1e-5)


def test_inside_shard_map_variables_are_parts():
    recipe, split = fp8.recipes.delayed(), jax.P("expert")
    want, stats = on_one_device()
    layer = moe(recipe=recipe, parallel=ExpertParallel(axis="expert"))
    graph, router, rest = nnx.split(layer, nnx.PathContains("router"), ...)
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(jax.P(), split, split), out_specs=(split, jax.P()))
    def split_call(router, rest, x):
        return nnx.merge(graph, router, rest)(x)

    got, parts = split_call(router, rest, tokens())
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), 1e-5, 1e-5)
    np.testing.assert_array_equal(np.asarray(parts.load), np.asarray(stats.load))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(jax.P(), jax.P(), split), out_specs=split)
    def whole(router, rest, x):
        return nnx.merge(graph, router, rest)(x)[0]

    with pytest.raises(ValueError, match="have 8 experts, but 2 of the router's 8"):
        whole(router, rest, tokens())


def test_stochastic_rounding_needs_a_stream():
    recipe = fp8.recipes.current(gradient_rounding="stochastic")
    layer = moe(recipe=recipe)
    grad = nnx.jit(nnx.grad(lambda layer, x: jnp.sum(layer(x)[0] ** 2)))
    first, second = (np.asarray(grad(layer, tokens()).w_out.kernel[...]) for _ in range(2))
    assert (first != second).any()
    with pytest.raises(ValueError, match="no stream"):
        nnx.eval_shape(lambda: FP8MoE(E, K, F, 2, recipe=recipe, rngs=nnx.Rngs(params=0)))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"k": 9}, ValueError, "k=9 is more than experts=8"),
        ({"scores": "relu"}, ValueError, "scores='relu'"),
        ({"clamp": (1.0,)}, ValueError, "clamp="),
        ({"parallel": "expert"}, TypeError, "parallel='expert'"),
        ({"save_original": "x"}, ValueError, "save_original="),
    ],
)
def test_bad_arguments_are_named(fields, error, says):
    with pytest.raises(error, match=says):
        FP8MoE(**{"experts": E, "features": K, "hidden": F, "k": 2, "rngs": nnx.Rngs(0), **fields})


def test_convert_leaves_it_as_it_is():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.moe = FP8MoE(E, K, F, 2, shared=8, recipe=fp8.recipes.blockwise(), rngs=rngs)
            self.out = nnx.Linear(K, 4, rngs=rngs)

        def __call__(self, x):
            return self.out(self.moe(x)[0])

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    _, coverage = fp8.convert(model, fp8.recipes.current(), inputs=(tokens(),))
    for path in ("moe", "moe/w_in", "moe/w_out", "moe/shared_in", "moe/shared_out"):
        assert coverage[path].reason == "an FP8 layer already"


def test_records_name_both_matmuls():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.moe = FP8MoE(E, K, F, 2, recipe=fp8.recipes.current(), rngs=rngs)

    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()
    with fp8.diagnostics.collect(model) as records:
        nnx.jit(lambda model, x: model.moe(x)[0])(model, tokens())
    assert {row.layer for row in records.rows()} == {"moe/w_in", "moe/w_out"}
