"""A matmul as a GPU computes it: products are summed in float32, and the sum is rounded once.

References:
  XLA, xla/service/gpu/matmul_utils.cc (the compute type of each operand type) and
  xla/xla_data.proto (PrecisionConfig.Algorithm).
"""

import re
from typing import NamedTuple

from jaxfp8.programs._hlo import Instruction
from jaxfp8.programs._taps import Taps
from jaxfp8.programs._types import array_type, spelled
from jaxfp8.programs._writer import Writer

_ALGORITHM = re.compile(r"algorithm=dot_(\w+)")
_DIMENSIONS = re.compile(r"(lhs|rhs)_(contracting|batch)_dims=\{([^}]*)\}")


class Dimensions(NamedTuple):
    """The contracted dimensions and the batch dimensions of both operands."""

    lhs_contracting: tuple[int, ...] = ()
    rhs_contracting: tuple[int, ...] = ()
    lhs_batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()

    @property
    def attributes(self) -> list[str]:
        """The attributes of a `dot` with these dimensions."""
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


def dimensions_of(attributes: str) -> Dimensions:
    """The dimensions of a `dot`."""
    return Dimensions(
        **{
            f"{side}_{kind}": tuple(int(d) for d in found.split(",") if d)
            for side, kind, found in _DIMENSIONS.findall(attributes)
        }
    )


def dot(writer: Writer, taps: Taps, instruction: Instruction) -> str:
    """A `dot` of the program, rewritten."""
    name = instruction.name
    if "sparsity=" in instruction.attributes:
        raise ValueError(
            f"cannot run on a CPU: {name} is a matmul of sparse operands. Use dense operands."
        )
    lhs, rhs = instruction.operands
    taps.show(writer, instruction.label, lhs, rhs)
    algorithm = _ALGORITHM.search(instruction.attributes)
    result = array_type(instruction.type)
    lhs, rhs = (_rounded(writer, x, algorithm[1] if algorithm else "") for x in (lhs, rhs))
    product = accumulated(writer, lhs, rhs, dimensions_of(instruction.attributes), result.dtype)
    return writer.emit(result.text, "convert", product, name=name)


def accumulated(writer: Writer, lhs: str, rhs: str, dimensions: Dimensions, dtype: str) -> str:
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
        spelled(dtype, shape),
        "dot",
        lhs,
        rhs,
        also=[*dimensions.attributes, "operand_precision={highest,highest}"],
    )


def _rounded(writer: Writer, x: str, algorithm: str) -> str:
    """A float32 operand, rounded as the algorithm of the `dot` rounds it.

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
