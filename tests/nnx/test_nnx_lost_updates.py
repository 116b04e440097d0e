"""Updates of quantizer state inside compiled functions: a function that drops them raises an error.

jax.jit gives its function a copy of a model. Before, the states of the model outside always stayed
unset (scale [0, 0, 0]), without an error.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.interpreters import partial_eval

import jaxfp8 as fp8
from jaxfp8.nnx._value_and_grad import _kept

RECIPE = fp8.recipes.delayed(history_length=4)
X = jax.random.normal(jax.random.key(0), (4, 8))
LOST = (
    r"fp8\.nnx\.value_and_grad updated .* it would be lost\. "
    r".*nnx\.jit.*nnx\.state\(model\).*commit=False"
)


def layer():
    return fp8.nnx.FP8Linear(8, 4, recipe=RECIPE, rngs=nnx.Rngs(0))


def square(model, x):
    return jnp.mean(jnp.square(model(x)))


step = fp8.nnx.value_and_grad(square)
see = fp8.nnx.value_and_grad(square, commit=False)
# For what comes before or beside a claim: eagerly each operation is a program.
compiled_step, compiled_see = nnx.jit(step), jax.jit(see)


def state_of(model):
    return model.dot_general.state.get_value()


@functools.cache
def state_after_a_step():
    """By functions: of the layer that all tests start from."""
    model = layer()

    def loss(params, state):
        kernel, bias = params
        return jnp.mean(jnp.square(fp8.dot(X, kernel, bias=bias, recipe=RECIPE, state=state)))

    params = model.kernel.get_value(), model.bias.get_value()
    return jax.jit(fp8.value_and_grad(loss))(params, state_of(model))[2]


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


def on_mesh(body, out_specs):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(body, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=out_specs)


def merged(graphdef, state, x):
    model = nnx.merge(graphdef, state)
    return step(model, x)[0]


# Each gives the loss of a step on a copy of the model, and drops the copy.
DROPPED = {
    "jit": lambda model: jax.jit(step)(model, X),
    "jit, nnx.jit inside": lambda model: jax.jit(lambda m, x: nnx.jit(step)(m, x)[0])(model, X),
    "jit in jit": lambda model: jax.jit(
        lambda m, x: jax.jit(lambda m, x: (step(m, x)[0], m))(m, x)[0]
    )(model, X),
    "jit, merge": lambda model: jax.jit(merged, static_argnums=0)(*nnx.split(model), X),
    "scan": lambda model: lax.scan(lambda c, m: (c, step(m, X)[0]), 0.0, stacked(model)),
    "cond": lambda model: jax.jit(
        lambda m: lax.cond(True, lambda m: step(m, X)[0], lambda m: 0.0, m)
    )(model),
    "checkpoint": lambda model: jax.jit(jax.checkpoint(lambda m, x: step(m, x)[0]))(model, X),
    "vmap": lambda model: jax.jit(jax.vmap(step, in_axes=(None, 0)))(model, stacked(X)),
    "shard_map": lambda model: jax.jit(
        on_mesh(lambda m, x: lax.pmean(step(m, x)[0], "data"), jax.P())
    )(model, X),
}  # fmt: skip


def then_evaluated(model, x):
    """An evaluation with the updated model reads scales, and drops the histories."""
    return step(model, x)[0], square(model, x)


def then_logged(model, x):
    return step(model, x)[0], state_of(model).nonfinite_steps


@pytest.mark.parametrize("function", [then_evaluated, then_logged])
def test_a_part_of_an_update_is_not_enough(function):
    with pytest.raises(fp8.FP8StateError, match=LOST):
        jax.jit(function)(layer(), X)


def test_a_frozen_model_loses_nothing():
    model = layer()
    compiled_step(model, X)
    model.dot_general.state.set_value(fp8.freeze(state_of(model)))
    assert jax.jit(step)(model, X)[0] > 0


@pytest.mark.parametrize("name", DROPPED)
def test_an_update_that_is_dropped_is_refused(name):
    with pytest.raises(fp8.FP8StateError, match=LOST):
        DROPPED[name](layer())


def test_a_commit_that_is_dropped_is_refused():
    model = layer()
    _, _, seen = compiled_see(model, X)
    with pytest.raises(fp8.FP8StateError, match=r"fp8\.nnx\.commit updated"):
        jax.jit(fp8.nnx.commit)(model, seen)


def returning_the_model(model):
    def f(model, x):
        loss, _ = step(model, x)
        return loss, model

    return jax.jit(f)(model, X)[1]


def returning_the_state(model):
    def f(graphdef, state, x):
        model = nnx.merge(graphdef, state)
        step(model, x)
        return nnx.state(model)

    nnx.update(model, jax.jit(f, static_argnums=0)(*nnx.split(model), X))
    return model


def carrying_the_model(model):
    return lax.scan(lambda m, x: (m, step(m, x)[0]), model, X[None])[0]


def committing_outside(model):
    _, _, seen = compiled_see(model, X)
    fp8.nnx.commit(model, seen)
    return model


def in_place(transformed):
    def run(model):
        transformed(model, X)
        return model

    return run


def updated_by_scan(**mode):
    def run(model):
        axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
        nnx.scan(lambda m, x: (m, step(m, x)[0]), **axes, **mode)(model, X[None])
        return model

    return run


KEPT = {
    "model returned": returning_the_model,
    "state returned": returning_the_state,
    "model carried": carrying_the_model,
    "commit outside": committing_outside,
    "nnx.jit": in_place(compiled_step),
    "nnx.jit, simple graph": in_place(nnx.jit(step, graph=True, graph_updates=False)),
    "nnx.jit, tree": in_place(nnx.jit(step, graph=False)),
    "nnx.scan": updated_by_scan(),
    "nnx.scan, tree": updated_by_scan(graph=False),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_update_that_is_returned_is_kept(name):
    got = KEPT[name](layer())
    assert state_of(got).scale.all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        state_of(got),
        state_after_a_step(),
    )


@pytest.mark.parametrize(
    "jit",
    [  # Eagerly each operation is a program.
        pytest.param(lambda f: f, id="eager", marks=pytest.mark.slow),
        pytest.param(jax.jit, id="jit"),
    ],
)
def test_shard_map_may_return_the_model(jit):
    want = state_after_a_step()
    got = jit(on_mesh(lambda m, x: (step(m, x), m)[1], jax.P()))(layer(), X)
    # Rows of x and w. Each device has a mean of its own, so gradients differ from those of the
    # whole batch.
    np.testing.assert_array_equal(state_of(got).amax_history[:2], want.amax_history[:2])
    assert state_of(got).scale.all()


def test_an_eager_shard_map_returns_what_is_marked():
    """It evaluates the mark, where a compiled function lowers it."""
    want = state_after_a_step()
    got = on_mesh(lambda state, x: _kept(state, "fp8.nnx.commit"), jax.P())(want, X)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_two_steps_in_one_program():
    """The second step reads what the first one wrote, and only the second is returned."""

    def steps(model, x):
        return step(model, x)[0] + step(model, 2 * x)[0], model

    want = layer()
    for factor in (1, 2):
        compiled_step(want, factor * X)
    _, got = jax.jit(steps)(layer(), X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state_of(got), state_of(want)
    )


def test_a_scan_over_steps_may_return_losses_only():
    """Each step reads the state of the step before it: no update is lost but the last."""
    losses = jax.jit(lambda model: lax.scan(lambda m, x: (m, step(m, x)[0]), model, stacked(X))[1])(
        layer()
    )
    assert losses.shape == (2,)


def test_a_forward_pass_needs_nothing():
    model = layer()
    assert jax.jit(square)(model, X) > 0
    assert jax.eval_shape(step, model, X)[0].shape == ()
    assert not state_of(model).scale.any()


def test_a_recipe_without_state_loses_nothing():
    model = fp8.nnx.FP8Linear(8, 4, recipe=fp8.recipes.current(), rngs=nnx.Rngs(0))
    assert jax.jit(step)(model, X)[0] > 0


@pytest.mark.parametrize("inner", ["jit", "checkpoint", "vmap"])
def test_a_transformation_of_jax_inside_the_loss(inner):
    """The layers of the copy use the state of the model."""
    transform = {
        "jit": jax.jit(square),
        "checkpoint": jax.checkpoint(square),
        "vmap": lambda m, x: jnp.mean(jax.vmap(square, in_axes=(None, 0))(m, x[:, None])),
    }[inner]
    model, want = layer(), state_after_a_step()
    nnx.jit(fp8.nnx.value_and_grad(transform))(model, X)
    np.testing.assert_array_equal(state_of(model).amax_history[:2], want.amax_history[:2])


def test_a_lost_update_stays_one_when_dead_code_is_removed_again():
    jaxpr = jax.make_jaxpr(lambda model: step(model, X)[0])(layer()).jaxpr
    for _ in range(2):
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True])
        assert "fp8_lost" in str(jaxpr)
