"""Training of the models of `_public_models.py`, with and without FP8.

Letters in shapes: B examples of a batch.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _public_models import Public
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION
from jaxfp8.nnx import FP8State
from jaxfp8.programs._fp8_gemms import _find_gemms


class Model(NamedTuple):
    """A model with its variables.

    Attributes:
      params: parameters.
      state: the state of the quantizers.
      apply: (params, state, inputs) -> what the model computes.
      coverage: of the conversion, or None without one.
    """

    params: Any
    state: Any
    apply: Callable[[Any, Any, tuple[Any, ...]], Any]
    coverage: fp8.conversion.Coverage | None


class Run(NamedTuple):
    """The figures of one training run."""

    losses: np.ndarray  # f32[steps], of the training batches
    val_loss: float
    seconds: float  # of the steps


def converted(
    public: Public, recipe: fp8.Recipe | None, seed: int, kernels: fp8.Kernels | None = None
) -> Model:
    """A model to train. No recipe leaves it as it is.

    Layers that are estimated to be slower in FP8 are converted too: losses are compared here.
    """
    coverage = None
    model = public.model if isinstance(public.model, nn.Module) else public.model(seed)
    if recipe:
        model, coverage = fp8.convert(
            model, recipe, inputs=example_inputs(public), arguments=public.keywords,
            layers=public.layers, rules=public.rules, kernels=kernels,
            keep=("router", "lm_head"),
        )  # fmt: skip
    make = of_linen if isinstance(model, nn.Module) else of_nnx
    return make(public, model, seed)._replace(coverage=coverage)


def example_inputs(public: Public) -> tuple[Any, ...]:
    """The arguments of a call, as arrays."""
    task = public.task()
    return public.arguments(*task.inputs(jax.tree.map(jnp.asarray, task.validation[0])))


def cast(public: Public, params: Any) -> Any:
    """Parameters in the dtype in which the model computes, if it takes it from them."""
    return jax.tree.map(lambda leaf: leaf.astype(public.dtype), params) if public.dtype else params


def moved(params: Any) -> Any:
    """Parameters that differ by less than the rounding of bfloat16, 1 / 512 of each."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    factors = [
        1 + jax.random.uniform(key, leaf.shape, leaf.dtype, -1, 1) / 512
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, list(map(jnp.multiply, leaves, factors)))


def of_linen(public: Public, model: nn.Module, seed: int) -> Model:
    """A linen model to train."""
    inputs, key = example_inputs(public), jax.random.key(seed)
    rngs = {name: jax.random.key(1) for name in public.rngs}
    # Some models have an `init` with other arguments.
    variables = jax.jit(
        lambda: nn.unbox(nn.Module.init(model, {"params": key} | rngs, *inputs, **public.keywords))
    )()

    def apply(params: Any, state: Any, inputs: tuple[Any, ...]) -> jax.Array:
        variables = {"params": cast(public, params), COLLECTION: state}
        arguments = public.arguments(*inputs)
        return public.output(model.apply(variables, *arguments, rngs=rngs, **public.keywords))

    return Model(variables["params"], variables.get(COLLECTION, {}), apply, None)


def of_nnx(public: Public, model: nnx.Module, seed: int) -> Model:
    """An nnx model to train."""
    del seed  # it has its parameters
    graph, params, state, rest = nnx.split(model, nnx.Param, FP8State, ...)

    def apply(params: Any, state: Any, inputs: tuple[Any, ...]) -> jax.Array:
        merged = nnx.merge(graph, cast(public, params), state, rest)
        return public.output(merged(*public.arguments(*inputs), **public.keywords))

    return Model(params, state, apply, None)


class Programs(NamedTuple):
    """Compiled functions, which all seeds of a recipe share."""

    step: Any  # (params, state, opt_state, batch) -> the next three, and the loss
    validate: Any  # (params, state, batch) -> loss
    fp8_matmuls: int  # of `step`, on the chip


def compiled(
    public: Public, model: Model, tx: optax.GradientTransformation, options: dict[str, Any]
) -> Programs:
    """Compile the train step of a model. `options` are those of the compiler."""
    task = public.task()

    def loss_fn(params: Any, state: Any, batch: Any) -> jax.Array:
        return task.loss(model.apply(params, state, task.inputs(batch)), batch)

    def train_step(params: Any, state: Any, opt_state: Any, batch: Any) -> tuple[Any, ...]:
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    arguments = model.params, model.state, tx.init(model.params), task.validation[0]
    step = jax.jit(train_step, compiler_options=options).lower(*arguments).compile()
    validate = jax.jit(loss_fn, compiler_options=options)
    return Programs(step, validate, len(_find_gemms(step).fp8))


def train(
    public: Public,
    model: Model,
    programs: Programs,
    tx: optax.GradientTransformation,
    steps: int,
    seed: int,
) -> Run:
    """Train a model, and validate it at the end."""
    task, losses = public.task(), []
    params, state, opt_state = model.params, model.state, tx.init(model.params)
    start = time.perf_counter()
    for batch in task.batches(seed, steps):
        params, state, opt_state, loss = programs.step(params, state, opt_state, batch)
        losses.append(loss)
    all_losses = np.array(losses)  # waits for the last step
    seconds = time.perf_counter() - start
    val_loss = np.mean([programs.validate(params, state, batch) for batch in task.validation])
    return Run(all_losses, float(val_loss), seconds)
