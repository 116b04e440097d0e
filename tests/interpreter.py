"""Running a Mosaic GPU kernel without a GPU.

Pallas interprets it, and looks for races between threads and TMA.
"""

from unittest import mock

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxfp8.kernels import _dispatch, _on_mesh

LOADS_TRANSPOSED = jax.__version_info__ >= (0, 11)
needs_mosaic = pytest.mark.skipif(not LOADS_TRANSPOSED, reason="the kernels need jax 0.11")


class _OnOneDevice:
    """In place of `custom_partitioning`, inside of which the interpreter's ordered callbacks cannot
    be.
    """

    def __init__(self, function):
        self.function = function

    def def_partition(self, *arguments, **options):
        pass

    def __call__(self, *arguments):
        return self.function(*arguments)


def _as_on_cuda(*arrays, cuda, default):
    """In place of `lax.platform_dependent`: a CPU takes the branch of a GPU."""
    del default
    return cuda(*arrays)


def interpreted(function, *arguments):
    """What the function gives, its kernels interpreted; fails on a race, or if there is no kernel.

    The mesh is part of what JAX keeps a trace for. So none is taken from outside, where a CPU's
    program has XLA in place of the kernels.
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    # A test may have changed a function of the kernel, for instance to plant a fault.
    _dispatch.traced_once.clear_cache()
    # also after a test that failed
    interpret_pallas_call.gpu_callbacks.reset_gpu_interpret_mode_state()
    # Fewer processors than tiles, so that each takes several.
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=2)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with (
        use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
        plgpu.force_gpu_interpret_mode(parameters),
        mock.patch.object(_dispatch, "platform_dependent", _as_on_cuda),
        mock.patch.object(_on_mesh, "custom_partitioning", _OnOneDevice),
    ):
        results = jax.block_until_ready(function(*arguments))
    # It is made by the first kernel that runs.
    assert interpret_pallas_call.gpu_callbacks._races is not None, "no kernel was interpreted"
    assert not interpret_pallas_call.get_races().races_found
    return results
