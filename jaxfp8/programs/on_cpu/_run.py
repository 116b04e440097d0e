"""`run_on_cpu`: runs a program for a GPU or a TPU on a CPU, to check its numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib import _hlo, _jax, xla_client  # type: ignore[attr-defined]

from jaxfp8.programs._hlo import check_compiled
from jaxfp8.programs.on_cpu._matmuls import Matmuls, Seen
from jaxfp8.programs.on_cpu._rewrite import portable_text


def run_on_cpu(
    compiled: jax.stages.Compiled | str,
    *arguments: Any,
    seen: Seen | None = None,
) -> Any:
    """Runs an optimized program of a GPU or a TPU on this machine's CPU.

    XLA's passes for a chip can change numbers. For instance, those for GPUs can drop a rounding to
    FP8. JAX can compile for a GPU or TPU that is not present. This function runs such a program, so
    that you can compare its numbers with those that the CPU computes.

    It keeps the conversions and branches that XLA made. Matmuls become sums in float32 that are
    rounded once: those of cuBLAS, cuBLASLt, cuDNN and of XLA's Triton emitter, and the convolutions
    of TPUs. Float32 operands of a convolution are rounded to bfloat16 first, as the matrix unit
    reads them at the default precision. Nothing is cached: each call rewrites and compiles.

    These properties of a chip are not imitated:

    - The order of sums.
    - The short accumulator of Hopper's fast FP8 matmuls.
    - TF32, unless the program names it as the algorithm of a matmul.
    - The passes of bfloat16 in float32 matmuls of a TPU above the default precision.
    - The approximations of transcendental functions, and of division on a TPU.
    - The fusion of a multiply with an add.
    - Subnormal float32 numbers, which TPUs flush to zero.
    - What is below the optimized program: how a chip's own instruction converts to FP8.

    Of TPU programs these cannot run, and are refused: kernels in Pallas (`tpu_custom_call`), also
    XLA's own one of `jax.lax.ragged_dot`; keys of the implementation "rbg"; float64; several
    devices.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for one GPU or TPU, or the
        program's text.
      arguments: the arrays of `f` by position, without static arguments. Keyword arguments are
        refused. For a text, the flat arrays that its program takes.
      seen: a function that is called each time a matmul runs, also in loops and branches. Its
        arguments are (label, lhs, rhs, lhs_scale, rhs_scale). The label is jax's name of the
        operation. lhs and rhs are NumPy arrays, as the matmul gets them. The scales are those that
        the matmul itself applies, or None. Scales of tiles are [.., rows, tiles]. The order of the
        calls may differ from the order of the program.

    Returns:
      The result of `f`. For a text, the list of the program's results.

    Raises:
      TypeError: if `compiled` is neither a compiled function nor a text.
      ValueError: if the program does not take these arguments. Also if it cannot run on a CPU. It
        must be for one device. It must not have kernels (Pallas, Triton), library calls other than
        matmuls, or unknown opcodes.

    Example:
      >>> import jax.numpy as jnp
      >>> program = '''
      ... HloModule doubled_sum
      ... %fused_add (p.0: f32[2], p.1: f32[2]) -> f32[2] {
      ...   %p.0 = f32[2]{0} parameter(0)
      ...   %p.1 = f32[2]{0} parameter(1)
      ...   ROOT %sum = f32[2]{0} add(%p.0, %p.1)
      ... }
      ... ENTRY %main (x: f32[2]) -> f32[2] {
      ...   %x = f32[2]{0} parameter(0)
      ...   ROOT %y = f32[2]{0} fusion(%x, %x), kind=kLoop, calls=%fused_add
      ... }'''
      >>> run_on_cpu(program, jnp.array([1.0, 2.0]))
      [Array([2., 4.], dtype=float32)]

    References:
      XLA, xla/service/gpu/gpu_compiler.cc (the passes); xla/service/simplify_fp_conversions.cc and
      xla/hlo/transforms/simplifiers/algebraic_simplifier.cc (which conversions they drop, under
      xla_allow_excess_precision).
    """
    check_compiled(compiled)
    matmuls = Matmuls(seen)
    if isinstance(compiled, str):
        return _execute(portable_text(compiled, matmuls), arguments, matmuls)
    flat = _flat_arguments(compiled, arguments)
    results = _execute(portable_text(_full_text(compiled), matmuls), flat, matmuls)
    infos = jax.tree.leaves(compiled.out_info)
    leaves = [_result(x, info.dtype) for x, info in zip(results, infos, strict=True)]
    return jax.tree.unflatten(compiled.out_tree, leaves)


# Compiles and runs the text of a portable program on this machine's CPU.
#
# References:
#     jax, jax/_src/compiler.py (backend_compile_and_load) and jax/_src/interpreters/pxla.py
#     (ExecuteReplicated).

# The compiler for CPUs must not drop roundings either. At level 0, LLVM fuses no multiply with an
# add, and compiles faster.
_OPTIONS = [("xla_allow_excess_precision", False), ("xla_backend_optimization_level", 0)]


def _execute(text: str, arguments: Sequence[Any], matmuls: Matmuls) -> list[jax.Array]:
    """Compiles and runs the text. Arguments and results are flat lists of arrays.

    ValueError if the arguments do not have the shapes and dtypes of the parameters.
    """
    device = jax.local_devices(backend="cpu")[0]
    module = _hlo.hlo_module_from_text(text)
    computation = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    parameters = computation.program_shape().parameter_shapes()
    wanted = [f"{np.dtype(p.numpy_dtype()).name}{list(p.dimensions())}" for p in parameters]
    given = [f"{np.asarray(x).dtype.name}{list(np.shape(x))}" for x in arguments]
    if given != wanted:
        raise ValueError(
            f"the program takes {len(wanted)} arrays, {', '.join(wanted)}; given are {len(given)}, "
            f"{', '.join(given)}. Pass the arrays of the program's parameters, in their order."
        )
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.env_option_overrides = _OPTIONS
    with mlir.make_ir_context():  # `compile_and_load` takes callbacks only with a parsed module
        parsed = mlir.ir.Module.parse(_jax.mlir.xla_computation_to_mlir_module(computation))
        executable = device.client.compile_and_load(
            parsed, xla_client.DeviceList((device,)), options, host_callbacks=matmuls.callbacks
        )
    try:
        results = executable.execute_sharded([jax.device_put(x, device) for x in arguments])
        arrays = [shards[0] for shards in results.disassemble_into_single_device_arrays()]
        return jax.block_until_ready(arrays)
    finally:
        if matmuls.error is not None:
            raise matmuls.error


# The arguments and results of a jax.stages.Compiled, as the flat arrays of its program.
#
# The first parameters of a program are constants that jit moved out of the function. The leaves of
# the arguments follow. Leaves that the function does not use are left out. PRNG keys are integers.
#
# References:
#     jax, jax/_src/stages.py (Compiled.call) and jax/_src/interpreters/pxla.py (MeshExecutable).


def _full_text(compiled: Any) -> str:
    """The text of the program, with the constants that `as_text()` leaves out."""
    (module,) = compiled.runtime_executable().hlo_modules()
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return module.to_string(options)


def _flat_arguments(compiled: Any, arguments: Sequence[Any]) -> list[Any]:
    """The arrays that the program takes.

    ValueError if the function was compiled for another tree, shape or dtype.
    """
    leaves, tree = jax.tree.flatten((tuple(arguments), {}))
    if tree != compiled.in_tree:
        raise ValueError(
            f"arguments are the tree {tree}, but the function was compiled for {compiled.in_tree}. "
            "Pass that tree, by position, and compile the function without keyword arguments."
        )
    infos = jax.tree.leaves(compiled.args_info)
    # Arguments that the program does not read have no sharding.
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    given = [
        _argument(position, x, info)
        for position, (x, info) in enumerate(zip(leaves, infos, strict=True))
        if shardings[position] is not None
    ]
    return [*compiled._params.const_args, *given]


def _argument(position: int, x: Any, info: Any) -> Any:
    # A Python number has no dtype, so it gets that of the parameter. All others must have it.
    is_number = isinstance(x, bool | int | float | complex)
    array = jnp.asarray(x, info.dtype if is_number else None)
    if array.dtype != info.dtype or array.shape != info.shape:
        raise ValueError(
            f"leaf {position} of the arguments is {array.dtype}{list(array.shape)}, but the "
            f"function was compiled for {info.dtype}{list(info.shape)}. Pass such an array, or "
            "compile the function for this one."
        )
    return jax.random.key_data(array) if _is_key(info.dtype) else array


def _result(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.random.wrap_key_data(x, impl=dtype._impl) if _is_key(dtype) else x


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
