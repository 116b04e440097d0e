"""Models of `_public_models.py` for the training loop of the examples, with and without FP8.

Letters in shapes: B windows of a batch, T tokens of a window.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from _public_models import TOKENS, Public
from flax import nnx
from gpt_models import Model

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION
from jaxfp8.nnx import FP8State


def converted(
    public: Public, recipe: fp8.Recipe | None, seed: int
) -> tuple[Model, fp8.conversion.Coverage | None]:
    """A model for the training loop of the examples. No recipe leaves it as it is."""
    coverage = None
    model = public.model if isinstance(public.model, nn.Module) else public.model(seed)
    if recipe:
        model, coverage = fp8.convert(
            model, recipe, inputs=example_inputs(public), layers=public.layers
        )
    count = sum(bool(row.recipe) for row in coverage.rows) if coverage else 0
    make = of_linen if isinstance(model, nn.Module) else of_nnx
    return make(public, model, seed, count), coverage


def example_inputs(public: Public) -> tuple[Any, ...]:
    """The arguments of a call, as arrays."""
    return public.arguments(jnp.ones(TOKENS.shape, TOKENS.dtype))


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


def of_linen(public: Public, model: nn.Module, seed: int, count: int) -> Model:
    """A linen model for the training loop."""
    inputs, key = example_inputs(public), jax.random.key(seed)
    # Some models have an `init` with other arguments.
    variables = jax.jit(lambda: nn.unbox(nn.Module.init(model, key, *inputs)))()

    def apply(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        variables = {"params": cast(public, params), COLLECTION: state}
        result = model.apply(variables, *public.arguments(tokens))
        return public.logits(result).astype(jnp.float32)

    return Model(variables["params"], variables.get(COLLECTION, {}), apply, count)


def of_nnx(public: Public, model: nnx.Module, seed: int, count: int) -> Model:
    """An nnx model for the training loop."""
    del seed  # it has its parameters
    graph, params, state, rest = nnx.split(model, nnx.Param, FP8State, ...)

    def apply(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, cast(public, params), state, rest)
        return public.logits(merged(*public.arguments(tokens))).astype(jnp.float32)

    return Model(params, state, apply, count)
