"""The matmuls of a program in NumPy: XLA's own, and calls of cuBLAS, cuBLASLt and cuDNN.

Those of a TPU program are convolutions (`_convolution.py`).

A library call computes in float32:

    D = round(scale_D * epilogue(alpha * scale_A * scale_B * (A @ B) + beta * C))

A and B are the operands, C is a matrix that is added, and D is the result. scale_D exists only if D
is FP8. An FP8 result is saturated.

In shapes, R is the number of rows of an operand, K its contracted dimension, and T the number of
tiles along K.

References:
  XLA, xla/service/gpu/matmul_utils.cc (the compute type of each operand type),
  xla/xla_data.proto (PrecisionConfig.Algorithm), xla/service/gpu/transforms/gemm_rewriter.cc,
  xla/service/gpu/thunk_emitter.cc (the order of operands),
  xla/service/gpu/backend_configs.proto (GemmBackendConfig) and
  xla/service/gpu/transforms/block_scaling_rewriter.cc (the order of the scales of tiles).
  NVIDIA, cuBLAS documentation: cublasLtMatmul, cublasLtEpilogue_t,
  CUBLASLT_MATMUL_DESC_D_SCALE_POINTER.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxfp8.programs._hlo import Instruction, split_at_commas, tensors_of
from jaxfp8.programs.on_cpu._convolution import as_the_matrix_unit_reads, convolve

# label, lhs, rhs, lhs_scale, rhs_scale
Seen: TypeAlias = Callable[[str, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None], Any]
# What `Seen` gets after the label, and the results before they are rounded.
Computed: TypeAlias = tuple[Sequence[np.ndarray | None], list[np.ndarray]]
# `lhs_contracting`, `rhs_contracting`, `lhs_batch` and `rhs_batch`.
Dimensions: TypeAlias = dict[str, list[int]]

_SIDES = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
_ALGORITHM = re.compile(r"algorithm=dot_(\w+)")
_DIMENSIONS = re.compile(r"(\w+)_dims=\{([^}]*)\}")

# cuDNN reads scales in tiles of 128 rows x 4 columns. In memory, the 4 columns of row r + 32 follow
# those of row r.
_SCALE_ROWS, _SCALE_COLUMNS, _SCALE_INNER = 128, 4, 32

# The tanh approximation of GELU: sqrt(2 / pi) and the coefficient of x^3.
_GELU_FACTOR, _GELU_CUBIC = 0.797884583, 0.044715

_EPILOGUES = (
    "DEFAULT", "BIAS", "RELU", "BIAS_RELU", "GELU", "GELU_AUX", "BIAS_GELU", "BIAS_GELU_AUX",
)  # fmt: skip


class Matmuls:
    """The matmuls of one program, as functions that XLA calls.

    Attributes:
      callbacks: the program holds the index of each.
      error: the first error in one of them. XLA would report only its text.
    """

    def __init__(self, seen: Seen | None) -> None:
        self._seen = seen
        self.callbacks: list[Callable[..., tuple[np.ndarray, ...]]] = []
        self.error: BaseException | None = None

    def add(
        self, instruction: Instruction, operands: Sequence[np.dtype], carriers: Sequence[np.dtype]
    ) -> int:
        """Adds a matmul of these operands, whose results leave as `carriers`. Returns its index."""
        compute = MATMULS[matmul_name(instruction)]
        # Without the workspace of a library call, which is its last result.
        results = tensors_of(instruction.type)[: len(carriers)]
        dtypes = [jnp.dtype(result.dtype) for result in results]

        def called(*arrays: Any) -> tuple[np.ndarray, ...]:
            try:
                # Copies, because XLA uses the memory of its arrays again.
                given = [_as(np.array(x), d) for x, d in zip(arrays, operands, strict=True)]
                with np.errstate(all="ignore"):
                    shown, found = compute(instruction, given, dtypes[0])
                    found = [x.astype(d) for x, d in zip(found, dtypes, strict=True)]
                if self._seen is not None:
                    self._seen(instruction.label, *shown)  # type: ignore[arg-type]
                pairs = zip(found, results, carriers, strict=True)
                return tuple(_as(x.reshape(r.shape), carrier) for x, r, carrier in pairs)
            except BaseException as error:  # `_execute` raises it again in the caller
                self.error = self.error or error
                raise

        self.callbacks.append(called)
        return len(self.callbacks) - 1


def matmul_name(instruction: Instruction) -> str:
    """The key of an instruction in `MATMULS`, if it is a matmul."""
    return instruction.call_target or instruction.opcode


def _as(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same bytes as another type. 4-bit types, which NumPy has in bytes, come as float32."""
    return x.view(dtype) if x.dtype.itemsize == dtype.itemsize else x.astype(dtype)


def _dot(instruction: Instruction, operands: list[np.ndarray], dtype: np.dtype) -> Computed:
    if "sparsity=" in instruction.attributes:
        raise ValueError(
            f"cannot run on a CPU: {instruction.name} is a matmul of sparse operands. Use dense "
            "operands."
        )
    found = _DIMENSIONS.findall(instruction.attributes)
    dimensions = {side: [int(d) for d in listed.split(",") if d] for side, listed in found}
    algorithm = _ALGORITHM.search(instruction.attributes)
    lhs, rhs = (_rounded(x, algorithm[1] if algorithm else "") for x in operands)
    return (*operands, None, None), [_product(lhs, rhs, dimensions, dtype)]


def _product(lhs: np.ndarray, rhs: np.ndarray, dimensions: Dimensions, dtype: Any) -> np.ndarray:
    """lhs @ rhs before the rounding to `dtype`."""
    dtype = _dtype_of_sums(lhs, rhs, dtype)
    lhs_contracting, rhs_contracting, lhs_batch, rhs_batch = (
        dimensions.get(side, []) for side in _SIDES
    )
    # As stacks of matrices: `np.einsum` takes ten times as long for some orders of dimensions.
    rows = [d for d in range(lhs.ndim) if d not in lhs_batch + lhs_contracting]
    columns = [d for d in range(rhs.ndim) if d not in rhs_batch + rhs_contracting]
    batch = tuple(lhs.shape[d] for d in lhs_batch)
    m, n = tuple(lhs.shape[d] for d in rows), tuple(rhs.shape[d] for d in columns)
    k = math.prod(lhs.shape[d] for d in lhs_contracting)
    a = lhs.astype(dtype).transpose(lhs_batch + rows + lhs_contracting)
    b = rhs.astype(dtype).transpose(rhs_batch + rhs_contracting + columns)
    product = a.reshape((*batch, math.prod(m), k)) @ b.reshape((*batch, k, math.prod(n)))
    return product.reshape((*batch, *m, *n))


def _dtype_of_sums(lhs: np.ndarray, rhs: np.ndarray, dtype: Any) -> Any:
    """In what lhs and rhs are multiplied.

    Floats are multiplied in float32, or in float64 if an operand or `dtype` is float64. Others are
    multiplied in `dtype`.
    """
    if all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
        return np.float64 if np.float64 in (dtype, lhs.dtype, rhs.dtype) else np.float32
    return dtype


def _convolution(instruction: Instruction, operands: list[np.ndarray], dtype: np.dtype) -> Computed:
    lhs, rhs = as_the_matrix_unit_reads(operands, instruction.attributes)
    sums = _dtype_of_sums(lhs, rhs, dtype)
    return (*operands, None, None), [convolve(lhs, rhs, instruction.attributes, sums)]


def _rounded(x: np.ndarray, algorithm: str) -> np.ndarray:
    """A float32 operand, rounded as the algorithm of the matmul rounds it.

    Algorithms that end in x3, x6 or x9 add up several matmuls of low precision. They are close to
    float32, so the operand is not rounded.
    """
    if x.dtype != np.float32 or algorithm.endswith(("_x3", "_x6", "_x9")):
        return x
    if algorithm.startswith("tf32"):  # the last 13 of 23 bits go, to nearest even
        bits = x.view(np.uint32)
        nearest = (bits + 0xFFF + (bits >> 13 & 1)) >> 13 << 13
        return np.where(np.isfinite(x), nearest.view(np.float32), x)
    if algorithm.startswith("bf16"):
        return x.astype(jnp.bfloat16)
    return x.astype(np.float16) if algorithm.startswith("f16") else x


def _cublas(instruction: Instruction, operands: list[np.ndarray], dtype: np.dtype) -> Computed:
    config = _config(instruction)
    epilogue = config.get("epilogue", "DEFAULT")
    # The order of operands: A, B, C, scale_A, scale_B, bias, scale_D. Each after B is optional.
    lhs, rhs, *others = operands
    addend = others.pop(0) if config.get("beta", 0) else None
    is_fp8 = instruction.call_target == "__cublas$lt$matmul$f8"
    scales = [others.pop(0), others.pop(0)] if is_fp8 else [None, None]
    bias = others.pop(0) if "BIAS" in epilogue else None
    to_fp8 = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
    result_scale = others.pop(0) if to_fp8 and others else None
    if others:
        raise ValueError(
            f"cannot run on a CPU: {instruction.name} has {len(others)} operands that are unknown "
            f"here, {', '.join(instruction.operands[-len(others) :])}. Compile with a version of "
            "jax that jaxfp8 is tested with."
        )

    numbers = config["dot_dimension_numbers"]
    dimensions = {side: list(map(int, numbers.get(f"{side}_dimensions", ()))) for side in _SIDES}
    d = _product(lhs, rhs, dimensions, dtype)
    wide = d.dtype
    for scale in (x for x in scales if x is not None):
        d = d * scale.astype(wide).reshape(())
    d = d * wide.type(config.get("alpha_real", 1))
    if addend is not None:
        d = d + addend.astype(wide) * wide.type(config["beta"])
    if bias is not None:  # its dimensions are the last ones of D
        d = d + bias.astype(wide)
    further = []
    if "AUX" in epilogue:  # the call also returns the input of GELU, for the backward pass
        further.append(d)
    if "RELU" in epilogue:
        d = np.maximum(d, 0)
    if "GELU" in epilogue:
        d = d * 0.5 * (1 + np.tanh(_GELU_FACTOR * (d + _GELU_CUBIC * d * d * d)))
    if config.get("damax_output"):  # the call also returns the amax of D, before scale_D
        further.append(np.max(np.abs(d)))
    if result_scale is not None:
        d = d * result_scale.astype(wide).reshape(())
    if to_fp8:  # cuBLASLt saturates, so XLA can fold a clamp into the call
        limit = float(jnp.finfo(dtype).max)
        d = np.clip(d, -limit, limit)
    return (lhs, rhs, *scales), [d, *further]


def _config(instruction: Instruction) -> dict[str, Any]:
    """How a call of cuBLAS computes. ValueError if it cannot run."""
    texts = [a for a in split_at_commas(instruction.attributes) if a.startswith("backend_config=")]
    if not texts:
        raise ValueError(
            f"cannot run on a CPU: {instruction.name} has no gemm_backend_config. Pass the text as "
            "XLA prints it."
        )
    config = json.loads(texts[0].removeprefix("backend_config="))["gemm_backend_config"]
    wrong = ""
    if config.get("epilogue", "DEFAULT") not in _EPILOGUES:
        wrong = f"epilogue {config['epilogue']}"
    elif config.get("alpha_imag", 0):
        wrong = f"a complex alpha ({config['alpha_imag']} i)"
    elif instruction.call_target.endswith("$f8") and config.get("scale_mode", 1) not in (0, 1):
        wrong = f"scale_mode {config['scale_mode']}"
    if wrong:
        raise ValueError(
            f"cannot run on a CPU: {instruction.name} has {wrong}. Only real factors, scales of "
            f"whole tensors and the epilogues {', '.join(_EPILOGUES)} can run. Compile the matmul "
            "without the operations that follow it."
        )
    return config


def _block_scaled(
    instruction: Instruction, operands: list[np.ndarray], dtype: np.dtype
) -> Computed:
    """A [.., M, K] @ B [.., N, K]^T, with their scales in the order that cuDNN reads."""
    del instruction, dtype
    lhs, rhs, *swizzled = operands
    scales = [_unswizzled(x, scale) for x, scale in zip((lhs, rhs), swizzled, strict=True)]
    # The products are exact in float32, because both factors have few significant bits.
    a, b = (
        x.astype(np.float32) * np.repeat(s.astype(np.float32), x.shape[-1] // s.shape[-1], -1)
        for x, s in zip((lhs, rhs), scales, strict=True)
    )
    return (lhs, rhs, *scales), [a @ b.swapaxes(-1, -2)]


def _unswizzled(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Scales [.., R, T], from the order in which cuDNN reads them. The padding is removed."""
    rows, columns = x.shape[-2:]
    *batch, padded_rows, padded_columns = scale.shape
    if padded_rows % _SCALE_ROWS or padded_columns % _SCALE_COLUMNS:
        raise ValueError(
            f"cannot run on a CPU: scales {scale.dtype}{list(scale.shape)} of a block-scaled "
            f"matmul are not in tiles of {_SCALE_ROWS} x {_SCALE_COLUMNS}. Compile with a version "
            "of jax that jaxfp8 is tested with."
        )
    scale = scale.reshape(
        math.prod(batch),
        padded_rows // _SCALE_ROWS,
        padded_columns // _SCALE_COLUMNS,
        _SCALE_INNER,
        _SCALE_ROWS // _SCALE_INNER,
        _SCALE_COLUMNS,
    )
    # To [batch, row tiles, groups of 32 rows, rows of a group, column tiles, columns].
    scale = scale.transpose(0, 1, 4, 3, 2, 5).reshape(*batch, padded_rows, padded_columns)
    return scale[..., :rows, : columns // _tile(columns, padded_columns)]


def _tile(columns: int, padded: int) -> int:
    """How many values share a scale: 32 (MXFP8) or 16 (NVFP4).

    The call does not say it. It follows from the number of scales, up to the padding.
    """
    for tile in (32, 16):
        if columns % tile == 0 and 0 <= padded - columns // tile < _SCALE_COLUMNS:
            return tile
    raise ValueError(
        f"cannot run on a CPU: a block-scaled matmul has {padded} columns of scales for {columns} "
        "values. They fit neither tiles of 32 nor of 16. Compile with a version of jax that "
        "jaxfp8 is tested with."
    )


# By opcode, or by the target of a custom call.
MATMULS: dict[str, Callable[[Instruction, list[np.ndarray], np.dtype], Computed]] = {
    "dot": _dot,
    "convolution": _convolution,
    "__cublas$gemm": _cublas,
    "__cublas$lt$matmul": _cublas,
    "__cublas$lt$matmul$f8": _cublas,
    "__cudnn$blockScaledDot": _block_scaled,
}
