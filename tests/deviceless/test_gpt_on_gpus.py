"""Twenty steps of a small GPT.

The losses of an H200's program stay near the CPU's in FP8, away from those without FP8.
"""

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from targets import compile_for

import jaxfp8 as fp8
from jaxfp8.programs import run_on_cpu

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]

STEPS, BATCH = 20, 8
EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name):
    """A module of the examples that imports none of the others."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses look there
    spec.loader.exec_module(loaded)
    return loaded


models, text = (
    functools.cache(functools.partial(module, name)) for name in ("gpt_models", "gpt_text")
)


@functools.cache
def windows():
    train, context = text().load_text(None).train, text().CONTEXT
    starts = np.random.default_rng(0).integers(0, len(train) - context, (STEPS, BATCH))
    return jnp.asarray(train[starts[..., None] + np.arange(context + 1)], jnp.int32)


def training(recipe):
    """The losses of all steps, as one function, and the parameters that it starts from.

    The example's model, in float32 but for its FP8: in bfloat16 its losses move with the order of
    sums.
    """
    model, optimizer = (
        models().linen_gpt(recipe, 0, models().Size(dtype=jnp.float32)),
        optax.adamw(1e-3),
    )

    def loss(params, windows):
        logits = model.apply(params, {}, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def step(carry, windows):
        params, moments = carry
        value, grads = jax.value_and_grad(loss)(params, windows)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    def train(params, windows):
        return jax.lax.scan(step, (params, optimizer.init(params)), windows)[1]

    return train, model.params


@functools.cache
def losses(recipe):
    train, params = training(recipe)
    return np.asarray(jax.jit(train)(params, windows()))


def losses_of_h200(recipe):
    train, params = training(recipe)
    return np.asarray(run_on_cpu(compile_for("h200", train, params, windows()), params, windows()))


@pytest.mark.parametrize("name", ["blockwise", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_losses(name):
    recipe, distance = fp8.recipes.get(name), lambda a, b: np.abs(a - b).mean()
    h200, cpu, identity = losses_of_h200(recipe), losses(recipe), losses(fp8.recipes.identity())
    away = distance(cpu, identity)
    assert away > 1e-3  # nats
    assert distance(h200, cpu) < 0.4 * away
    assert distance(h200, identity) > 0.6 * away
