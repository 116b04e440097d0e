"""`import jaxfp8` leaves alone what only some need, and a kernel that is asked for by name brings
it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = (
    "jax.experimental.pallas",
    "jax.experimental.mosaic",
    "jax_triton",
    "triton",
    "matplotlib",
    "orbax",
    "chex",
)
QUANTIZE = (
    "fp8.quantize(jnp.ones((128, 128)), fp8.E4M3, fp8.PerBlock((1, 128)), "
    "kernels=fp8.Kernels(casts='mosaic'))"
)
CAST = (
    "fp8.quantize(jnp.ones((128, 128)), fp8.E4M3, scale=jnp.ones(()), "
    "kernels=fp8.Kernels(casts='mosaic'))"
)
MATMUL = (
    "fp8.scaled_matmul("
    "q := fp8.quantize(jnp.ones((128, 128)), fp8.E4M3), q, kernels=fp8.Kernels(matmuls='mosaic'))"
)


def loaded_after(*calls: str) -> list[list[str]]:
    """The modules that an interpreter of its own has before and after each of these calls."""
    program = f"""
import json, sys
import jax, jax.numpy as jnp
import jaxfp8 as fp8
fp8.Kernels('h200')
loaded = [[*sys.modules]]
for call in {[*calls]!r}:
    try:
        jax.eval_shape(lambda: eval(call))
    except NotImplementedError as reason:  # before jax 0.11 it cannot, but says so itself
        assert "cannot be imported" not in str(reason), reason
    loaded.append([*sys.modules])
print(json.dumps(loaded))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("quantize._mosaic", QUANTIZE),
        pytest.param("cast._mosaic", CAST, marks=pytest.mark.slow),
        pytest.param("scaled_matmul.hopper._door", MATMUL, marks=pytest.mark.slow),
    ],
)
def test_only_a_kernel_that_is_asked_for_is_loaded(operation, call):
    """Neither the import nor a chip by name loads it, or anything that only some need."""
    before, after = loaded_after(call)
    assert "jaxfp8.kernels.cast._api" in before
    assert not {*HEAVY} & {*before}
    assert f"jaxfp8.kernels.{operation}" not in before
    assert "jax.experimental.pallas.mosaic_gpu" in after
    assert f"jaxfp8.kernels.{operation}" in after
