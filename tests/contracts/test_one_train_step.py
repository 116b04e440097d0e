"""The train steps of the pages, word for word: one text for every recipe and every optimizer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pages import marked

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, TrainState

# optax.adam raises a float to its int32 step count
pytestmark = pytest.mark.usefixtures("standard_promotion")
X = jax.random.normal(jax.random.key(0), (64, 16))
Y = X[:, :1] * X[:, 1:2]
STEPS = 4

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, high-precision wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "static": fp8.recipes.static(x_scale=2.0**-6, w_scale=2.0**-8, g_scale=2.0**-16),
    "identity": fp8.recipes.identity(),
}
OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=2
    ).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3),
    "clipped, decayed, averaged": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.adamw(1e-2, weight_decay=0.1)
    ),
}
FORMS = ("linen", "TrainState", "nnx")
PAIRS = [(recipe, "adam") for recipe in RECIPES]
PAIRS += [("delayed", optimizer) for optimizer in OPTIMIZERS if optimizer != "adam"] + [
    ("current", "MultiSteps")
]

# By default a recipe with state, one without and one with tiles, each in another form. The recipes
# themselves differ below the train step.
DEFAULT = {
    ("linen", "delayed", "adam"),
    ("TrainState", "current", "adam"),
    ("nnx", "blockwise", "adam"),
    ("TrainState", "delayed", "clipped, decayed, averaged"),
}
ROWS = [
    pytest.param(*row, marks=() if row in DEFAULT else pytest.mark.slow)
    for row in ((form, *pair) for form in FORMS for pair in PAIRS)
]


def texts(form):
    """The text of a page without its last line, which takes a step.

    First of linen, on which TrainState builds.
    """
    forms = ("linen", form) if form == "TrainState" else (form,)
    parts = [marked(f"train step, {form}") for form in forms]
    return ["\n".join(part.rstrip().split("\n")[:-1]) for part in parts]


class Training:
    """A model of a page with this recipe and this optimizer."""

    def __init__(self, form, recipe, tx):
        self.form = form
        self.names = {"jax": jax, "jnp": jnp, "optax": optax, "fp8": fp8, "x": X, "y": Y}
        for text in texts(form):
            changed = self.changed(text, recipe, tx)
            exec(compile(changed, f"train step, {form}", "exec"), self.names)

    def changed(self, text, recipe, tx):
        """What a user changes in the text.

        The recipe of layers, their sizes, the optimizer and the data.
        """
        changed, layers = re.subn(
            r"FP8(Dense|Linear)\((.*?)(, dtype|, rngs)", r"FP8\1(\2, recipe=recipe\3", text
        )
        changed, optimizers = re.subn(r"optax\.adam\(1e-3\)", "optimizer", changed)
        changed = re.sub(r"^x = .*$", "", changed, flags=re.MULTILINE)
        changed = re.sub(r"\b(256|64)\b", lambda size: {"256": "32", "64": "16"}[size[0]], changed)
        # eager code is a program for each operation
        changed = changed.replace("model.init(", "jax.jit(model.init)(")
        assert (layers, optimizers) in {(2, 1), (0, 0)}
        self.names |= {"recipe": recipe, "optimizer": tx}
        return changed

    def step(self, x=X):
        """One step; its loss."""
        n = self.names
        if self.form == "nnx":
            return n["nnx_step"](n["net"], n["optimizer"], x, Y)
        if self.form == "TrainState":
            n["ts"], loss = n["train_step_of_ts"](n["ts"], x, Y)
            return loss
        opt = n["opt"] if "opt" in n else n["tx"].init(n["params"])
        n["params"], n["state"], n["opt"], loss = n["train_step"](
            n["params"], n["state"], opt, x, Y
        )
        return loss

    @property
    def params(self):
        n = self.names
        if self.form == "nnx":
            return nnx.state(n["net"], nnx.Param)
        return n["ts"].params if self.form == "TrainState" else n["params"]

    @property
    def states(self):
        """The quantizer states, in a list."""
        n = self.names
        if self.form == "nnx":
            tree = nnx.state(n["net"], fp8.nnx.FP8State)
        else:
            tree = n["ts"].fp8_state if self.form == "TrainState" else n["state"]
        is_state = lambda node: isinstance(node, fp8.state.MatmulState)
        return [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]


def newest(training):
    return [np.asarray(state.amax_history[:, -1]) for state in training.states]


averaged = jax.jit(optax.incremental_update)


def copied(tree):
    return jax.tree.map(np.array, tree)


def same(first, second):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


@pytest.mark.quick
@pytest.mark.parametrize(("form", "recipe", "optimizer"), ROWS)
def test_one_text_trains_with_every_recipe(form, recipe, optimizer):
    training = Training(form, RECIPES[recipe], OPTIMIZERS[optimizer]())
    structure = jax.tree.structure(training.params)
    average = copied(training.params)  # EMA of the parameters: they hold no quantizer state
    losses = []
    for _ in range(STEPS):
        losses.append(float(training.step()))
        average = averaged(training.params, average, 0.5)
    assert losses[-1] < losses[0], losses
    assert jax.tree.structure(training.params) == structure == jax.tree.structure(average)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(average))
    assert len(training.states) == (2 if RECIPES[recipe].rows else 0)
    assert all((amaxes > 0).all() for amaxes in newest(training))


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.slow)])
def test_train_state_takes_the_same_steps(recipe):
    """`TrainState` and plain optax give the same losses, parameters and states, bit for bit."""
    plain, held = (
        Training(form, RECIPES[recipe], OPTIMIZERS["adam"]()) for form in ("linen", "TrainState")
    )
    for _ in range(STEPS):
        assert plain.step() == held.step()
    assert same(plain.params, held.params)
    assert same(plain.states, held.states)


@pytest.mark.parametrize(
    "form", [pytest.param("linen", marks=pytest.mark.slow), "TrainState", "nnx"]
)
def test_multi_steps_commits_every_microbatch(form):
    training = Training(form, RECIPES["delayed"], OPTIMIZERS["MultiSteps"]())
    before = copied(training.params)
    training.step()
    assert same(training.params, before)  # the optimizer waits for the second microbatch
    first = newest(training)
    training.step(2 * X)
    assert not same(training.params, before)
    assert newest(training)[0][0] == 2 * first[0][0]  # the amax of x


@pytest.mark.parametrize(
    "form", ["linen", pytest.param("TrainState", marks=pytest.mark.slow), "nnx"]
)
def test_a_step_that_is_not_finite_changes_no_parameter(form):
    training = Training(form, RECIPES["delayed"], OPTIMIZERS["apply_if_finite"]())
    training.step()
    before, states = copied(training.params), copied(training.states)
    assert not np.isfinite(training.step(X.at[0, 0].set(np.inf)))
    assert same(training.params, before)
    assert training.states[0].nonfinite_steps[0] == 1 + states[0].nonfinite_steps[0]
    assert np.isfinite(training.step())
    assert not same(training.params, before)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.slow)])
def test_an_average_of_parameters_is_evaluated_with_the_state_of_the_run(recipe):
    training = Training("TrainState", RECIPES[recipe], OPTIMIZERS["adam"]())
    average = training.params
    for _ in range(STEPS):
        training.step()
        average = averaged(training.params, average, 0.1)
    ts = training.names["ts"]
    evaluate = jax.jit(training.names["loss_fn"])
    evaluated, last = (
        float(evaluate(params, ts.fp8_state, X, Y)) for params in (average, ts.params)
    )
    assert np.isfinite(evaluated)
    assert evaluated != last
    assert set(ts.params) & {COLLECTION} == set()


def test_train_state_with_fields_of_a_subclass():
    """As flax's documentation extends its class, with and without defaults."""

    class Extended(TrainState):
        batch_stats: dict
        epoch: int = 0

    training = Training("TrainState", RECIPES["delayed"], OPTIMIZERS["adam"]())
    ts = training.names["ts"]
    fields = {"apply_fn": ts.apply_fn, "params": ts.params, "fp8_state": ts.fp8_state, "tx": ts.tx}

    @jax.jit
    def after_a_step():
        extended = Extended.create(batch_stats={"mean": 1.0}, **fields)
        grads = jax.tree.map(jnp.ones_like, ts.params)
        return extended.apply_gradients(
            grads=grads, fp8_state=extended.fp8_state, batch_stats={"mean": 2.0}
        )

    extended = after_a_step()
    assert (extended.batch_stats["mean"], extended.epoch, extended.step) == (2.0, 0, 1)
