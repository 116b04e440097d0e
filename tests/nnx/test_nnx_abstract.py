"""Models of `nnx.eval_shape`: parameters come from a checkpoint, quantizer state starts fresh.

Before, a forward pass raised "'ShapeDtypeStruct' object is not subscriptable", and nnx.jit "not a
valid JAX type".
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.state._init import fresh_like

RECIPE = fp8.recipes.delayed(history_length=4)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def layer():
    return fp8.nnx.FP8Linear(8, 8, recipe=RECIPE, rngs=nnx.Rngs(0))


class Stack(nnx.Module):
    def __init__(self):
        make = nnx.vmap(
            lambda rngs: fp8.nnx.FP8Linear(8, 8, recipe=RECIPE, rngs=rngs), in_axes=(0,), out_axes=0
        )
        self.layers = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))

    def __call__(self, x):
        return nnx.scan(lambda x, f: f(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


class Bridged(nnx.Module):
    def __init__(self):
        self.inner = nnx.bridge.ToNNX(
            fp8.linen.FP8Dense(8, recipe=RECIPE), rngs=nnx.Rngs(0)
        ).lazy_init(X)

    def __call__(self, x):
        return self.inner(x)


def square(model, x):
    return jnp.mean(jnp.square(model(x)))


def forward(model, x):
    return model(x)


def restored(make, **mode):
    """A model that has the parameters of another one, and nothing else."""
    model = nnx.eval_shape(make, **mode)
    nnx.update(model, nnx.state(make(), nnx.Param))
    return model


STEPS = {
    "forward": forward,
    "nnx.jit of forward": nnx.jit(forward),
    "step": fp8.nnx.value_and_grad(square),
    "nnx.jit of a step": nnx.jit(fp8.nnx.value_and_grad(square)),
}


@pytest.mark.parametrize(
    ("make", "step"),
    [
        *(pytest.param(layer, step, id=f"layer-{step}") for step in STEPS),
        *(
            pytest.param(
                Stack, step, id=f"stack-{step}", marks=() if "jit" in step else pytest.mark.slow
            )
            for step in STEPS
        ),
    ],
)
def test_a_restored_model_is_a_new_one(make, step):
    model, want = restored(make), make()
    for _ in range(2):
        assert_same_bits(STEPS[step](model, X), STEPS[step](want, X))
    assert_same_bits(nnx.state(model, fp8.nnx.FP8State), nnx.state(want, fp8.nnx.FP8State))


def test_tree_mode():
    model, want = restored(layer, graph=False), layer()
    step = nnx.jit(fp8.nnx.value_and_grad(square), graph=False)
    assert_same_bits(step(model, X), step(want, X))


def test_a_bridged_model_starts_fresh_too():
    """flax chooses the type of its Variables, so the first step has to be outside of nnx.jit."""

    def abstract():
        model = Bridged()
        graphdef, state = nnx.split(model)
        return nnx.merge(
            graphdef,
            jax.tree.map(
                lambda s: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), s)
                if isinstance(s, fp8.state.MatmulState) else s,
                state, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState),
            ),
        )  # fmt: skip

    step, model, want = fp8.nnx.value_and_grad(square), abstract(), Bridged()
    np.testing.assert_array_equal(model(X), want(X))
    assert_same_bits(step(model, X), step(want, X))
    assert_same_bits(nnx.jit(step)(model, X), nnx.jit(step)(want, X))


def test_microbatches():
    model, want = restored(layer), layer()
    for each in (model, want):
        see = nnx.jit(fp8.nnx.value_and_grad(square, commit=False))
        fp8.nnx.commit(each, fp8.merge_seen(see(each, X)[2], see(each, 2 * X)[2]))
    assert_same_bits(nnx.state(model, fp8.nnx.FP8State), nnx.state(want, fp8.nnx.FP8State))


def test_a_fresh_state_has_the_shape_the_flag_and_the_sharding_of_an_abstract_one():
    mesh = jax.make_mesh((2,), ("layer",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("layer"))
    many = fp8.freeze(jax.vmap(lambda _: fp8.init_state(RECIPE))(jnp.zeros(4)))
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), many
    )
    fresh = fresh_like(abstract)
    assert_same_bits(fresh, many)
    assert fresh.frozen
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(fresh))
    # Without one: of the host, so that it fits whatever mesh the parameters are on.
    nowhere = fresh_like(jax.eval_shape(lambda: many))
    assert_same_bits(nowhere, many)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(nowhere))


def test_fresh_states_fit_parameters_on_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(nnx.state(layer(), nnx.Param), jax.NamedSharding(mesh, jax.P()))
    model = nnx.eval_shape(layer)
    nnx.update(model, params)
    loss, _ = nnx.jit(fp8.nnx.value_and_grad(square))(
        model, jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    )
    np.testing.assert_allclose(loss, square(layer(), X), rtol=1e-6)


class Topology(jax.sharding.Sharding):
    """Of a chip that programs are compiled for, and that is not there."""

    device_set = (types.SimpleNamespace(client=object()),)
    is_fully_replicated = True
    is_fully_addressable = False
    memory_kind = None

    def check_compatible_aval(self, shape):
        pass


def test_a_state_on_devices_that_are_only_compiled_for_stays_abstract():
    graphdef, state = nnx.split(layer())
    there = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=Topology()), state
    )
    leaves = jax.tree.leaves(nnx.state(nnx.merge(graphdef, there)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_inside_a_trace():
    """A fresh state is made of arrays, not of values of the trace."""

    def f(x):
        return nnx.eval_shape(layer).dot_general.state.get_value().scale.sum() + x

    assert jax.jit(f)(1.0) == 1
