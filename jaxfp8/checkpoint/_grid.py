"""A weight in FP8 as a matrix of a file: its values, and which scale each of them has.

A `QuantizedWeight` has the axes of its parameter, and its scales have those of a matmul. A file has
matrices [N, K], outputs and inputs, and scales [n, k] by cell.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxfp8._typing import Axes
from jaxfp8.checkpoint._formats import Format
from jaxfp8.checkpoint._names import Entry
from jaxfp8.matmul._tile_view import view_of_weight
from jaxfp8.numerics._formats import E8M0
from jaxfp8.weights._quantized_weight import QuantizedWeight, weight_copies

# Parts of arrays, on any devices.


def read_region(array: Any, region: tuple[slice, ...]) -> np.ndarray:
    """A part of an array, in new memory.

    Shards are read one by one. `np.asarray` of a whole array would leave a copy of it on the host
    for as long as the array lives.

    Raises:
      ValueError: if no device of this process holds the part.
    """
    if not isinstance(array, jax.Array):
        return np.array(np.asarray(array)[region])
    shape = tuple(part.stop - part.start for part in region)
    out, filled = np.empty(shape, array.dtype), 0
    if not out.size:
        return out
    seen: set[Any] = set()
    for shard in array.addressable_shards:
        held = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
        if (key := tuple(held)) in seen:
            continue  # a replica
        seen.add(key)
        starts = [max(start, part.start) for (start, _), part in zip(held, region, strict=True)]
        stops = [min(stop, part.stop) for (_, stop), part in zip(held, region, strict=True)]
        sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
        if any(size <= 0 for size in sizes):
            continue
        local = [start - first for start, (first, _) in zip(starts, held, strict=True)]
        # Starts are operands, so that one program serves all pieces.
        piece = np.asarray(lax.dynamic_slice(shard.data, local, sizes))
        begins = [start - part.start for start, part in zip(starts, region, strict=True)]
        into = (slice(i, i + size) for i, size in zip(begins, sizes, strict=True))
        out[tuple(into)] = piece
        filled += piece.size
    if filled != out.size:
        raise ValueError(
            f"an array {array.dtype}{list(array.shape)} is split over several processes. Gather "
            "it first: jax.experimental.multihost_utils.process_allgather(params, tiled=True)."
        )
    return out


# Scales by cell.


class Scales(NamedTuple):
    """The scales of a matrix [N, K].

    Attributes:
      scale: [n, k] float32 or E8M0.
      rows: [N], for each row the row of `scale`.
      columns: [K], for each column the column of `scale`.
    """

    scale: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @staticmethod
    def of_file(scale: np.ndarray, format: Format, shape: Axes) -> "Scales":
        """The scales [n, k] that a file in this format has for a matrix of this shape."""
        sides = format.sides(shape)
        rows, columns = (np.arange(n) // side for n, side in zip(shape, sides, strict=True))
        return Scales(scale, rows, columns)

    def spread(self, rows: slice) -> np.ndarray:
        """The scale of each value of some rows."""
        return self.scale[np.ix_(self.rows[rows], self.columns)]

    def by_cells(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
        """The scales of other cells, [n, k]. None if values of one cell have several scales.

        Arguments are, for each row and column of the matrix, those of the new scales.
        """
        index = []
        for mine, wanted in ((self.rows, rows), (self.columns, columns)):
            _, first = np.unique(wanted, return_index=True)
            index.append((mine[first], np.unique(np.stack([mine, wanted]), axis=1)))
        (of_rows, pairs_n), (of_columns, pairs_k) = index
        found: np.ndarray = self.scale[np.ix_(of_rows, of_columns)]
        old = self.scale[np.ix_(pairs_n[0], pairs_k[0])]
        return found if np.array_equal(old, found[np.ix_(pairs_n[1], pairs_k[1])]) else None

    def in_format(self, format: Format) -> np.ndarray | None:
        """The scales of the format's cells, [n, k], under which all values stay as they are.

        None if a cell of the format has values of several scales, or if the format cannot hold one
        of the scales.
        """
        shape = len(self.rows), len(self.columns)
        cells = Scales.of_file(self.scale, format, shape)
        found = self.by_cells(cells.rows, cells.columns)
        dtype = E8M0.dtype if format.exponents else np.float32
        return None if found is None else as_dtype(found, dtype)


def as_dtype(scale: np.ndarray, dtype: Any) -> np.ndarray | None:
    """Scales in float32 or E8M0. None if that cannot hold one of them."""
    narrow = scale.astype(dtype)
    same = np.array_equal(narrow.astype(np.float32), scale.astype(np.float32))
    return narrow if same else None


# The weight of a model.


class Grid(NamedTuple):
    """Where the scales of a weight lie in the matrix of a file.

    Attributes:
      lead: how many axes stack layers, before those of the scale.
      at: the indices of this matrix along stacked and batch axes.
      order: of the axes of a scale, without the stacked ones: batch axes, N, K.
      batch: how many of these are batch axes.
      rows, columns: see `Scales`.
    """

    lead: int
    at: tuple[int, ...]
    order: Axes
    batch: int
    rows: np.ndarray
    columns: np.ndarray

    def scales_of(self, weight: QuantizedWeight) -> Scales:
        """The scales of one matrix."""
        array = weight.scales[0]  # those of the forward pass
        own = read_region(array, self._region(array.shape))
        own = own.reshape(own.shape[self.lead :]).transpose(self.order)
        return Scales(own.reshape(int(self.rows[-1]) + 1, -1), self.rows, self.columns)

    def put(self, scales: np.ndarray, matrix: np.ndarray) -> None:
        """Write the scales [n, k] of one matrix into those of the weight, [...]."""
        region = self._region(scales.shape)
        shape = [part.stop - part.start for part in region]
        own = shape[self.lead :]
        ordered = matrix.reshape([own[axis] for axis in self.order])
        back = [self.order.index(axis) for axis in range(len(own))]
        scales[region] = ordered.transpose(back).reshape(shape)

    def _region(self, shape: Axes) -> tuple[slice, ...]:
        region = [slice(i, i + 1) for i in self.at[: self.lead]]
        region += [slice(0, size) for size in shape[self.lead :]]
        of_batch = zip(self.order[: self.batch], self.at[self.lead :], strict=False)
        for axis, i in of_batch:
            i = i if shape[self.lead + axis] > 1 else 0
            region[self.lead + axis] = slice(i, i + 1)
        return tuple(region)


def grid_of(entry: Entry, weight: QuantizedWeight) -> Grid:
    """Where the scales of a weight lie in the matrix of a file.

    Raises:
      ValueError: if the matrix has the axes of the weight in another order than its matmul.
    """
    lead, names = weight.stacked, entry.axes.of_parameter
    view = view_of_weight(weight.recipe, weight.axes, weight.shape[lead:])
    granularity = weight_copies(weight.recipe, view.geometry)[0].granularity
    counts = weight.scales[0].shape[lead:]
    at = [entry.at.get(name, 0) for name in names[:lead]]
    sizes, shape = entry.axes.sizes(entry.shape), entry.file_shape
    # For each axis of the view the axes of the weight that are merged into it.
    ends = [0, *itertools.accumulate(view.of_w.counts)]
    merged = [
        tuple(names[lead + axis] for axis in view.of_w.order[start:end])
        for start, end in itertools.pairwise(ends)
    ]
    groups = entry.axes.of_file if len(shape) == 2 else ((), ())
    of_n, of_k = (_axes_of(merged, group) for group in groups)
    rest = [i for i in range(len(merged)) if i not in (of_n or ()) and i not in (of_k or ())]
    stacked = [*names[:lead], *sum((merged[i] for i in rest), ())]
    contracted = view.geometry.fprop.sides[1].contracted
    if (
        not of_n
        or not of_k
        or set(of_k) != set(contracted)
        or set(stacked) != set(entry.axes.stacked)
    ):
        raise ValueError(
            f"{entry.path} is {weight}, whose matmul has the axes {merged} after {lead} stacked "
            f"ones. The tensor {entry.name} has the axes {entry.axes.of_file}. Name the axes of "
            "the file in the order of the matmul, or take the weight before its cast. Layers of "
            "nn.scan are cast by rules=[(..., fp8.weights.WeightAxes(stacked=1))]."
        )
    if not counts:
        none = (np.zeros(size, np.int64) for size in shape)
        return Grid(lead, tuple(at), (), 0, *none)
    sides = granularity.along(len(merged))

    def cells(axes: list[int]) -> np.ndarray:
        ids = np.zeros(1, np.int64)
        for i in axes:
            along = np.arange(math.prod(sizes[name] for name in merged[i]))
            along = along // sides[i] if counts[i] > 1 else along * 0
            ids = (ids[:, None] * counts[i] + along).ravel()
        return ids

    at += [entry.at[merged[i][0]] for i in rest if merged[i]]
    rest.sort(key=lambda i: not merged[i])  # new axes of the view, which have one index, last
    return Grid(lead, tuple(at), (*rest, *of_n, *of_k), len(rest), cells(of_n), cells(of_k))


def _axes_of(merged: list[tuple[str, ...]], group: tuple[str, ...]) -> list[int] | None:
    """The axes whose names, one after the other, are those of a group. None if none are."""
    found: list[int] = []
    while group:
        fits = [i for i, each in enumerate(merged) if each and group[: len(each)] == each]
        if not fits:
            return None
        found.append(fits[0])
        group = group[len(merged[fits[0]]) :]
    return found
