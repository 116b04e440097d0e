"""Compiles and runs the text of a portable program on this machine's CPU.

References:
  jax, jax/_src/compiler.py (backend_compile_and_load) and jax/_src/interpreters/pxla.py
  (ExecuteReplicated).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters.mlir import make_ir_context
from jaxlib import _hlo, _jax, xla_client  # type: ignore[attr-defined]
from jaxlib.mlir import ir

from jaxfp8.programs._taps import Taps

# The compiler for CPUs must not drop roundings either. At level 0, LLVM fuses no multiply with an
# add, and compiles faster.
_OPTIONS = [("xla_allow_excess_precision", False), ("xla_backend_optimization_level", 0)]


def execute(text: str, arguments: Sequence[Any], taps: Taps) -> list[jax.Array]:
    """Compiles and runs the text. Arguments and results are flat lists of arrays.

    Raises:
      ValueError: if the shapes or dtypes of the arguments are not those of the parameters.
    """
    device = jax.local_devices(backend="cpu")[0]
    module = _hlo.hlo_module_from_text(text)
    computation = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    _check(computation.program_shape().parameter_shapes(), arguments)
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.env_option_overrides = _OPTIONS
    with make_ir_context():  # `compile_and_load` takes callbacks only with a parsed module
        mlir = ir.Module.parse(_jax.mlir.xla_computation_to_mlir_module(computation))
        executable = device.client.compile_and_load(
            mlir, xla_client.DeviceList((device,)), options, host_callbacks=taps.callbacks
        )
    try:
        results = executable.execute_sharded([jax.device_put(x, device) for x in arguments])
        arrays = [shards[0] for shards in results.disassemble_into_single_device_arrays()]
        return jax.block_until_ready(arrays)
    finally:
        # The error of the user's `seen` replaces the one that XLA raises for a failed callback.
        if taps.error is not None:
            raise taps.error


def _check(parameters: Sequence[Any], arguments: Sequence[Any]) -> None:
    wanted = [f"{np.dtype(p.numpy_dtype()).name}{list(p.dimensions())}" for p in parameters]
    given = [f"{np.asarray(x).dtype.name}{list(np.shape(x))}" for x in arguments]
    if given != wanted:
        raise ValueError(
            f"the program takes {len(wanted)} arrays, {', '.join(wanted)}; given are {len(given)}, "
            f"{', '.join(given)}. Pass the arrays of the program's parameters, in their order."
        )
