"""Pipeline stages whose tensors differ a hundredfold.

Each casts with scales of its own, and the check of it can fail.

Controls reduce amaxes over the pipeline axis, too, in every way that a user or a change of the
library could. The same check must fail for them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.sharding._amax import varying_axes
from jaxfp8.state import _ledger

N = 8
AXES = ("data", "pipe")
DELAYED, CURRENT = fp8.recipes.delayed(history_length=4), fp8.recipes.current()


@functools.cache
def stages():
    """w, x and c of both stages, [2, N, N]; those of the second are a hundred times larger."""
    random = np.random.default_rng(0)
    draw = lambda: (
        np.float32([1, 100])[:, None, None] * random.standard_normal((2, N, N)).astype(np.float32)
    )
    return draw(), draw(), draw()


def loss(recipe, w, s, x, c, **named):
    return jnp.sum(fp8.dot(x, w, recipe=recipe, state=s, **named) * c)


def state(recipe):
    return jax.tree.map(lambda leaf: np.stack([leaf, leaf]), fp8.init_state(recipe))


@functools.cache
def one_stage(recipe):
    return jax.jit(fp8.value_and_grad(functools.partial(loss, recipe)))


def one_by_one(recipe, states):
    """Of one device: the gradient of w and the state of each stage."""
    at = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)
    w, x, c = stages()
    results = [one_stage(recipe)(w[i], at(states, i), x[i], c[i])[1:] for i in (0, 1)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def inside(recipe, types, axes, w, s, x, c):
    """Of one device of stage and data; `axes`: those that are named for amaxes."""
    w, s, x, c = jax.tree.map(lambda leaf: leaf[0], (w, s, x, c))
    named = {} if axes is None else {"reduce_axes": axes}
    stateful, stateless = (named, {}) if recipe.rows else ({}, named)
    _, dw, new = fp8.value_and_grad(functools.partial(loss, recipe, **stateless), **stateful)(
        w, s, x, c
    )
    return jax.tree.map(lambda leaf: leaf[None], (dw if types else lax.psum(dw, "data"), new))


def assert_close(actual, wanted):
    """To the rounding of a sum, for each stage by its own size."""
    size = np.max(np.abs(wanted), axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(actual / size, wanted / size, rtol=0, atol=1e-6)


def check(recipe, types, axes):
    """Two steps, the second of which casts with the scales of the first."""
    mesh = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    specs = P("pipe"), P("pipe"), P("pipe", "data"), P("pipe", "data")
    step = jax.shard_map(
        functools.partial(inside, recipe, types, axes),
        mesh=mesh,
        in_specs=specs,
        out_specs=P("pipe"),
        check_vma=types,
    )
    step, (w, x, c) = jax.jit(step), stages()
    states = state(recipe)
    for _ in range(2 if recipe.rows else 1):
        got_dw, got = step(w, states, x, c)
        want_dw, want = one_by_one(recipe, states)
        if recipe.rows:
            assert (want.scale[1] > 30 * want.scale[0]).all()
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert_close(got_dw, want_dw)
        states = want


# Recipe, check_vma, the axes named for amaxes.
RIGHT = {
    "delayed, types": (DELAYED, True, None),
    "delayed, no types": (DELAYED, False, ("data",)),
    "current, types and axes": (CURRENT, True, ("data",)),
    "current, no types": (CURRENT, False, ("data",)),
}
WRONG = {
    "delayed, no types": (DELAYED, False, ("data", "pipe")),
    "current, types and axes": (CURRENT, True, ("data", "pipe")),
    "current, no types": (CURRENT, False, ("data", "pipe")),
    # Types alone cannot tell a stage from a part of a batch: without state the caller has to
    # (docs/limits.md).
    "current, types": (CURRENT, True, None),
}


@pytest.mark.parametrize("case", RIGHT)
def test_each_stage_keeps_its_scales(case):
    check(*RIGHT[case])


@pytest.mark.parametrize("case", WRONG)
def test_it_fails_where_the_pipeline_axis_is_reduced(case):
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(*WRONG[case])


def test_it_fails_where_the_library_reduces_every_axis(monkeypatch):
    everywhere = lambda x, axes: (
        lax.pmax(x, tuple(sorted(varying_axes(x)))) if varying_axes(x) else x
    )
    monkeypatch.setattr(_ledger, "pmax", everywhere)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(*RIGHT["delayed, types"])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(AxisType.Auto, id="Auto", marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, id="Explicit"),
    ],
)
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=lambda recipe: recipe.name)
def test_stages_in_a_vmap(recipe, kind):
    """Whole arrays: stages, and their states, along a sharded axis."""
    mesh = jax.make_mesh((4, 2), AXES, axis_types=(kind,) * 2)
    both = lambda w, s, x, c: jnp.sum(jax.vmap(functools.partial(loss, recipe))(w, s, x, c))
    w, x, c = stages()
    place = lambda value, *spec: jax.device_put(value, jax.NamedSharding(mesh, P(*spec)))
    args = (
        place(w, "pipe"),
        place(state(recipe), "pipe"),
        place(x, "pipe", "data"),
        place(c, "pipe", "data"),
    )
    with jax.set_mesh(mesh):
        _, dw, new = jax.jit(fp8.value_and_grad(both))(*args)
    want_dw, want = one_by_one(recipe, state(recipe))
    jax.tree.map(np.testing.assert_array_equal, new, want)
    assert_close(dw, want_dw)
