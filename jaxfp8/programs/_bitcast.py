"""A bitcast without layouts: the same bytes in memory, read as another type.

`bitcast` is the only instruction whose meaning depends on layouts. The rewritten program has no
layouts. So an array is transposed to its order in memory, reinterpreted, and transposed to the
order of the result.

References:
  XLA, xla/hlo/ir/hlo_opcode.h (kBitcast) and xla/shape_util.cc (ShapeUtil::DecomposeBitcast).
"""

from jaxfp8.programs._types import Array, spelled
from jaxfp8.programs._writer import Writer


def bitcast(writer: Writer, x: str, source: Array, result: Array) -> str:
    """`x` of type `source`, read as `result`.

    Raises:
      ValueError: if the sizes differ. Also if elements change their type and are not whole bytes.
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
    return writer.emit(spelled(dtype, type.shape), "bitcast-convert", x)


def _other_width(writer: Writer, x: str, source: Array, result: Array) -> str:
    x = _same_width(writer, x, f"u{source.bits}")
    if source.bits > result.bits:
        shape: tuple[int, ...] = (source.size, source.bits // result.bits)
    else:
        # The elements that become one wider element must be the last dimension.
        x = writer.reshape(x, (result.size, result.bits // source.bits))
        shape = (result.size,)
    x = writer.emit(spelled(f"u{result.bits}", shape), "bitcast-convert", x)
    return _same_width(writer, x, result.dtype)


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(permutation.index(d) for d in range(len(permutation)))
