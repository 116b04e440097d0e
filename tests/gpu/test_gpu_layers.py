"""A dense layer on the chip.

FP8 matmuls in the compiled step, eager = jit, and the state that a CPU would keep.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

M, K, N = 256, 512, 384
STEPS = 4
# Two ways of accumulating, of which one may be Hopper's fast one, and two roundings to bfloat16.
CLOSE = 1e-2 + 2 * 2.0**-9

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "delayed, powers of two": fp8.recipes.delayed(power_of_two=True, algorithm="most_recent"),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, wgrad in bf16": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, weights 32x32": fp8.recipes.mxfp8(w_tile_dim=2),
    "static": fp8.recipes.static(x_scale=0.02, w_scale=0.02, g_scale=1e-6),
}


def arrays(seed):
    """x, w and the gradient of y, of another magnitude in each step."""
    random, magnitude = np.random.default_rng(seed), 2.0 ** (seed % 3)
    return [
        (random.standard_normal(shape) * size).astype(jnp.bfloat16)
        for shape, size in (
            ((M, K), magnitude),
            ((K, N), 0.05 * magnitude),
            ((M, N), 1e-3 * magnitude),
        )
    ]


def step_of(recipe, kernels=None):
    def loss(params, state, c):
        y = fp8.dot(*params, recipe=recipe, state=state, kernels=kernels)
        return jnp.sum((y * c).astype(jnp.float32)), y

    return lambda x, w, c, state: fp8.value_and_grad(loss, has_aux=True)((x, w), state, c)


def train(recipe, device, options, kernels=None):
    """Results and state of some compiled steps, and the program."""
    with jax.default_device(device):
        state = jax.device_put(fp8.init_state(recipe), device)
        arguments = jax.device_put(arrays(0), device)
        compiled = (
            jax.jit(step_of(recipe, kernels))
            .lower(*arguments, state)
            .compile(compiler_options=options)
        )
        for seed in range(STEPS):
            results = compiled(*jax.device_put(arrays(seed), device), state)
            state = results[2]
    return results, state, compiled


@pytest.mark.parametrize("name", RECIPES)
def test_step(name, gpu, cpu, chip):
    recipe = RECIPES[name]
    results, state, compiled = train(recipe, gpu, fp8.Kernels(chip).compiler_options(recipe))
    in_fp8 = (
        0
        if any(o.in_tiles for o in (recipe.fprop, recipe.dgrad, recipe.wgrad))
        else recipe.fp8_matmuls
    )
    fp8.programs.assert_fp8_gemms(compiled, in_fp8)
    on_cpu, cpu_state, _ = train(recipe, cpu, {})
    # Amaxes, histories and scales: what a step leaves for the next one is the same everywhere.
    assert jax.tree.structure(state) == jax.tree.structure(cpu_state)
    jax.tree.map(np.testing.assert_array_equal, state, cpu_state)
    assert_close(results, on_cpu)


@pytest.mark.parametrize(
    ("name", "matmuls"),
    [
        ("delayed", "xla"),
        ("current", "xla"),
        ("rowwise", "xla"),
        ("mxfp8", "xla"),
        ("blockwise", "mosaic"),
    ],
)
def test_step_by_kernels(name, matmuls, gpu, cpu, chip):
    """Casts of our own give the state of XLA's on a CPU."""
    if matmuls == "mosaic" and chip not in ("h100", "h200"):
        pytest.skip(f"the matmul is Hopper's, this is {chip}")
    recipe, kernels = RECIPES[name], fp8.Kernels(chip, casts="mosaic", matmuls=matmuls)
    results, state, compiled = train(recipe, gpu, kernels.compiler_options(recipe), kernels)
    assert compiled.as_text().count("mosaic_gpu") >= (6 if matmuls == "mosaic" else 3)
    on_cpu, cpu_state, _ = train(recipe, cpu, {})
    jax.tree.map(np.testing.assert_array_equal, state, cpu_state)
    assert_close(results, on_cpu)


@pytest.mark.parametrize("name", RECIPES)
def test_step_by_the_choice_for_the_chip(name, gpu, cpu, chip):
    """`fp8.Kernels(chip)` gives the state of XLA's kernels on a CPU."""
    recipe, kernels = RECIPES[name], fp8.Kernels(chip)
    results, state, compiled = train(recipe, gpu, kernels.compiler_options(recipe), kernels)
    choices = kernels.choices(recipe, (M, K, N))
    parts = (getattr(choices, part) for part in ("x", "w", "g", "fprop", "dgrad", "wgrad"))
    in_pallas = sum(part.backend == "mosaic" for part in parts)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') >= in_pallas
    on_cpu, cpu_state, _ = train(recipe, cpu, {}, kernels)
    jax.tree.map(np.testing.assert_array_equal, state, cpu_state)
    assert_close(results, on_cpu)


# eagerly each operation is a program
@pytest.mark.parametrize("name", ["delayed", "current", "blockwise", "mxfp8"])
def test_eager_is_jit(name, gpu, chip):
    recipe = RECIPES[name]
    x, w, c = jax.device_put(arrays(0), gpu)
    state = jax.device_put(fp8.init_state(recipe), gpu)
    eager = step_of(recipe)(x, w, c, state)
    jitted = jax.jit(step_of(recipe), compiler_options=fp8.Kernels(chip).compiler_options(recipe))(
        x, w, c, state
    )
    jax.tree.map(np.testing.assert_array_equal, eager[2], jitted[2])
    assert_close(eager, jitted)


def assert_close(one, other):
    """y and the gradients of x and w."""
    names = ("y", "dx", "dw")
    for name, a, b in zip(names, (one[0][1], *one[1]), (other[0][1], *other[1]), strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        assert np.linalg.norm(a - b) <= CLOSE * np.linalg.norm(b), name
