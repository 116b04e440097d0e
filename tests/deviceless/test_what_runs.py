"""What `fp8.Kernels(chip)` runs: recipe x chip x the way to call a matmul.

Each row is a training step that is compiled for the chip. The same program text then runs on the
CPU, with the FP8 payloads of XLA's backends.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from targets import in_its_process
from what_runs import DOORS, MESHES, K, M, N, dot, on_a_mesh, on_one_device

import jaxfp8 as fp8

pytestmark = [pytest.mark.deviceless, needs_mosaic]

PER_TENSOR = {"cuBLASLt, FP8": 3}
IN_BFLOAT16 = {"bfloat16": 3}
OF_HOPPER = {"cast in Pallas": 3, "matmul in Pallas": 3}
# Tiles of 32 take its matmul more time for scales than for products.
TILES_OF_32 = {"cast in Pallas": 3, "bfloat16": 3}
OF_BLACKWELL = {"cast in Pallas": 3, "cuDNN, block-scaled": 3}
RUNS = {
    ("delayed", "h200"): PER_TENSOR,
    ("current", "h200"): PER_TENSOR,
    ("rowwise", "h200"): PER_TENSOR,
    ("blockwise", "h200"): OF_HOPPER,
    ("mxfp8", "h200"): TILES_OF_32,
    ("delayed", "b200"): PER_TENSOR,
    ("current", "b200"): PER_TENSOR,
    ("rowwise", "b200"): PER_TENSOR,
    ("blockwise", "b200"): OF_BLACKWELL,
    ("mxfp8", "b200"): OF_BLACKWELL,
    ("delayed", "a100"): IN_BFLOAT16,
    ("blockwise", "a100"): IN_BFLOAT16,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("name", "chip"), RUNS)
def test_on_one_device(name, chip, door):
    assert in_its_process(chip, on_one_device, name, chip, door) == RUNS[name, chip]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(("name", "chip"), [row for row in RUNS if row[1] != "a100"])
def test_on_a_mesh(name, chip, kind):
    assert in_its_process(chip, on_a_mesh, name, chip, kind) == RUNS[name, chip]


@pytest.mark.parametrize(("name", "chip"), RUNS)
def test_the_table_says_so(name, chip):
    """`choices` names the backends that the compiled programs have."""
    choices = fp8.Kernels(chip).choices(fp8.recipes.get(name), (M, K, N))
    found = collections.Counter(
        getattr(choices, part).backend for part in ("x", "w", "g", "fprop", "dgrad", "wgrad")
    )
    runs = RUNS[name, chip]
    assert found["cudnn"] == runs.get("cuDNN, block-scaled", 0)
    assert found["mosaic"] == runs.get("cast in Pallas", 0) + runs.get("matmul in Pallas", 0)


@pytest.mark.parametrize(("name", "chip"), [row for row in RUNS if "Pallas" in str(RUNS[row])])
def test_the_same_text_on_the_cpu(name, chip):
    """It runs XLA's backends: values and scales to the bit, and so results."""
    recipe, state = fp8.recipes.get(name), fp8.init_state(fp8.recipes.get(name))
    random = np.random.default_rng(0)
    x, w, c = (
        jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
        for shape in ((1024, 512), (512, 256), (1024, 256))
    )
    kernels = fp8.Kernels(chip)
    assert "mosaic" in kernels.backends(recipe, (1024, 512, 256)).x
    run = jax.jit(functools.partial(dot, recipe, kernels))
    assert "mosaic_gpu" not in run.lower(x, w, c, state).compile().as_text()
    theirs = jax.jit(functools.partial(dot, recipe, None))(x, w, c, state)
    jax.tree.map(
        lambda mine, theirs: np.testing.assert_array_equal(
            np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        ),
        run(x, w, c, state),
        theirs,
    )
