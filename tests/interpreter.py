"""Running a Mosaic GPU kernel without a GPU: Pallas interprets it, and looks for races between threads and TMA."""

import inspect

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

LOADS_TRANSPOSED = "idx" not in inspect.signature(plgpu.load).parameters  # jax 0.11 and later
needs_mosaic = pytest.mark.skipif(not LOADS_TRANSPOSED, reason="the kernels need jax 0.11")


def interpreted(function, *arguments):
    """What the function gives, its kernels interpreted; fails on a race."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.gpu_callbacks.reset_gpu_interpret_mode_state()  # also after a test that failed
    # Fewer processors than tiles, so that each takes several.
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=2)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), plgpu.force_gpu_interpret_mode(parameters):
        results = jax.block_until_ready(function(*arguments))
    assert not interpret_pallas_call.get_races().races_found
    return results
