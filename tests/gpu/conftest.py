"""What runs on a GPU only: `JAX_PLATFORMS=cuda python -m pytest -m gpu tests/gpu`.

Without a GPU these tests are skipped. If JAX_PLATFORMS asks for a GPU and there is none, they fail.
A test that runs on a CPU beside it takes the fixture `cpu`.
"""

import os

import jax
import pytest

ASKED_FOR = "cuda" in os.environ["JAX_PLATFORMS"] or "gpu" in os.environ["JAX_PLATFORMS"]
# JAX has made no device yet. Arrays go to the first platform, so the GPU is named first.
if ASKED_FOR:
    jax.config.update("jax_platforms", "cuda,cpu")

CHIPS = ("h100", "h200", "b200", "l40s", "l4")
"""Those with FP8 units, whose name stands in the device's."""


@pytest.fixture(scope="session")
def gpu():
    """The first GPU."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        if ASKED_FOR:
            pytest.fail(
                f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} asks for a GPU, but there is none: "
                f"{error}"
            )
        pytest.skip("needs a GPU: JAX_PLATFORMS=cuda python -m pytest -m gpu tests/gpu")


@pytest.fixture(scope="session")
def cpu():
    return jax.devices("cpu")[0]


@pytest.fixture(scope="session")
def chip(gpu):
    """Its name, as `fp8.Kernels` takes it."""
    words = gpu.device_kind.lower().split()
    known = [name for name in CHIPS if any(word.startswith(name) for word in words)]
    if not known:
        pytest.skip(f"{gpu.device_kind} is none of {CHIPS}")
    return max(known, key=len)
