"""An optimizer whose parameters hold quantizer state cannot ruin the run: changed rows are unset.

Without fingerprints the optimizer trained the state too: adam's losses were 10.8, 2,327,018,
38,994,264.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.recipes._recipe import Row
from jaxfp8.state._identity import same_fingerprint

RECIPE = fp8.recipes.delayed(history_length=4)
K, B, STEPS = 8, 16, 5
X = np.random.default_rng(0).normal(size=(B, K)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(K, K)).astype(np.float32)
Y = X @ np.random.default_rng(2).normal(size=(K, K)).astype(np.float32)

OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.02, momentum=0.9),
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05, weight_decay=0.1),
    "lion": optax.lion(0.01),
    "adafactor": optax.adafactor(0.05, min_dim_size_to_factor=4),
    "MultiSteps": optax.MultiSteps(optax.adam(0.05), every_k_schedule=2),
}


def loss_fn(params, state, x, y):
    return jnp.mean((fp8.dot(x, params, recipe=RECIPE, state=state) - y) ** 2)


# One program each for all tests: every new function that jax.jit is given is compiled anew.
STEP = jax.jit(fp8.value_and_grad(loss_fn))
LOSS = jax.jit(loss_fn)


def update_of(tx):
    @jax.jit
    def update(tree, grads, memory):
        updates, memory = tx.update(grads, memory, tree)
        return optax.apply_updates(tree, updates), memory

    return update


def whole_tree(tx):
    """The mistake.

    Parameters and state are one tree for optax, and the new state stands among the gradients.
    """
    tree = {"params": W, "state": fp8.init_state(RECIPE)}
    memory, update, losses = tx.init(tree), update_of(tx), []
    for _ in range(STEPS):
        loss, grads, state = STEP(tree["params"], tree["state"], X, Y)
        tree, memory = update(tree, {"params": grads, "state": state}, memory)
        losses.append(float(loss))
    return tree, losses


def parameters_only(tx):
    """The same descent where no step remembers anything, as rows that are unset each time."""
    params, memory, update, losses = W, tx.init(W), update_of(tx), []
    for _ in range(STEPS):
        loss, grads, _ = STEP(params, fp8.init_state(RECIPE), X, Y)
        params, memory = update(params, grads, memory)
        losses.append(float(loss))
    return losses


FEW = {"sgd", "adamw", "MultiSteps"}  # a sum, a decay, and a step that changes nothing


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in OPTIMIZERS]
)
def test_a_tree_that_holds_state(name, standard_promotion):
    tree, losses = whole_tree(OPTIMIZERS[name])
    np.testing.assert_allclose(losses, parameters_only(OPTIMIZERS[name]), rtol=1e-4)
    assert losses[-1] < losses[0]
    # Evaluation does not believe it either.
    loss = LOSS(tree["params"], tree["state"], X, Y)
    want = LOSS(tree["params"], fp8.init_state(RECIPE), X, Y)
    np.testing.assert_array_equal(loss, want)
    # Where values are at hand there is an error.
    for use in (loss_fn, fp8.value_and_grad(loss_fn)):
        with pytest.raises(fp8.FP8StateError, match="an optimizer or an average"):
            use(tree["params"], tree["state"], X, Y)
    with pytest.raises(fp8.FP8StateError, match="saved for another tensor or quantizer"):
        fp8.check_state(tree["state"], fp8.init_state(RECIPE))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_row_that_is_not_known_starts_anew(frozen):
    """Of three rows one was saved with another margin.

    The step takes the amax of its tensor, the others remember.
    """
    other = fp8.init_state(fp8.recipes.delayed(history_length=4, margin=3)).fingerprint
    warm = STEP(W, fp8.init_state(RECIPE), 3 * X, Y)[2]
    mixed = type(warm)(**{**vars(warm), "fingerprint": warm.fingerprint.at[0].set(other[0])})
    unset = type(warm)(
        **{
            **vars(warm),
            **{
                name: getattr(warm, name).at[0].set(0)
                for name in ("scale", "amax_history", "nonfinite_steps")
            },
        }
    )
    if frozen:
        mixed, unset = fp8.freeze(mixed), fp8.freeze(unset)
    got, want = (STEP(W, state, X, Y) for state in (mixed, unset))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert float(got[0]) != float(STEP(W, warm, X, Y)[0])


def test_means_over_any_number_of_devices_keep_the_fingerprint():
    """XLA divides a sum by 7 as a product with 1/7, which misses by a unit in the last place."""
    row = np.array([row.fingerprint for row in RECIPE.rows], np.float32)
    mean = jax.jit(lambda total, devices: total * (jnp.float32(1) / devices))
    for devices in range(1, 1025):
        total = (
            functools.reduce(np.add, [row] * devices)
            if devices < 129
            else row * np.float32(devices)
        )
        assert same_fingerprint(np.asarray(mean(total, np.float32(devices))), row).all(), devices


def test_a_mean_over_seven_devices_in_every_step():
    """Each step misses by one unit more, unless the step corrects it.

    Then no row would be remembered.
    """
    mesh = jax.make_mesh(
        (7,), ("data",), devices=jax.devices()[:7], axis_types=(jax.sharding.AxisType.Auto,)
    )

    def step(state, x):
        seen = fp8.value_and_grad(
            lambda w, s, x: jnp.sum(fp8.dot(x, w, recipe=RECIPE, state=s)), reduce_axes=("data",)
        )
        return jax.lax.pmean(seen(W, state, x)[2], "data")

    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    )
    state = fp8.init_state(RECIPE)
    for i in range(1, 7):
        state = step(state, jnp.ones((7, K)) * 2.0**i)
        np.testing.assert_array_equal((state.amax_history > 0).sum(-1), min(i, 3))
    fp8.check_state(state, fp8.init_state(RECIPE))


@pytest.mark.parametrize("scale", [np.nan, -1e-8, np.inf, 2.0**127])
def test_a_scale_that_no_step_leaves_is_unset(scale):
    """An optimizer with a learning rate of 1e-8 changes no fingerprint, and makes small scales
    negative.
    """
    warm = STEP(W, fp8.init_state(RECIPE), 3 * X, Y)[2]
    bad = dataclasses.replace(warm, scale=warm.scale.at[2].set(scale))
    zeros = {
        name: getattr(warm, name).at[2].set(0)
        for name in ("scale", "amax_history", "nonfinite_steps")
    }
    got, want = (STEP(W, s, X, Y) for s in (bad, dataclasses.replace(warm, **zeros)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(fp8.FP8StateError, match=r"row \[2\] of a state"):
        loss_fn(W, bad, X, Y)


@pytest.mark.parametrize(
    ("jit", "commit"),
    [
        (True, False),
        (False, True),
        *(pytest.param(each, each, marks=pytest.mark.slow) for each in (False, True)),
    ],
)
def test_a_state_of_zeros_is_an_unset_one(jit, commit):
    """Also with `commit=False`, as microbatches are accumulated."""

    def step(state):
        *_, new = fp8.value_and_grad(loss_fn, commit=commit)(W, state, X, Y)
        return new if commit else fp8.commit(state, new)

    step = jax.jit(step) if jit else step
    fresh = fp8.init_state(RECIPE)
    got, want = (step(step(state)) for state in (jax.tree.map(jnp.zeros_like, fresh), fresh))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_row_of_another_recipe_heals_with_microbatches_too():
    other = fp8.init_state(fp8.recipes.delayed(history_length=4, margin=3)).fingerprint
    warm = STEP(W, fp8.init_state(RECIPE), 1e6 * X, Y)[2]
    bad = dataclasses.replace(warm, fingerprint=other)
    new = jax.jit(
        lambda s: fp8.commit(s, fp8.value_and_grad(loss_fn, commit=False)(W, s, X, Y)[2])
    )(bad)
    want = STEP(W, fp8.init_state(RECIPE), X, Y)[2]
    jax.tree.map(np.testing.assert_array_equal, new, want)


def test_fingerprints_differ():
    """Of every tensor, format, algorithm, margin and rounding that a recipe can name."""
    quantizers = [
        fp8.quantizers.Delayed(
            format=format, margin=margin, algorithm=algorithm, power_of_two=power_of_two
        )
        for format in (fp8.E4M3, fp8.E5M2)
        for margin in (0, 1, 2, 3)
        for algorithm in ("max", "most_recent")
        for power_of_two in (False, True)
    ]
    names = {Row(tensor, quantizer).fingerprint for tensor in "xwg" for quantizer in quantizers}
    assert len(names) == 3 * len(quantizers)
    assert all(1 <= name < 2 for name in names)


def test_fingerprints_do_not_change():
    """Files hold them. A change here makes every saved state one of another recipe."""
    assert [row.fingerprint for row in fp8.recipes.delayed().rows] == [
        1.6960906982421875,
        1.992767333984375,
        1.7618255615234375,
    ]
