"""The matmuls of a GPU program, and of NVIDIA's libraries (cuBLAS, cuBLASLt, cuDNN), in HLO.

A library call computes in float32:

    D = round(scale_D * epilogue(alpha * scale_A * scale_B * (A @ B) + beta * C))

A and B are the operands, C is a matrix that is added, and D is the result. scale_D exists only if D
is FP8. An FP8 result is saturated.

In shapes, R is the number of rows of an operand, K its contracted dimension, and T the number of
tiles along K.

References:
  XLA, xla/service/gpu/transforms/gemm_rewriter.cc, xla/service/gpu/thunk_emitter.cc (the order of
  operands), xla/service/gpu/backend_configs.proto (GemmBackendConfig) and
  xla/service/gpu/transforms/block_scaling_rewriter.cc (the order of the scales of tiles).
  NVIDIA, cuBLAS documentation: cublasLtMatmul, cublasLtEpilogue_t,
  CUBLASLT_MATMUL_DESC_D_SCALE_POINTER.
"""

import json
import math
import re
from typing import Any, NamedTuple

from jaxfp8.programs._hlo import (
    Array,
    Instruction,
    format_array_type,
    read_array_type,
    split_at_commas,
    strip_layouts,
    tuple_types,
)
from jaxfp8.programs._writer import Taps, Writer

# A matmul as a GPU computes it: products are summed in float32, and the sum is rounded once.
#
# References:
#     XLA, xla/service/gpu/matmul_utils.cc (the compute type of each operand type) and
#     xla/xla_data.proto (PrecisionConfig.Algorithm).

_ALGORITHM = re.compile(r"algorithm=dot_(\w+)")
_DIMENSIONS = re.compile(r"(lhs|rhs)_(contracting|batch)_dims=\{([^}]*)\}")


class _Dimensions(NamedTuple):
    """The contracted dimensions and the batch dimensions of both operands."""

    lhs_contracting: tuple[int, ...] = ()
    rhs_contracting: tuple[int, ...] = ()
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()

    @property
    def attributes(self) -> list[str]:
        """The attributes of a `write_dot` with these dimensions."""
        return [
            f"{side}_dims={{{','.join(map(str, dimensions))}}}"
            for side, dimensions in zip(self._fields, self, strict=True)
            if dimensions
        ]

    def result(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result: batch, the other dimensions of lhs, those of rhs."""
        used = self.lhs_contracting + self.lhs_batch, self.rhs_contracting + self.rhs_batch
        free = [
            size
            for shape, dimensions in zip((lhs, rhs), used, strict=True)
            for d, size in enumerate(shape)
            if d not in dimensions
        ]
        return (*(lhs[d] for d in self.lhs_batch), *free)


def _dimensions_of(attributes: str) -> _Dimensions:
    """The dimensions of a `write_dot`."""
    return _Dimensions(
        **{
            f"{side}_{kind}": tuple(int(d) for d in found.split(",") if d)
            for side, kind, found in _DIMENSIONS.findall(attributes)
        }
    )


def write_dot(writer: Writer, taps: Taps, instruction: Instruction) -> str:
    """A `write_dot` of the program, rewritten."""
    name = instruction.name
    if "sparsity=" in instruction.attributes:
        raise ValueError(
            f"cannot run on a CPU: {name} is a matmul of sparse operands. Use dense operands."
        )
    lhs, rhs = instruction.operands
    taps.show(writer, instruction.label, lhs, rhs)
    algorithm = _ALGORITHM.search(instruction.attributes)
    result = read_array_type(instruction.type)
    lhs, rhs = (_rounded(writer, x, algorithm[1] if algorithm else "") for x in (lhs, rhs))
    product = _accumulated(writer, lhs, rhs, _dimensions_of(instruction.attributes), result.dtype)
    return writer.emit(result.text, "convert", product, name=name)


def _accumulated(writer: Writer, lhs: str, rhs: str, dimensions: _Dimensions, dtype: str) -> str:
    """lhs @ rhs before the rounding to `dtype`.

    Floats are multiplied in float32, or in float64 if an operand or `dtype` is float64. Integers
    are multiplied in `dtype`.
    """
    types = [writer.type_of(x) for x in (lhs, rhs)]
    shape = dimensions.result(types[0].shape, types[1].shape)
    if all(type.is_float for type in types):
        dtype = "f64" if "f64" in (dtype, *(type.dtype for type in types)) else "f32"
        lhs, rhs = writer.convert(lhs, dtype), writer.convert(rhs, dtype)
    return writer.emit(
        format_array_type(dtype, shape),
        "dot",
        lhs,
        rhs,
        also=[*dimensions.attributes, "operand_precision={highest,highest}"],
    )


def _rounded(writer: Writer, x: str, algorithm: str) -> str:
    """A float32 operand, rounded as the algorithm of the `write_dot` rounds it.

    Algorithms that end in x3, x6 or x9 add up several matmuls of low precision. They are close to
    float32, so the operand is not rounded.
    """
    type = writer.type_of(x)
    if type.dtype != "f32" or algorithm.endswith(("_x3", "_x6", "_x9")):
        return x
    if algorithm.startswith("tf32"):
        bits = ["exponent_bits=8", "mantissa_bits=10"]
        return writer.emit(type.text, "reduce-precision", x, also=bits)
    if algorithm.startswith(("bf16", "f16")):
        return writer.convert(x, algorithm.partition("_")[0])
    return x


# The calls: their scales, epilogues and results.

# cuDNN reads scales in tiles of 128 rows x 4 columns. In memory, the 4 columns of row r + 32 follow
# those of row r.
_SCALE_ROWS, _SCALE_COLUMNS, _SCALE_INNER = 128, 4, 32

# The tanh approximation of GELU: sqrt(2 / pi) and the coefficient of x^3.
_GELU_FACTOR, _GELU_CUBIC = "0.797884583", "0.044715"

_LARGEST = {"f8e4m3fn": "448", "f8e5m2": "57344"}
_EPILOGUES = (
    "DEFAULT",
    "BIAS",
    "RELU",
    "BIAS_RELU",
    "GELU",
    "GELU_AUX",
    "BIAS_GELU",
    "BIAS_GELU_AUX",
)


def write_cublas_matmul(writer: Writer, taps: Taps, instruction: Instruction) -> str:
    """A call of `__cublas$gemm`, `__cublas$lt$matmul` or `__cublas$lt$matmul$f8`, in HLO."""
    config = _config(instruction)
    is_fp8 = instruction.call_target == "__cublas$lt$matmul$f8"
    results = [read_array_type(part) for part in tuple_types(instruction.type)]
    epilogue = config.get("epilogue", "DEFAULT")
    _check(instruction, config, epilogue, is_fp8)

    # The order of operands: A, B, C, scale_A, scale_B, bias, scale_D. Each after B is optional.
    operands = list(instruction.operands)
    lhs, rhs = operands.pop(0), operands.pop(0)
    addend = operands.pop(0) if config.get("beta", 0) else None
    scales = [operands.pop(0), operands.pop(0)] if is_fp8 else [None, None]
    bias = operands.pop(0) if "BIAS" in epilogue else None
    result_scale = operands.pop() if results[0].dtype in _LARGEST and operands else None
    if operands:
        raise ValueError(
            f"cannot run on a CPU: {instruction.name} has {len(operands)} operands that are "
            f"unknown here, {', '.join(operands)}. Compile with a version of jax that jaxfp8 is "
            "tested with."
        )
    taps.show(writer, instruction.label, lhs, rhs, *scales)

    d = _accumulated(writer, lhs, rhs, _dimensions(config), results[0].dtype)
    for scale in filter(None, scales):
        d = _times(writer, d, scale)
    d = _times_number(writer, d, config.get("alpha_real", 1))
    if addend is not None:
        addend = writer.convert(addend, writer.type_of(d).dtype)
        d = writer.elementwise("add", d, _times_number(writer, addend, config["beta"]))
    if bias is not None:
        d = _plus_bias(writer, d, bias)
    further = []
    if "AUX" in epilogue:
        # The call also returns the input of GELU, which the backward pass needs.
        further.append(writer.convert(d, results[1].dtype))
    if "RELU" in epilogue:
        d = writer.elementwise("maximum", d, writer.filled(writer.type_of(d), "0"))
    if "GELU" in epilogue:
        d = _gelu(writer, d)
    if config.get("damax_output"):  # the call also returns the amax of D, before scale_D
        amax = writer.largest(writer.elementwise("abs", d))
        further.append(writer.convert(amax, results[1].dtype))
    if result_scale is not None:
        d = _times(writer, d, result_scale)
    return _tuple(writer, instruction, [_saturated(writer, d, results[0].dtype), *further])


def write_block_scaled_dot(writer: Writer, taps: Taps, instruction: Instruction) -> str:
    """A call of `__cudnn$blockScaledDot`, in HLO.

    Its operands are A [.., M, K], B [.., N, K] and their scales in the order that cuDNN reads.
    """
    lhs, rhs, *scales = instruction.operands
    result = read_array_type(tuple_types(instruction.type)[0])
    scales = [_unswizzled(writer, x, scale) for x, scale in zip((lhs, rhs), scales, strict=True)]
    taps.show(writer, instruction.label, lhs, rhs, *scales)
    d = _scaled(writer, lhs, rhs, *scales)
    return _tuple(writer, instruction, [writer.convert(d, result.dtype)])


def _scaled(writer: Writer, lhs: str, rhs: str, lhs_scale: str, rhs_scale: str) -> str:
    """A @ B^T in float32, of operands [.., rows, K] with a scale for each tile along K."""
    lhs, rhs = _dequantized(writer, lhs, lhs_scale), _dequantized(writer, rhs, rhs_scale)
    rank = len(writer.type_of(lhs).shape)
    batch = tuple(range(rank - 2))
    return _accumulated(
        writer, lhs, rhs, _Dimensions((rank - 1,), (rank - 1,), batch, batch), "f32"
    )


def _dequantized(writer: Writer, x: str, scale: str) -> str:
    """Values [.., R, K] times scales [.., R, T].

    The products are exact in float32, because both factors have few significant bits.
    """
    shape = writer.type_of(x).shape
    tiles = writer.type_of(scale).shape[-1]
    split_shape = (*shape[:-1], tiles, shape[-1] // tiles)
    wide = writer.reshape(writer.convert(x, "f32"), split_shape)
    spread = writer.broadcast(writer.convert(scale, "f32"), split_shape, tuple(range(len(shape))))
    return writer.reshape(writer.elementwise("multiply", wide, spread), shape)


def _unswizzled(writer: Writer, x: str, scale: str) -> str:
    """Scales [.., R, T], from the order in which cuDNN reads them. The padding is removed."""
    *_, rows, columns = writer.type_of(x).shape
    *batch, padded_rows, padded_columns = writer.type_of(scale).shape
    size = math.prod(batch)
    lies = (
        size,
        padded_rows // _SCALE_ROWS,
        padded_columns // _SCALE_COLUMNS,
        _SCALE_INNER,
        _SCALE_ROWS // _SCALE_INNER,
        _SCALE_COLUMNS,
    )
    if padded_rows % _SCALE_ROWS or padded_columns % _SCALE_COLUMNS:
        raise ValueError(
            f"cannot run on a CPU: scales {writer.type_of(scale).text} of a block-scaled matmul "
            f"are not in tiles of {_SCALE_ROWS} x {_SCALE_COLUMNS}. Compile with a version of jax "
            "that jaxfp8 is tested with."
        )
    # To [batch, row tiles, groups of 32 rows, rows of a group, column tiles, columns].
    scale = writer.transpose(writer.reshape(scale, lies), (0, 1, 4, 3, 2, 5))
    scale = writer.reshape(scale, (*batch, padded_rows, padded_columns))
    tile = _tile(columns, padded_columns)
    limits = (*batch, rows, columns // tile)
    ranges = ", ".join(f"[0:{limit}]" for limit in limits)
    dtype = writer.type_of(scale).dtype
    return writer.emit(
        format_array_type(dtype, limits), "slice", scale, also=[f"slice={{{ranges}}}"]
    )


def _tile(columns: int, padded: int) -> int:
    """How many values share a scale: 32 (MXFP8) or 16 (NVFP4).

    The call does not say it. It follows from the number of scales, up to the padding.
    """
    for tile in (32, 16):
        missing = padded - columns // tile
        if columns % tile == 0 and 0 <= missing < _SCALE_COLUMNS:
            return tile
    raise ValueError(
        f"cannot run on a CPU: a block-scaled matmul has {padded} columns of scales for {columns} "
        "values. They fit neither tiles of 32 nor of 16. Compile with a version of jax that "
        "jaxfp8 is tested with."
    )


def _config(instruction: Instruction) -> dict[str, Any]:
    for attribute in split_at_commas(instruction.attributes):
        if attribute.startswith("backend_config="):
            return json.loads(attribute.removeprefix("backend_config="))["gemm_backend_config"]
    raise ValueError(
        f"cannot run on a CPU: {instruction.name} has no gemm_backend_config. Pass the text as XLA "
        "prints it."
    )


def _check(instruction: Instruction, config: dict[str, Any], epilogue: str, is_fp8: bool) -> None:
    wrong = ""
    if epilogue not in _EPILOGUES:
        wrong = f"epilogue {epilogue}"
    elif config.get("alpha_imag", 0):
        wrong = f"a complex alpha ({config['alpha_imag']} i)"
    elif is_fp8 and config.get("scale_mode", 1) not in (0, 1):
        wrong = f"scale_mode {config['scale_mode']}"
    if wrong:
        raise ValueError(
            f"cannot run on a CPU: {instruction.name} has {wrong}. Only real factors, scales of "
            f"whole tensors and the epilogues {', '.join(_EPILOGUES)} can run. Compile the matmul "
            "without the operations that follow it."
        )


def _dimensions(config: dict[str, Any]) -> _Dimensions:
    numbers = config["dot_dimension_numbers"]
    given = (numbers.get(f"{side}_dimensions", ()) for side in _Dimensions._fields)
    return _Dimensions(*(tuple(map(int, dimensions)) for dimensions in given))


def _times(writer: Writer, x: str, scalar: str) -> str:
    type = writer.type_of(x)
    scalar = writer.reshape(writer.convert(scalar, type.dtype), ())
    return writer.elementwise("multiply", x, writer.broadcast(scalar, type.shape))


def _times_number(writer: Writer, x: str, number: float) -> str:
    if number == 1:
        return x
    return _times(writer, x, writer.constant(writer.type_of(x).dtype, repr(float(number))))


def _plus_bias(writer: Writer, x: str, bias: str) -> str:
    """x plus a bias. The dimensions of the bias are the last ones of x."""
    type, rank = writer.type_of(x), len(writer.type_of(bias).shape)
    along = tuple(range(len(type.shape) - rank, len(type.shape)))
    bias = writer.broadcast(writer.convert(bias, type.dtype), type.shape, along)
    return writer.elementwise("add", x, bias)


def _gelu(writer: Writer, x: str) -> str:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    type = writer.type_of(x)
    cube = writer.elementwise("multiply", writer.elementwise("multiply", x, x), x)
    cube = writer.elementwise("multiply", cube, writer.filled(type, _GELU_CUBIC))
    inner = writer.elementwise("add", x, cube)
    inner = writer.elementwise("multiply", inner, writer.filled(type, _GELU_FACTOR))
    tanh = writer.elementwise("add", writer.elementwise("tanh", inner), writer.filled(type, "1"))
    half = writer.elementwise("multiply", x, writer.filled(type, "0.5"))
    return writer.elementwise("multiply", half, tanh)


def _saturated(writer: Writer, x: str, dtype: str) -> str:
    """x, rounded to `dtype`.

    cuBLASLt saturates FP8 results. So XLA can fold a clamp into the call.
    """
    if dtype in _LARGEST:
        type = writer.type_of(x)
        low, high = (writer.filled(type, sign + _LARGEST[dtype]) for sign in ("-", ""))
        x = writer.elementwise("clamp", low, x, high)
    return writer.convert(x, dtype)


def _tuple(writer: Writer, instruction: Instruction, results: list[str]) -> str:
    """The results in the form that the call returns them, with zeros for its workspace."""
    types: list[Array] = [read_array_type(part) for part in tuple_types(instruction.type)]
    if not instruction.type.startswith("("):
        result = writer.reshape(results[0], types[0].shape)
        return writer.emit(types[0].text, "copy", result, name=instruction.name)
    shaped = [writer.reshape(x, type.shape) for x, type in zip(results, types, strict=False)]
    shaped += [writer.filled(type, "0") for type in types[len(results) :]]
    return writer.emit(strip_layouts(instruction.type), "tuple", *shaped, name=instruction.name)
