"""From parameters to the tensors of a file, in pieces of some rows.

A piece is made when it is asked for: read from the devices, put into the order of the file, and
cast. So no more than a piece of a model is in memory twice.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._quantized_tensor import Cast, Direction, dequantized
from jaxfp8._typing import Array, DType
from jaxfp8.checkpoint._formats import VALUES, Format
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

How: TypeAlias = Literal["as it is", "cast", "cast again", "dequantized"]
"""How a tensor was made. FP8 values of training go out as they are if the format's cells have the
scales for them. Otherwise they are dequantized, and cast again for a format."""


def _as_bits(part: np.ndarray) -> np.ndarray:
    """The array as integers: NumPy copies these faster than the floats of ml_dtypes."""
    return part.view(np.dtype(f"u{part.dtype.itemsize}"))


def in_file_order(entry: Entry, part: np.ndarray) -> np.ndarray:
    """A region of a parameter as rows of the file, contiguous."""
    return np.asarray(entry.axes.to_file(_as_bits(part)), order="C").view(part.dtype)


def pieces_of(entry: Entry, format: Format | None) -> list[slice]:
    """Rows of a tensor, by pieces that begin at whole cells and whole indices of the parameter."""
    shape, side = entry.file_shape, 1
    if not shape or not shape[0]:
        return [slice(0, 0 if shape else 1)]
    if format is not None and isinstance(format.cells, tuple):
        side = format.cells[0]
    unit = math.lcm(entry.axes.step(entry.shape), side)
    count = max(PIECE // max(math.prod(shape[1:]), 1) // unit, 1) * unit
    return [slice(i, min(i + count, shape[0])) for i in range(0, shape[0], count)]


# The tensors of a file.


class FileTensor(NamedTuple):
    """A tensor of a file, in pieces.

    Attributes:
      name: in the file.
      spec: its dtype and shape.
      pieces: returns an iterator of its rows, some at a time, in their order.
    """

    name: str
    spec: TensorSpec
    pieces: Callable[[], Iterator[np.ndarray]]

    def whole(self) -> np.ndarray:
        """The tensor in one array."""
        out, start = np.empty(self.spec.shape, self.spec.dtype), 0
        for rows in map(np.atleast_1d, self.pieces()):
            np.atleast_1d(out)[start : start + len(rows)] = rows
            start += len(rows)
        return out


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
    return jnp.dtype(dtype if dtype is not None and is_float else leaf.dtype)


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
      ValueError: while pieces are made, if a matrix in FP8 has a NaN or an inf, or if `dtype`
        cannot hold a number.
    """
    specs = specs_of(entry, leaf, format, dtype)
    is_stored = is_weight(leaf) and leaf.original is None
    pieces = pieces_of(entry, format)

    def values_by(rows_of: Callable[[slice], np.ndarray]) -> FileTensor:
        return FileTensor(entry.name, specs[entry.name], lambda: map(rows_of, pieces))

    def small(name: str, array: Callable[[], np.ndarray]) -> FileTensor:
        return FileTensor(name, specs[name], lambda: iter([array()]))

    if format is None:
        how: How = "dequantized" if is_stored else "as it is"
        return how, [values_by(rows_of(entry, leaf, specs[entry.name].dtype))]
    matrix: _AsItIs | _Cast | None = _as_it_is(entry, leaf, format)
    how = "as it is"
    if matrix is None:
        group = tuple(peers) if format.granularity.in_one and peers else ((entry, leaf),)
        matrix, how = _Cast(entry, leaf, format, group), "cast again" if is_stored else "cast"
    tensors = [
        values_by(matrix.rows),
        small(format.scale_name_of(entry.name), lambda: format.scale_to_file(matrix.scale)),
    ]
    if format.static_inputs:
        of_inputs = np.array(input_scale, np.float32)
        tensors.append(small(format.input_scale_name_of(entry.name), lambda: of_inputs))
    return how, tensors


@dataclasses.dataclass
class _AsItIs:
    """A matrix whose FP8 values go into the file as they are."""

    entry: Entry
    values: Any  # with the axes of the parameter
    scale: np.ndarray  # by cells of the format, [n, k]

    def rows(self, rows: slice) -> np.ndarray:
        values = _read(self.entry, self.values, rows)
        if np.any((values.view(np.uint8) & 0x7F) == 0x7F):  # the codes of NaN in E4M3
            raise _not_finite(self.entry.name)
        return values


def _as_it_is(entry: Entry, leaf: Any, format: Format) -> _AsItIs | None:
    """The FP8 values of a weight. None if there are none, or if the format lacks their scales."""
    if not is_weight(leaf):
        return None
    grid = grid_of(entry, leaf)
    values, scale = leaf.values[0], grid.scales_of(leaf).in_format(format)
    return None if scale is None or values.dtype != VALUES else _AsItIs(entry, values, scale)


@dataclasses.dataclass
class _Cast:
    """A matrix that is cast for the file."""

    entry: Entry
    leaf: Any
    format: Format
    group: tuple[tuple[Entry, Any], ...]  # those that share its scale, and itself

    @functools.cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """The multipliers and the scales by cell, [] or [n, k]."""
        granularity = self.format.granularity
        found = [np.asarray(amax(jnp.asarray(rows), granularity)) for rows in self._pieces()]
        amaxes = np.max(found) if granularity.in_one else np.concatenate(found)
        if not np.all(np.isfinite(amaxes)):
            raise _not_finite(self.entry.name)
        multiplier, scale = _by_rule(amaxes, self.format.rule)
        return np.asarray(multiplier), np.atleast_2d(np.asarray(scale))

    @functools.cached_property
    def _wide(self) -> Callable[[slice], np.ndarray]:
        """Reads rows in high precision."""
        return rows_of(self.entry, self.leaf, None)

    def _pieces(self) -> Iterator[np.ndarray]:
        for entry, leaf in self.group:
            read = rows_of(entry, leaf, None)
            yield from map(read, pieces_of(entry, self.format))

    @property
    def scale(self) -> np.ndarray:
        return self._known[1]

    def rows(self, rows: slice) -> np.ndarray:
        multiplier = self._known[0]
        if multiplier.ndim:
            side = self.format.sides(self.entry.file_shape)[0]
            multiplier = multiplier[rows.start // side : -(-rows.stop // side)]
        return np.asarray(_cast_rows(self._wide(rows), multiplier, self.format.granularity))


@functools.partial(jax.jit, static_argnames="rule")
def _by_rule(amaxes: Array, rule: ScaleRule) -> tuple[Array, Array]:
    return rule.apply(amaxes, E4M3)


@functools.partial(jax.jit, static_argnames="granularity")
def _cast_rows(rows: Array, multiplier: Array, granularity: AbstractGranularity) -> Array:
    """Rows of a matrix in E4M3, under multipliers that are known."""
    cast = Cast(format=E4M3, directions=(Direction(granularity),))
    ((copy,), _) = cast_copies(rows, cast, (KnownScale(multiplier, multiplier),))
    return copy.values


def _not_finite(name: str) -> ValueError:
    return ValueError(
        f"{name} has a value that is NaN or inf, which engines would multiply by. Export a "
        "checkpoint from before the run went wrong."
    )


# Rows of the file in high precision.


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
        return lambda rows: narrowed(entry.name, _read(entry, array, rows), wanted)
    grid, wanted = grid_of(entry, leaf), jnp.dtype(dtype or jnp.float32)
    scales, held = grid.scales_of(leaf), leaf.values[0]

    def dequantize(rows: slice) -> np.ndarray:
        wide = dequantize_rows(_read(entry, held, rows), scales.spread(rows))
        return narrowed(entry.name, wide, wanted)

    return dequantize


def narrowed(name: str, part: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers in another dtype. ValueError if a finite one is too large for it."""
    if part.dtype == dtype:
        return part
    with np.errstate(over="ignore"):
        narrow = part.astype(dtype)
    if not np.array_equal(np.isfinite(narrow), np.isfinite(part)):
        raise ValueError(
            f"{name} has numbers up to {np.nanmax(np.abs(part))}, which dtype={dtype} cannot hold. "
            "Use bfloat16, or leave dtype= out."
        )
    return narrow


def dequantize_rows(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """FP8 values [n, K] times the scale of each, [n, K], in float32."""
    return np.asarray(_dequantize(values, scale))


@jax.jit
def _dequantize(values: Array, scale: Array) -> Array:
    return dequantized(values, factors_of(scale), jnp.float32)
