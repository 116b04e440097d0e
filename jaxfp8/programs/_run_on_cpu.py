"""`run_on_cpu`: runs a program that was compiled for a GPU on a CPU, to check its numbers."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters.mlir import make_ir_context
from jaxlib import _hlo, _jax, xla_client  # type: ignore[attr-defined]
from jaxlib.mlir import ir

from jaxfp8.programs._hlo import (
    BRANCHES,
    CALLS,
    Array,
    Instruction,
    Program,
    format_array_type,
    read_array_type,
    read_program,
    split_at_commas,
    strip_layouts,
)
from jaxfp8.programs._library_calls import write_block_scaled_dot, write_cublas_matmul, write_dot
from jaxfp8.programs._writer import MAXIMUM, MAXIMUM_TEXT, Seen, Taps, Writer

# Compiles and runs the text of a portable program on this machine's CPU.
#
# References:
#     jax, jax/_src/compiler.py (backend_compile_and_load) and jax/_src/interpreters/pxla.py
#     (ExecuteReplicated).

# The compiler for CPUs must not drop roundings either. At level 0, LLVM fuses no multiply with an
# add, and compiles faster.
_OPTIONS = [("xla_allow_excess_precision", False), ("xla_backend_optimization_level", 0)]


def _execute(text: str, arguments: Sequence[Any], taps: Taps) -> list[jax.Array]:
    """Compiles and runs the text. Arguments and results are flat lists of arrays.

    ValueError if the arguments do not have the shapes and dtypes of the parameters.
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


# The text of an optimized GPU program, rewritten into HLO that every backend of XLA accepts.
#
# Layouts are removed. Without them HLO means the same, except for `bitcast`, which becomes other
# operations. Fusions become calls. Calls of NVIDIA's libraries become HLO. Matmuls sum in float32.
# Every other operation and conversion does not change.
#
# References:
#     XLA, xla/hlo/ir/hlo_opcode.h (all opcodes) and xla/hlo/parser/hlo_parser.cc (what the text
#     says).

# The opcodes that mean the same on every backend. These instructions are copied.
_PORTABLE = re.compile(
    "abs|acos|acosh|add|after-all|and|asin|asinh|atan2|atanh|bitcast-convert|broadcast|call|cbrt|"
    "ceil|clamp|compare|complex|concatenate|conditional|constant|convert|copy|cosh|cosine|"
    "count-leading-zeros|divide|dynamic-slice|dynamic-update-slice|erf|exponential|"
    "exponential-minus-one|fft|floor|gather|get-dimension-size|get-tuple-element|imag|iota|"
    "is-finite|log|log-plus-one|logistic|map|maximum|minimum|multiply|negate|not|opt-barrier|or|"
    "pad|parameter|popcnt|power|real|reduce|reduce-precision|reduce-window|remainder|reshape|"
    "reverse|rng-bit-generator|round-nearest-afz|round-nearest-even|rsqrt|scatter|select|"
    "select-and-scatter|shift-left|shift-right-arithmetic|shift-right-logical|sign|sine|sinh|"
    "slice|sort|sqrt|stochastic-convert|subtract|tan|tanh|transpose|tuple|while|xor"
)

_COLLECTIVE = re.compile(
    "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|partition-id|"
    "ragged-all-to-all|reduce-scatter|replica-id|send|recv"
)

# Attributes that do not change the result.
_DROPPED = re.compile(
    "metadata|backend_config|frontend_attributes|sharding|control-predecessors|origin|"
    "original_value|statistics|async_execution_thread|result_accuracy|parameter_replication"
)

_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")


def _portable_text(text: str, taps: Taps) -> str:
    """Rewrites the text of a program for one GPU.

    ValueError if one CPU cannot run the program. Causes are several devices, kernels, unknown
    library calls or opcodes, and constants without their values.
    """
    program = read_program(text)
    _check_one_device(program)
    _check_parameters(program)
    written = {name: _computation(program, name, taps) for name in _reachable(program)}
    # In the order of the text, in which a computation comes before its callers.
    bodies = [written[name] for name in program.computations if name in written]
    if any(f"%{MAXIMUM}" in body for body in bodies):
        bodies.insert(0, MAXIMUM_TEXT)
    return "\n\n".join(["HloModule rewritten", *bodies]) + "\n"


def _check_one_device(program: Program) -> None:
    if program.replicas * program.partitions != 1:
        raise ValueError(
            f"cannot run on a CPU: the program has {program.partitions} partitions and "
            f"{program.replicas} replicas, but only programs for one device can run. Compile the "
            "function for one device."
        )


def _check_parameters(program: Program) -> None:
    for instruction in program.computations[program.entry].values():
        if instruction.opcode == "parameter" and instruction.type.startswith("("):
            raise ValueError(
                f"cannot run on a CPU: the parameter {instruction.name} is a tuple, "
                f"{instruction.type}. Pass a program whose parameters are arrays, as in jax's."
            )


def _reachable(program: Program) -> set[str]:
    found, waiting = set(), [program.entry]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        found.add(name)
        for instruction in program.computations[name].values():
            waiting += instruction.computations("condition", "body", *BRANCHES, *CALLS)
    return found


def _computation(program: Program, name: str, taps: Taps) -> str:
    source = program.computations[name]
    writer = Writer(name, name == program.entry, source)
    for instruction in source.values():
        # An asynchronous operation is written in the place of its `-done`, where its result exists.
        if not instruction.opcode.endswith(("-start", "-update")):
            _write(writer, taps, _started(source, instruction))
    # If no instruction is marked ROOT, the last one is the result.
    marked = (i.name for i in source.values() if i.is_root)
    writer.root(next(marked, list(source)[-1]))
    return writer.text


def _started(source: dict[str, Instruction], instruction: Instruction) -> Instruction:
    """The complete operation that a `-done` instruction ends."""
    if not instruction.opcode.endswith("-done"):
        return instruction
    start = instruction
    while not start.opcode.endswith("-start"):
        start = source[start.operands[0]]
    opcode = start.opcode.removesuffix("-start")
    return start._replace(
        name=instruction.name,
        type=instruction.type,
        opcode="fusion" if opcode == "async" else opcode,
        is_root=instruction.is_root,
    )


def _write(writer: Writer, taps: Taps, instruction: Instruction) -> None:
    """Writes instructions that compute the same as `instruction`. The last one has its name."""
    name, opcode = instruction.name, instruction.opcode
    if opcode == "dot":
        write_dot(writer, taps, instruction)
    elif opcode == "bitcast":
        source, result = (
            writer.source_type(instruction.operands[0]),
            read_array_type(instruction.type),
        )
        x = _write_bitcast(writer, instruction.operands[0], source, result)
        writer.emit(result.text, "copy", x, name=name)
    elif opcode == "fusion":
        called = instruction.computations("calls")[0]
        writer.emit(
            strip_layouts(instruction.type),
            "call",
            *instruction.operands,
            name=name,
            also=[f"to_apply=%{called}"],
        )
    elif opcode == "custom-call":
        _custom_call(writer, taps, instruction)
    elif _PORTABLE.fullmatch(opcode):
        _copied(writer, instruction)
    else:
        raise ValueError(_unknown(instruction))


def _custom_call(writer: Writer, taps: Taps, instruction: Instruction) -> None:
    target = instruction.call_target
    if target in _CUBLAS:
        write_cublas_matmul(writer, taps, instruction)
    elif target == "__cudnn$blockScaledDot":
        write_block_scaled_dot(writer, taps, instruction)
    else:
        raise ValueError(
            f"cannot run on a CPU: {instruction.name} calls {target}, which is code for a GPU. "
            f"Only the matmuls {', '.join(_CUBLAS)} and __cudnn$blockScaledDot can run. Compile "
            "the function without it, for instance with XLA's kernels in place of Pallas's or "
            "Triton's."
        )


def _copied(writer: Writer, instruction: Instruction) -> None:
    inside = instruction.inside if instruction.opcode in ("constant", "parameter") else None
    if instruction.opcode == "constant" and "{...}" in instruction.inside:
        raise ValueError(
            "cannot run on a CPU: the text leaves out the value of the constant "
            f"{instruction.name}. Pass the compiled program itself, or a text with "
            "print_large_constants."
        )
    writer.emit(
        strip_layouts(instruction.type),
        instruction.opcode,
        *instruction.operands,
        inside=inside,
        name=instruction.name,
        also=_attributes(instruction),
    )


def _attributes(instruction: Instruction) -> Iterator[str]:
    for attribute in split_at_commas(instruction.attributes.lstrip(", ")):
        if not _DROPPED.fullmatch(attribute.partition("=")[0]):
            yield attribute


def _unknown(instruction: Instruction) -> str:
    name, opcode = instruction.name, instruction.opcode
    if _COLLECTIVE.match(opcode):
        return (
            f"cannot run on a CPU: {name} is {opcode}, but only programs for one device can run. "
            "Compile the function for one device, without a mesh."
        )
    return (
        f"cannot run on a CPU: {name} has the opcode {opcode}, which is unknown here. Compile the "
        "function without the operation that it comes from."
    )


# A bitcast without layouts: the same bytes in memory, read as another type.
#
# `bitcast` is the only instruction whose meaning depends on layouts. The rewritten program has no
# layouts. So an array is transposed to its order in memory, reinterpreted, and transposed to the
# order of the result.
#
# References:
#     XLA, xla/hlo/ir/hlo_opcode.h (kBitcast) and xla/shape_util.cc (ShapeUtil::DecomposeBitcast).


def _write_bitcast(writer: Writer, x: str, source: Array, result: Array) -> str:
    """`x` of type `source`, read as `result`.

    ValueError if the sizes differ, or if elements change their type and are not whole bytes.
    """
    if source.size * source.bits != result.size * result.bits:
        raise ValueError(
            f"cannot run on a CPU: a bitcast of {source} to {result} changes the number of bytes. "
            "Pass the text as XLA prints it."
        )
    if source.dtype != result.dtype and (source.bits % 8 or result.bits % 8):
        raise ValueError(
            f"cannot run on a CPU: a bitcast of {source.dtype} to {result.dtype} reads elements "
            "that are no whole bytes. Compile a program without packed elements."
        )
    x = writer.transpose(x, source.order)
    if source.bits == result.bits:
        x = _same_width(writer, x, result.dtype)
    else:
        x = _other_width(writer, writer.reshape(x, (source.size,)), source, result)
    x = writer.reshape(x, result.physical_shape)
    return writer.transpose(x, _inverse(result.order))


def _same_width(writer: Writer, x: str, dtype: str) -> str:
    type = writer.type_of(x)
    if type.dtype == dtype:
        return x
    # `bitcast-convert` does not accept booleans. A boolean is a byte of 0 or 1, so `convert` does
    # the same.
    if type.dtype == "pred":
        x = writer.convert(x, "u8")
    if dtype == "pred":
        return writer.convert(_same_width(writer, x, "u8"), "pred")
    if writer.type_of(x).dtype == dtype:
        return x
    return writer.emit(format_array_type(dtype, type.shape), "bitcast-convert", x)


def _other_width(writer: Writer, x: str, source: Array, result: Array) -> str:
    x = _same_width(writer, x, f"u{source.bits}")
    if source.bits > result.bits:
        shape: tuple[int, ...] = (source.size, source.bits // result.bits)
    else:
        # The elements that become one wider element must be the last dimension.
        x = writer.reshape(x, (result.size, result.bits // source.bits))
        shape = (result.size,)
    x = writer.emit(format_array_type(f"u{result.bits}", shape), "bitcast-convert", x)
    return _same_width(writer, x, result.dtype)


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(permutation.index(d) for d in range(len(permutation)))


# The arguments and results of a jax.stages.Compiled, as the flat arrays of its program.
#
# The first parameters of a program are constants that jit moved out of the function. The leaves of
# the arguments follow. Leaves that the function does not use are left out. PRNG keys are integers.
#
# References:
#     jax, jax/_src/stages.py (Compiled.call) and jax/_src/interpreters/pxla.py (MeshExecutable).


def _full_text(compiled: jax.stages.Compiled) -> str:
    """The text of the program, with the constants that `as_text()` leaves out."""
    modules = compiled.runtime_executable().hlo_modules()  # type: ignore[union-attr]
    if len(modules) != 1:
        raise ValueError(
            f"compiled holds {len(modules)} programs, not one. Compile a function for one device."
        )
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return modules[0].to_string(options)


def _flat_arguments(compiled: jax.stages.Compiled, arguments: Sequence[Any]) -> list[Any]:
    """The arrays that the program takes.

    ValueError if the function was compiled for another tree, shape or dtype.
    """
    leaves, tree = jax.tree.flatten((tuple(arguments), {}))
    if tree != compiled.in_tree:  # type: ignore[operator]
        raise ValueError(
            f"arguments are the tree {tree}, but the function was compiled for {compiled.in_tree}. "
            "Pass that tree, by position, and compile the function without keyword arguments."
        )
    infos = jax.tree.leaves(compiled.args_info)
    pairs = enumerate(zip(leaves, infos, strict=True))
    given = [_argument(position, x, info) for position, (x, info) in pairs]
    kept = compiled._executable._kept_var_idx  # type: ignore[attr-defined]
    return [x for n, x in enumerate([*compiled._params.const_args, *given]) if n in kept]


def _results_tree(compiled: jax.stages.Compiled, results: Sequence[jax.Array]) -> Any:
    """The results, in the tree that the function returns."""
    wanted = jax.tree.leaves(compiled.out_info)
    leaves = [_result(x, info.dtype) for x, info in zip(results, wanted, strict=True)]
    return jax.tree.unflatten(compiled.out_tree, leaves)


def _argument(position: int, x: Any, info: Any) -> Any:
    # A Python number has no dtype, so it gets that of the parameter. All others must have it.
    array = np.asarray(x, info.dtype) if isinstance(x, bool | int | float | complex) else x
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
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


# `run_on_cpu`, which calls the parts above.


def run_on_cpu(
    compiled: jax.stages.Compiled | str,
    *arguments: Any,
    seen: Seen | None = None,
) -> Any:
    """Runs an optimized GPU program on this machine's CPU.

    XLA's passes for GPUs can change numbers. For instance, they can drop a rounding to FP8. JAX can
    compile for a GPU that is not present. This function runs such a program, so that you can
    compare its numbers with those that the CPU computes.

    It keeps the conversions and branches that XLA made. Matmuls of cuBLAS, cuBLASLt, cuDNN and of
    XLA's Triton emitter become sums in float32 that are rounded once. Nothing is cached: each call
    rewrites and compiles.

    Five properties of a GPU are not imitated:

    - The order of sums.
    - The short accumulator of Hopper's fast FP8 matmuls.
    - TF32, unless the program names it as the algorithm of a matmul.
    - The approximations of transcendental functions.
    - The fusion of a multiply with an add.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for one GPU, or the program's text.
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
        must be for one device. It must not have hand-written kernels (Pallas, Triton), library
        calls other than matmuls, or unknown opcodes.

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
    if not isinstance(compiled, str | jax.stages.Compiled):
        raise TypeError(
            f"compiled is a {type(compiled).__name__}. Pass jax.jit(f).lower(...).compile() or its "
            "text."
        )
    taps = Taps(seen)
    if isinstance(compiled, str):
        return _execute(_portable_text(compiled, taps), arguments, taps)
    flat = _flat_arguments(compiled, arguments)
    results = _execute(_portable_text(_full_text(compiled), taps), flat, taps)
    return _results_tree(compiled, results)
