"""A layer of experts for an H200, forward and backward, and the layer of one expert alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from program import Program
from targets import array, compile_for
from work import Work, work_of

import jaxfp8 as fp8

TILE = 128  # rows of a tile of Hopper's kernel


def step(function, **options):
    """y, dx and dw of a matmul, from x, w, the gradient of y, and sizes."""

    def forward_and_backward(x, w, g, *sizes):
        y, pull = jax.vjp(lambda x, w: function(x, w, *sizes, **options), x, w)
        return y, *pull(g)

    return forward_and_backward


@functools.cache
def grouped(name, experts, average, k, n, kernels):
    """The program of all experts."""
    recipe = fp8.recipes.get(name)
    run = step(fp8.ragged_dot, recipe=recipe, kernels=kernels)
    rows, sizes = experts * average, jax.ShapeDtypeStruct((experts,), jnp.int32)
    compiled = compile_for(
        kernels.chip, run, array(rows, k), array(experts, k, n), array(rows, n), sizes,
        options=kernels.compiler_options(recipe),
    )  # fmt: skip
    return Program(compiled.as_text())


@functools.cache
def alone(name, average, k, n, kernels):
    """The program of one expert of average size, by `fp8.dot`."""
    recipe = fp8.recipes.get(name)
    compiled = compile_for(
        kernels.chip, step(fp8.dot, recipe=recipe, kernels=kernels), array(average, k),
        array(k, n), array(average, n), options=kernels.compiler_options(recipe),
    )  # fmt: skip
    return Program(compiled.as_text())


def in_pallas(program):
    """How many kernels in Pallas a program has. XLA may wrap one, if a slice is its operand."""
    return sum(
        "mosaic_gpu" in each.attributes
        for computation in program.computations.values()
        for each in computation.values()
    )


def work_of_experts(name, experts, average, k, n, kernels):
    """Operations and bytes of all experts, over the sum of those of each expert alone.

    Kernels in Pallas do the operations of the tiles that sizes need: here half a tile for each
    expert more than its rows.
    """
    program = grouped(name, experts, average, k, n, kernels)
    found = work_of(program)
    if in_pallas(program):
        assert not found.flops, "XLA multiplies, too"
        found = Work(6.0 * (experts * average + experts * TILE / 2) * k * n, found.bytes)
    wanted = 6.0 * experts * average * k * n
    one = work_of(alone(name, average, k, n, kernels))
    return Work(found.flops / wanted, found.bytes / (experts * one.bytes))


def worst_rows(experts, average):
    """The most rows of tiles that any sizes need, over the rows."""
    tokens = experts * average
    return ((tokens - experts) // TILE + experts) * TILE / tokens


def uneven_rows(experts, average, seed=0):
    """The rows of tiles that uneven sizes need, over the rows."""
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(experts * average, rng.dirichlet(np.ones(experts)))
    return float((-(-sizes // TILE) * TILE).sum() / sizes.sum())
