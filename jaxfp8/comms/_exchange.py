"""A sum over devices in two exchanges: slices to their device, a sum, the sum to all devices."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.sharding._gather import in_bytes

_UNROLLED = 64  # additions in one kernel; more devices are added in a loop of such kernels


@dataclasses.dataclass(frozen=True)
class Slices:
    """How an array is cut into one slice of groups for each device.

    Attributes:
      shape: the shape of the array.
      devices: the number of slices.
      group: the number of values of a group. Slices are padded with zeros to whole groups.
      axis: None cuts the flattened array. A number cuts this array axis, so that a slice is a shard
        of it.

    Example:
      >>> import jax.numpy as jnp
      >>> Slices((3, 5), devices=2, group=4).cut(jnp.ones((3, 5))).shape
      (2, 2, 4)
    """

    shape: tuple[int, ...]
    devices: int
    group: int
    axis: int | None = None

    def cut(self, x: Array) -> Array:
        """The slices of x [shape]: [devices, groups, group]."""
        if self.axis is not None:
            before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
            x = jnp.moveaxis(
                x.reshape(*before, self.devices, self._rows, *after), self.axis, 0
            ).reshape(self.devices, -1)
            groups = -(-x.shape[1] // self.group)
            x = jnp.pad(x, ((0, 0), (0, groups * self.group - x.shape[1])))
        else:
            groups = -(-x.size // (self.devices * self.group))
            x = jnp.pad(x.reshape(-1), (0, self.devices * groups * self.group - x.size))
        return x.reshape(self.devices, groups, self.group)

    def join(self, slices: Array) -> Array:
        """The array [shape] of all slices, [devices * groups, group]. It needs `axis=None`."""
        return slices.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def shard(self, own: Array) -> Array:
        """The shard of this device, of its slice [groups, group]. It needs an `axis`."""
        assert self.axis is not None
        shape = (*self.shape[: self.axis], self._rows, *self.shape[self.axis + 1 :])
        return own.reshape(-1)[: math.prod(shape)].reshape(shape)

    @property
    def _rows(self) -> int:
        assert self.axis is not None
        return self.shape[self.axis] // self.devices


def exchange(slices: Array, names: tuple[str, ...]) -> Array:
    """Sends slice i [devices, ...] to device i. Row i of the result came from device i."""
    return in_bytes(lambda x: lax.all_to_all(x, names, 0, 0, tiled=True), slices)


def gather(own: Array, names: tuple[str, ...]) -> Array:
    """The slices [n, ...] of all devices, concatenated: [devices * n, ...], the same everywhere."""
    # `to` makes the type say that all devices have the same result.
    return in_bytes(lambda x: lax.all_gather(x, names, axis=0, tiled=True, to="invarying"), own)


def sum_in_order(received: tuple[Array, ...], value: Callable[..., Array]) -> Array:
    """The sum of `value(*row)` over the rows of the arrays [devices, ...], from the first row on.

    A sum in a fixed order has the same bits in every run. `jnp.sum` leaves the order to XLA.
    """

    def add(total: Array, row: tuple[Array, ...]) -> tuple[Array, None]:
        return total + value(*row), None

    first = value(*(each[0] for each in received))
    rest = tuple(each[1:] for each in received)
    unroll = max(1, min(rest[0].shape[0], _UNROLLED))
    return lax.scan(add, first, rest, unroll=unroll)[0]
