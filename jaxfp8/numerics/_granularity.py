"""Granularity: which values share one scale.

The values that share one scale are a scale cell. A scale has the rank of its values (per axis, per
tile), or no axes (per tensor). Tiles are in `_per_block.py`.
"""

import abc
import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp

from jaxfp8._pytrees import register_value
from jaxfp8._typing import Array, Axes


class AbstractGranularity(abc.ABC):
    """Which values of an array share one scale.

    Exactly one of `in_one`, `in_rows` and `in_tiles` is True. Other code reads these attributes and
    not the class.
    """

    in_one: ClassVar[bool] = False
    """One scale for the whole array, of shape []."""
    in_rows: ClassVar[bool] = False
    """One scale for each index of some axes."""
    in_tiles: ClassVar[bool] = False
    """One scale for each tile."""

    def along(self, ndim: int) -> Axes:
        """The sides of a tile of an array of `ndim` axes, one for each axis; 1 without tiles."""
        return (1,) * ndim

    def has_cells_along(self, axis: int, ndim: int) -> bool:
        """Whether scales vary along an axis of an array of `ndim` axes, or one scale spans it."""
        # Of two values along the axis, does each have its own scale?
        return self.scale_shape((2,) * ndim)[axis] == 2

    @property
    def is_square(self) -> bool:
        """Whether a tile is longer than 1 along two axes: one copy serves both directions."""
        return False

    @abc.abstractmethod
    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of an array of this shape."""

    @abc.abstractmethod
    def maximum(self, magnitude: Array) -> Array:
        """The largest magnitude of each scale cell, in the shape of the scale; 0 if empty."""

    def expand(self, scale: Array, shape: tuple[int, ...]) -> Array:
        """A scale, or an array of its shape, in a form that broadcasts to values of this shape."""
        del shape
        return scale

    def for_matmul(self, kept: Axes, ndim: int) -> "AbstractGranularity":
        """The granularity of an operand of a matmul that keeps the axes `kept`, ascending."""
        del kept, ndim
        return self

    @abc.abstractmethod
    def transpose(self, permutation: Axes) -> "AbstractGranularity":
        """The granularity of the values after `jnp.transpose(values, permutation)`."""


@register_value
@dataclasses.dataclass(frozen=True)
class PerTensor(AbstractGranularity):
    """One scale for the whole array, of shape [].

    Example:
      >>> PerTensor().scale_shape((8, 16))
      ()
    """

    in_one: ClassVar[bool] = True

    def has_cells_along(self, axis: int, ndim: int) -> bool:
        del axis, ndim
        return False

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        del shape
        return ()

    def maximum(self, magnitude: Array) -> Array:
        return jnp.max(magnitude, initial=0.0)

    def transpose(self, permutation: Axes) -> "PerTensor":
        del permutation
        return self


@dataclasses.dataclass(frozen=True, init=False)
class PerAxis(AbstractGranularity):
    """One scale for each index of the named axes. These axes are kept, the others share a scale.

    `PerAxis(0)` of an array [M, K] has a scale [M, 1]: one for each row.

    Attributes:
      axes: the axes to keep. A negative one counts from the last axis.

    Example:
      >>> PerAxis(0).scale_shape((8, 16))
      (8, 1)
    """

    in_rows: ClassVar[bool] = True
    axes: Axes

    def __init__(self, *axes: int) -> None:
        if not axes or not all(isinstance(axis, int) for axis in axes):
            raise ValueError(
                f"PerAxis takes the axes to keep as integers, got {axes}. Write PerAxis(0) for one "
                "scale for each row, PerTensor() for one scale in all."
            )
        object.__setattr__(self, "axes", tuple(axes))

    def __repr__(self) -> str:
        return f"PerAxis{self.axes}" if len(self.axes) > 1 else f"PerAxis({self.axes[0]})"

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # few, and hashable
    def _kept(self, ndim: int) -> frozenset[int]:
        bad = [axis for axis in self.axes if not -ndim <= axis < ndim]
        kept = frozenset(axis % ndim for axis in self.axes) if ndim else frozenset()
        if bad or len(kept) != len(self.axes):
            raise ValueError(
                f"granularity {self!r} does not fit an array of {ndim} axes. An axis is out of "
                "range or named twice. In PerAxis, name each axis to keep once, as one of "
                f"{list(range(ndim))}."
            )
        return kept

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        kept = self._kept(len(shape))
        return tuple(size if axis in kept else 1 for axis, size in enumerate(shape))

    def maximum(self, magnitude: Array) -> Array:
        kept = self._kept(magnitude.ndim)
        inside = tuple(axis for axis in range(magnitude.ndim) if axis not in kept)
        return jnp.max(magnitude, axis=inside, initial=0.0, keepdims=True)

    def transpose(self, permutation: Axes) -> "PerAxis":
        kept = self._kept(len(permutation))
        return PerAxis(*(new for new, old in enumerate(permutation) if old in kept))


register_value(PerAxis, fields=("axes",), make=lambda axes: PerAxis(*axes))


@register_value
@dataclasses.dataclass(frozen=True)
class PerRow(AbstractGranularity):
    """One scale for each row that a matmul contracts. For recipes, which do not name axes.

    A matmul replaces it by `PerAxis` of the axes that it does not contract. Scales are then
    constant in each sum over contracted axes, so they can multiply its result. An array cannot be
    quantized with `PerRow()`.

    Example:
      >>> PerRow().for_matmul((0, 1), ndim=3)
      PerAxis(0, 1)
    """

    in_rows: ClassVar[bool] = True

    def _refuse(self) -> ValueError:
        return ValueError(
            "granularity PerRow() works inside a recipe only. For an array use PerAxis(the axes to "
            "keep)."
        )

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        raise self._refuse()

    def maximum(self, magnitude: Array) -> Array:
        raise self._refuse()

    def expand(self, scale: Array, shape: tuple[int, ...]) -> Array:
        raise self._refuse()

    def for_matmul(self, kept: Axes, ndim: int) -> AbstractGranularity:
        del ndim
        # A vector whose only axis is contracted is one row, so it has one scale.
        return PerAxis(*kept) if kept else PerTensor()

    def transpose(self, permutation: Axes) -> AbstractGranularity:
        raise self._refuse()
