"""`Place`: how an operand is placed in the mesh. Collectives that move FP8 values as bytes.

`_shard.py` has the place of an operand that is split.
"""

import abc
import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.numerics._granularity import AbstractGranularity

# FP8 values and scales, moved as bytes.


def in_bytes(collective: Callable[[Array], Array], x: Array) -> Array:
    """A collective on x [...], which sends FP8 values and E8M0 scales as bytes.

    XLA:CPU would widen FP8 values to float16 and lose the sign of a zero. It would widen E8M0
    scales to float32, flush the smallest scale to zero, and convert that zero to NaN.
    """
    if x.dtype.itemsize > 1:
        return collective(x)
    return lax.bitcast_convert_type(collective(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def take_rows(x: Array, index: Array, fill: float = 0.0) -> Array:
    """Entries of x [n, ...] at an index of any shape, moved as bytes. From n on they are `fill`."""
    if x.dtype.itemsize > 1:
        return x.at[index].get(mode="fill", fill_value=fill)
    filler = int(np.asarray(fill, x.dtype).view(np.uint8))
    taken = lax.bitcast_convert_type(x, jnp.uint8).at[index]
    return lax.bitcast_convert_type(taken.get(mode="fill", fill_value=filler), x.dtype)


# How an operand of a matmul is placed in the mesh: whole, or split so that the matmul gathers it.


class Place(abc.ABC):
    """How an operand is placed in the mesh, and the collectives that the placement needs."""

    @property
    @abc.abstractmethod
    def manual_axes(self) -> frozenset[str]:
        """The manual mesh axes that split the operand. Only `jax.shard_map` has some."""

    @abc.abstractmethod
    def whole_shape(self, shape: Axes) -> Axes:
        """The global shape of an array whose shape in the traced function is `shape`."""

    @abc.abstractmethod
    def shard_shape(self, shape: Axes) -> Axes:
        """The shape in the traced function of an array whose global shape is `shape`."""

    @abc.abstractmethod
    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        """The mesh axes to reduce an amax over, because scale cells of the array span devices.

        ValueError if a tile would.
        """

    @abc.abstractmethod
    def along(self, axis_of: Callable[[int], int]) -> "Place":
        """The place of a view of the array. `axis_of` maps axes of the array to the view's."""

    @abc.abstractmethod
    def gather(self, x: Array) -> Array:
        """The whole array, gathered from its shards x [...]."""

    @abc.abstractmethod
    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        """The whole operand, gathered from its shards. FP8 values are sent as bytes."""

    @abc.abstractmethod
    def stored(self, x: Array) -> Array:
        """A shard x [...] of a parameter, read in the layout in which it is stored."""

    @abc.abstractmethod
    def scatter(self, product: Array) -> Array:
        """The result of a matmul, summed over the mesh axes. Each device keeps its shard of it."""


@dataclasses.dataclass(frozen=True)
class Whole(Place):
    """An operand without a `Shard`. It is whole here, or the compiler decides when to gather it."""

    @property
    def manual_axes(self) -> frozenset[str]:
        return frozenset()

    def whole_shape(self, shape: Axes) -> Axes:
        return shape

    def shard_shape(self, shape: Axes) -> Axes:
        return shape

    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        del granularity, shape
        return frozenset()

    def along(self, axis_of: Callable[[int], int]) -> Place:
        del axis_of
        return self

    def gather(self, x: Array) -> Array:
        return x

    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        return operand

    def stored(self, x: Array) -> Array:
        return x

    def scatter(self, product: Array) -> Array:
        return product
