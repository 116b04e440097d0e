"""Experts on the chip: the results and the state of a CPU, for any sizes, by one program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

T, E, K, N = 700, 6, 384, 256
CLOSE = 1e-3 + 2 * 2.0**-9  # float32 sums of the same payloads, and two roundings to bfloat16
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, wgrad in bf16": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
}
NAMED = {
    "chosen": {},
    "XLA": {"casts": "xla", "matmuls": "xla"},
    "Pallas": {"casts": "mosaic", "matmuls": "mosaic"},
}
SIZES = {  # all but one leave rows to no expert
    "uneven": (130, 0, 256, 1, 200, 99),
    "full": (128, 128, 128, 128, 128, 60),
    "all in one": (0, 0, 0, 650, 0, 0),
    "one row each": (1, 1, 1, 1, 1, 1),
    "none": (0, 0, 0, 0, 0, 0),
}


def arrays(sizes, seed):
    """x, w, the gradient of y, and sizes. Rows of no expert hold NaN."""
    random, filled = np.random.default_rng(seed), sum(sizes)
    x, w, g = (random.standard_normal(shape) for shape in ((T, K), (E, K, N), (T, N)))
    w *= 2.0 ** np.arange(E)[:, None, None]
    x[filled:] = g[filled:] = np.nan
    return *(each.astype(jnp.bfloat16) for each in (x, w, 1e-3 * g)), np.array(sizes, np.int32)


def step_of(recipe, kernels=None):
    def step(x, w, g, sizes, state):
        def loss(params, state):
            y = fp8.ragged_dot(*params, sizes, recipe=recipe, state=state, kernels=kernels)
            # Not `y == 0`: a sum that is 0 on one device is 1e-9 on the other.
            filled = jnp.arange(T)[:, None] < jnp.sum(sizes)
            return jnp.sum(jnp.where(filled, y * g, 0).astype(jnp.float32)), y

        (_, y), gradients, state = fp8.value_and_grad(loss, has_aux=True)((x, w), state)
        return (y, *gradients), state

    return step


def train(step, recipe, device):
    """Results and states of one step for each of the sizes. Each step has the state before."""
    state, found = jax.device_put(fp8.init_state(recipe), device), []
    for seed, sizes in enumerate(SIZES.values()):
        results, state = step(*jax.device_put(arrays(sizes, seed), device), state)
        found.append(jax.tree.map(np.asarray, (results, state)))
    return found


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_those_of_a_cpu(name, named, gpu, cpu, chip):
    recipe = RECIPES[name]
    try:
        kernels = fp8.Kernels(chip, **NAMED[named])
    except ValueError as reason:
        pytest.skip(str(reason))
    with jax.default_device(gpu):
        first = jax.device_put((*arrays(SIZES["full"], 0), fp8.init_state(recipe)), gpu)
        try:
            lowered = jax.jit(step_of(recipe, kernels)).lower(*first)
        except NotImplementedError as reason:
            pytest.skip(str(reason))
        compiled = lowered.compile(compiler_options=kernels.compiler_options(recipe))
        got, again = (train(compiled, recipe, gpu) for _ in range(2))
    with jax.default_device(cpu):
        wanted = train(jax.jit(step_of(recipe)), recipe, cpu)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    for sizes, (mine, state), (other, kept) in zip(SIZES.values(), got, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, state, kept)
        y, dx, dw = mine
        filled, empty = sum(sizes), np.array(sizes) == 0
        assert not y[filled:].any()
        assert not dx[filled:].any()
        assert not dw[empty].any()
        for array, reference in zip(mine, other, strict=True):
            array, reference = (np.asarray(each, np.float64) for each in (array, reference))
            distance = np.linalg.norm(array - reference)
            assert distance <= CLOSE * np.linalg.norm(reference), (sizes, distance)
