"""An optimizer whose parameters hold quantizer state cannot ruin the run: changed rows are unset.

Without fingerprints the optimizer trained the state too: adam's losses were 10.8, 2,327,018, 38,994,264.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8 as fp8
from jaxfp8.recipes._recipe import Row

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


def whole_tree(tx):
    """The mistake: parameters and state are one tree for optax, and the new state stands among the gradients."""
    tree = {"params": W, "state": fp8.init_state(RECIPE)}
    memory, losses = tx.init(tree), []

    @jax.jit
    def step(tree, memory):
        loss, grads, state = fp8.value_and_grad(loss_fn)(tree["params"], tree["state"], X, Y)
        updates, memory = tx.update({"params": grads, "state": state}, memory, tree)
        return optax.apply_updates(tree, updates), memory, loss

    for _ in range(STEPS):
        tree, memory, loss = step(tree, memory)
        losses.append(float(loss))
    return tree, losses


def parameters_only(tx):
    """The same descent where no step remembers anything, as rows that are unset each time."""
    params, memory, losses = W, tx.init(W), []

    @jax.jit
    def step(params, memory):
        loss, grads, _ = fp8.value_and_grad(loss_fn)(params, fp8.init_state(RECIPE), X, Y)
        updates, memory = tx.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory, loss

    for _ in range(STEPS):
        params, memory, loss = step(params, memory)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tree_that_holds_state(name, standard_promotion):
    tree, losses = whole_tree(OPTIMIZERS[name])
    np.testing.assert_allclose(losses, parameters_only(OPTIMIZERS[name]), rtol=1e-4)
    assert losses[-1] < losses[0]
    # Evaluation does not believe it either.
    loss = jax.jit(loss_fn)(tree["params"], tree["state"], X, Y)
    want = jax.jit(loss_fn)(tree["params"], fp8.init_state(RECIPE), X, Y)
    np.testing.assert_array_equal(loss, want)
    # Where values are at hand there is an error.
    for use in (loss_fn, fp8.value_and_grad(loss_fn)):
        with pytest.raises(fp8.FP8StateError, match="an optimizer changed it"):
            use(tree["params"], tree["state"], X, Y)
    with pytest.raises(fp8.FP8StateError, match="saved for another tensor or quantizer"):
        fp8.check_state(tree["state"], fp8.init_state(RECIPE))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_row_that_is_not_known_starts_anew(frozen):
    """Of three rows one was saved with another margin: the step takes the amax of its tensor, the others remember."""
    other = fp8.init_state(fp8.recipes.delayed(history_length=4, margin=3)).fingerprint
    warm = jax.jit(fp8.value_and_grad(loss_fn))(W, fp8.init_state(RECIPE), 3 * X, Y)[2]
    mixed = type(warm)(**{**vars(warm), "fingerprint": warm.fingerprint.at[0].set(other[0])})
    unset = type(warm)(**{**vars(warm), **{name: getattr(warm, name).at[0].set(0)
                                           for name in ("scale", "amax_history", "nonfinite_steps")}})  # fmt: skip
    if frozen:
        mixed, unset = fp8.freeze(mixed), fp8.freeze(unset)
    got, want = (jax.jit(fp8.value_and_grad(loss_fn))(W, state, X, Y) for state in (mixed, unset))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert float(got[0]) != float(jax.jit(fp8.value_and_grad(loss_fn))(W, warm, X, Y)[0])


@pytest.mark.parametrize("devices", range(1, 129))
def test_a_mean_of_equal_states_keeps_the_fingerprint(devices):
    """As `jax.lax.pmean` of all variables takes it, in any order of its sum."""
    for row in RECIPE.rows:
        total = functools.reduce(np.add, [np.float32(row.fingerprint)] * devices)
        assert total / np.float32(devices) == np.float32(row.fingerprint)


def test_fingerprints_differ():
    """Of every tensor, format, algorithm, margin and rounding that a recipe can name."""
    quantizers = [
        fp8.quantizers.Delayed(format=format, margin=margin, algorithm=algorithm, power_of_two=power_of_two)
        for format in (fp8.E4M3, fp8.E5M2) for margin in (0, 1, 2, 3) for algorithm in ("max", "most_recent")
        for power_of_two in (False, True)
    ]  # fmt: skip
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
