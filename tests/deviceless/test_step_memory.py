"""A train step in FP8 needs less memory than the bfloat16 step that saves the same.

The figures: benchmarks/programs/step_memory.py.
"""

import functools

import jax
import jax.numpy as jnp
import llama
import memory_policies as memory
import numpy as np
import pytest
import transformer
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh
from targets import state_of, topology

import jaxfp8 as fp8

# Optax and `jax.nn` promote dtypes and ranks.
pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]

# The largest ratios of temporaries to those of bf16. Where both programs keep the same large
# arrays, little is left to save: results of matmuls, and gradients of all weights.
SCALARS_AND_ROWS = ("delayed", "current", "rowwise")
TILES = ("blockwise", "mxfp8")
MOST = {
    ("llama", (*SCALARS_AND_ROWS, *TILES)): {
        "none": {8: 0.79, 64: 0.80, 512: 0.85},
        "products": {8: 0.87, 64: 0.94, 512: 0.99},
        "inputs": {8: 0.72, 64: 0.67, 512: 0.70},
    },
    ("transformer", SCALARS_AND_ROWS): {
        "none": {1: 0.96, 8: 0.87},
        "products": {1: 0.995, 8: 0.985},
        "inputs": {1: 0.82, 8: 0.71},
    },
    # XLA multiplies tiles in bfloat16 on an H200. With nothing or products saved, the copies of
    # operands in bfloat16 cost what FP8 saves, so these ratios are up to 1.04.
    ("transformer", TILES): {"inputs": {1: 0.83, 8: 0.73}},
    ("transformer", ("blockwise, kernels",)): {
        "none": {1: 0.97, 8: 0.91},
        "products": {1: 0.97, 8: 0.95},
        "inputs": {1: 0.82, 8: 0.71},
    },
    ("transformer", ("mxfp8, B200",)): {
        "none": {1: 0.99, 8: 0.97},
        "products": {1: 0.995, 8: 0.985},
        "inputs": {1: 0.84, 8: 0.73},
    },
}
CHEAP = {("llama", "current", 8, "inputs"), ("transformer", "current", 1, "none")}


def cells():
    for (model, names), of_policy in MOST.items():
        for policy, of_gpus in of_policy.items():
            for gpus, bound in of_gpus.items():
                for name in names:
                    cell = (model, name, gpus, policy)
                    marks = [] if cell in CHEAP else [pytest.mark.slow]
                    marks += [needs_mosaic] if name.endswith("kernels") else []
                    yield pytest.param(*cell, bound, id="-".join(map(str, cell)), marks=marks)


@functools.cache
def temporaries(model, name, gpus, policy):
    """The bytes of temporaries. Raises AssertionError if a gather of a block is not in FP8."""
    step = memory.MODELS[model].compile(name, gpus, policy)
    memory.check_gathers(model, name, gpus, memory.gathered(model, step, gpus))
    return step.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("model", "name", "gpus", "policy", "bound"), [*cells()])
def test_temporaries(model, name, gpus, policy, bound):
    in_bf16 = temporaries(model, memory.baseline(name), gpus, policy)
    assert temporaries(model, name, gpus, policy) <= bound * in_bf16


def saved(recipe, policy, kernels=None):
    """Bytes that a block of transformer.py saves for its backward pass, without its arguments."""

    def residuals(h, weights, state):
        def of_two(h, weights):
            return transformer.block(recipe, h, weights, state, how="xla", kernels=kernels)

        return jax.tree.leaves(jax.vjp(jax.checkpoint(of_two, policy=policy), h, weights)[1])

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = {name: array(*shape) for name, (shape, _) in transformer.WEIGHTS.items()}
    weights |= {name: array(transformer.D) for name in transformer.NORMS}
    # Without `fp8.value_and_grad` only a frozen state is accepted. Its scales are the same.
    state = fp8.freeze(dict.fromkeys(transformer.WEIGHTS, state_of(recipe)))
    mesh = Mesh(np.array(topology("h200").devices), ("d",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        h = array(transformer.B, transformer.T, transformer.D)
        jaxpr = jax.make_jaxpr(residuals)(h, weights, state).jaxpr
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    made = [v.aval for v in jaxpr.outvars if v not in arguments]
    return sum(aval.size * aval.dtype.itemsize for aval in made)


@pytest.mark.parametrize("casts", ["xla", pytest.param("mosaic", marks=needs_mosaic)])
@pytest.mark.parametrize("name", [*SCALARS_AND_ROWS, *TILES])
def test_saved_residuals_of_linear_layers(name, casts):
    """Of the copies of x only the one that wgrad reads, also if fprop runs again."""
    values = transformer.B * transformer.T * sum(k for (k, _), _ in transformer.WEIGHTS.values())
    in_bf16 = saved(llama.RECIPES["bf16"], llama.KEEP_INPUTS)
    assert in_bf16 == 2 * values
    kernels = fp8.Kernels("h200", casts=casts)
    assert saved(llama.RECIPES[name], fp8.save_fp8_residuals(), kernels) <= 0.52 * in_bf16
