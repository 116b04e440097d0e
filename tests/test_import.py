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


def loaded_after(program: str) -> list[str]:
    """The modules that an interpreter of its own has after a program."""
    program += "\nimport json, sys; print(json.dumps([*sys.modules]))"
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


@pytest.mark.parametrize("program", ["", "; jaxfp8.Kernels('h200')"], ids=["import", "kernels"])
def test_import_leaves_alone_what_only_some_need(program):
    loaded = loaded_after(f"import jaxfp8{program}")
    assert "jaxfp8.kernels.quantize._api" in loaded
    assert not {*HEAVY} & {*loaded}


@pytest.mark.parametrize(
    ("operation", "call"),
    {"quantize._mosaic": QUANTIZE, "cast._mosaic": CAST, "scaled_matmul.hopper": MATMUL}.items(),
)
def test_a_kernel_that_is_asked_for_is_loaded(operation, call):
    loaded = loaded_after(f"""
import jax, jax.numpy as jnp
import jaxfp8 as fp8
try:
    jax.eval_shape(lambda: {call})
except NotImplementedError as reason:  # before jax 0.11 it cannot, but says so itself
    assert "cannot be imported" not in str(reason), reason
""")
    assert "jax.experimental.pallas.mosaic_gpu" in loaded
    assert f"jaxfp8.kernels.{operation}" in loaded
