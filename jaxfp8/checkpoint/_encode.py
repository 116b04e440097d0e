"""From parameters to the tensors of a file, in pieces of some rows.

A piece is made when it is asked for: read from the devices, put into the order of the file, and
cast. So no more than a piece of a model is in memory twice.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._quantized_tensor import Cast, Direction, dequantized
from jaxfp8._typing import Array, Axes, DType
from jaxfp8.checkpoint._formats import VALUES, Format, numpy_dtype
from jaxfp8.checkpoint._grid import grid_of, read_region
from jaxfp8.checkpoint._names import Entry
from jaxfp8.checkpoint._safetensors import TensorSpec
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._exact import factors_of
from jaxfp8.numerics._formats import E4M3
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._scale import ScaleRule
from jaxfp8.weights._quantized_weight import is_weight

PIECE = 2**22
"""The most values of a piece. Rows of a matrix are not cut."""
_SIDE = 128  # the longest side of the cells of a format along its rows

How: TypeAlias = Literal["as it is", "cast", "cast again", "dequantized"]
"""How a tensor was made. FP8 values of training go out as they are if the format's cells have the
scales for them. Otherwise they are dequantized, and cast again for a format."""


def _as_bits(part: np.ndarray) -> np.ndarray:
    """The array as integers: NumPy copies these faster than the floats of ml_dtypes."""
    return part.view(np.dtype(f"u{part.dtype.itemsize}"))


def in_file_order(entry: Entry, part: np.ndarray) -> np.ndarray:
    """A region of a parameter as rows of the file, contiguous."""
    return np.asarray(entry.axes.to_file(_as_bits(part)), order="C").view(part.dtype)


def pieces_of(shape: Axes, step: int) -> list[slice]:
    """Rows of a tensor, by pieces that start at multiples of `step`, and of the sides of cells."""
    if not shape or not shape[0]:
        return [slice(0, 0 if shape else 1)]
    unit = math.lcm(step, _SIDE)
    count = max(PIECE // max(math.prod(shape[1:]), 1) // unit, 1) * unit
    return [slice(i, min(i + count, shape[0])) for i in range(0, shape[0], count)]


# The tensors of a file.


class FileTensor(NamedTuple):
    """A tensor of a file, in pieces.

    Attributes:
      name: in the file.
      spec: its dtype and shape.
      pieces: returns an iterator of (first row, rows).
    """

    name: str
    spec: TensorSpec
    pieces: Callable[[], Iterator[tuple[int, np.ndarray]]]

    def whole(self) -> np.ndarray:
        """The tensor in one array."""
        parts = [part for _, part in self.pieces()]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def specs_of(
    entry: Entry, leaf: Any, format: Format | None, dtype: DType | None
) -> dict[str, TensorSpec]:
    """The tensors of one entry. With a format, the entry is a matrix in FP8."""
    shape = entry.file_shape
    if format is None:
        return {entry.name: TensorSpec(_dtype_of(leaf, dtype), shape)}
    specs = {entry.name: TensorSpec(VALUES, shape)}
    specs[format.scale_name_of(entry.name)] = format.scale_spec(shape)
    if format.static_inputs:
        specs[format.input_scale_name_of(entry.name)] = TensorSpec(np.dtype(np.float32), ())
    return specs


def _dtype_of(leaf: Any, dtype: DType | None) -> np.dtype:
    """The dtype of a parameter in a file. Only floats are cast."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return numpy_dtype(dtype if dtype is not None and is_float else leaf.dtype)


def encode(
    entry: Entry,
    leaf: Any,
    format: Format | None,
    *,
    dtype: DType | None = None,
    peers: Sequence[tuple[Entry, Any]] = (),
    input_scale: float | None = None,
) -> tuple[How, list[FileTensor]]:
    """The tensors of one entry, in the order of `specs_of`, and how they are made.

    Engines merge the `peers` of a matrix with it, and itself. They cast all of them again if a
    format has one scale for each and these differ. So a cast gives all the same scale.

    Raises:
      ValueError: while pieces are made, if a matrix in FP8 has a NaN or an inf.
    """
    (spec, *more), shape = specs_of(entry, leaf, format, dtype).values(), entry.file_shape
    name, step = entry.name, entry.axes.step(entry.shape)

    def values_by(rows_of: Callable[[slice], np.ndarray]) -> FileTensor:
        pieces = pieces_of(shape, step)
        return FileTensor(name, spec, lambda: ((rows.start, rows_of(rows)) for rows in pieces))

    how: How
    if format is None:
        how = "dequantized" if is_weight(leaf) and leaf.original is None else "as it is"
        return how, [values_by(rows_of(entry, leaf, spec.dtype))]
    held = _held(entry, leaf, format)
    if held is not None:
        how, (array, fixed) = "as it is", held
        values = values_by(lambda rows: _checked(name, _read(entry, array, rows)))
        scales = lambda: fixed  # noqa: E731
    else:
        how = "cast again" if is_weight(leaf) and leaf.original is None else "cast"
        of_rows, known = rows_of(entry, leaf, None), functools.cache(lambda: _found())

        def _found() -> tuple[np.ndarray, np.ndarray]:
            group = peers if format.granularity.in_one and peers else [(entry, leaf)]
            return _scales(name, _all_pieces(group), format)

        def cast(rows: slice) -> np.ndarray:
            multiplier = known()[0]
            if multiplier.ndim:
                side = format.sides(shape)[0]
                multiplier = multiplier[rows.start // side : -(-rows.stop // side)]
            return np.asarray(_cast(of_rows(rows), multiplier, format.granularity))

        values, scales = values_by(cast), lambda: known()[1]
    tensors = [values]
    tensors.append(
        FileTensor(
            format.scale_name_of(name), more[0],
            lambda: iter([(0, format.scale_to_file(scales()))]),
        )
    )  # fmt: skip
    if format.static_inputs:
        known_input = np.array(input_scale, np.float32)
        tensors.append(
            FileTensor(format.input_scale_name_of(name), more[1], lambda: iter([(0, known_input)]))
        )
    return how, tensors


def _held(entry: Entry, leaf: Any, format: Format) -> tuple[Any, np.ndarray] | None:
    """The FP8 values of a weight, and their scales by cells of the format; None if it casts."""
    if not is_weight(leaf):
        return None
    grid = grid_of(entry, leaf)
    values, scale = leaf.values[grid.copy], grid.scales_of(leaf).in_format(format)
    return None if scale is None or values.dtype != VALUES else (values, scale)


def _all_pieces(group: Sequence[tuple[Entry, Any]]) -> Iterator[np.ndarray]:
    """The rows of several matrices, in high precision."""
    for entry, leaf in group:
        read = rows_of(entry, leaf, None)
        for rows in pieces_of(entry.file_shape, entry.axes.step(entry.shape)):
            yield read(rows)


def _read(entry: Entry, array: Any, rows: slice) -> np.ndarray:
    """Rows of the file, from the array of a parameter."""
    return in_file_order(entry, read_region(array, entry.region(rows)))


def rows_of(entry: Entry, leaf: Any, dtype: DType | None) -> Callable[[slice], np.ndarray]:
    """Reads rows of the file in high precision.

    Args:
      entry: the tensor.
      leaf: an array, or a weight in FP8, which is dequantized if its original is not there.
      dtype: None for the dtype of an array, and for float32 of a weight that is dequantized.
    """
    array = leaf.original if is_weight(leaf) else leaf
    if array is not None:
        wanted = _dtype_of(array, dtype)
        return lambda rows: _read(entry, array, rows).astype(wanted, copy=False)
    grid, wide = grid_of(entry, leaf), jnp.dtype(dtype or jnp.float32)
    scales, held = grid.scales_of(leaf), leaf.values[grid.copy]

    return lambda rows: dequantize_rows(_read(entry, held, rows), scales.spread(rows), wide)


def dequantize_rows(values: np.ndarray, scale: np.ndarray, dtype: DType) -> np.ndarray:
    """FP8 values [n, K] times the scale of each, [n, K], rounded to a dtype."""
    return np.asarray(_dequantize(values, scale, jnp.dtype(dtype)))


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(values: Array, scale: Array, dtype: DType) -> Array:
    return dequantized(values, factors_of(scale), dtype)


def _checked(name: str, values: np.ndarray) -> np.ndarray:
    """E4M3 values without a NaN."""
    if np.any((values.view(np.uint8) & 0x7F) == 0x7F):
        raise _not_finite(name)
    return values


def _not_finite(name: str) -> ValueError:
    return ValueError(
        f"{name} has a value that is NaN or inf, which engines would multiply by. Export a "
        "checkpoint from before the run went wrong."
    )


def _scales(
    name: str, pieces: Iterator[np.ndarray], format: Format
) -> tuple[np.ndarray, np.ndarray]:
    """The multipliers and the scales of a matrix, by cell, [] or [n, k]."""
    found = [np.asarray(amax(jnp.asarray(piece), format.granularity)) for piece in pieces]
    amaxes = np.max(found) if format.granularity.in_one else np.concatenate(found)
    if not np.all(np.isfinite(amaxes)):
        raise _not_finite(name)
    multiplier, scale = _by_rule(amaxes, format.rule)
    return np.asarray(multiplier), np.atleast_2d(np.asarray(scale))


@functools.partial(jax.jit, static_argnames="rule")
def _by_rule(amaxes: Array, rule: ScaleRule) -> tuple[Array, Array]:
    return rule.apply(amaxes, E4M3)


@functools.partial(jax.jit, static_argnames="granularity")
def _cast(rows: Array, multiplier: Array, granularity: AbstractGranularity) -> Array:
    """Rows of a matrix in E4M3, under multipliers that are known."""
    cast = Cast(format=E4M3, directions=(Direction(granularity),))
    ((copy,), _) = cast_copies(rows, cast, (KnownScale(multiplier, multiplier),))
    return copy.values
