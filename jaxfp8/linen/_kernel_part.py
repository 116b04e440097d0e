"""KernelPart: a linen layer that is applied inside `jax.shard_map` to one device's part of its kernel."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax import lax

from jaxfp8._typing import Array, PyTree
from jaxfp8.sharding._amax import manual_axes
from jaxfp8.sharding._shard import Shard


def shards(module: nn.Module, *given: Shard | None) -> tuple[Shard | None, ...]:
    """The shards of a module's operands. Outside of `jax.shard_map`, `init` has whole arrays, wherever they will lie."""
    return tuple(None if shard and module.is_initializing() and not _is_part(shard) else shard for shard in given)


def _is_part(shard: Shard) -> bool:
    """Whether an array that is split so is one device's part here: inside `jax.shard_map`."""
    return set(shard.axis_names) <= set(manual_axes())


class KernelPart(nn.Module):
    """flax compares a kernel with the shape that a layer would give it: where it is split, with that of the part.

    Attributes:
      rhs_shard: how the kernel is split.
    """

    rhs_shard: Shard | None = None

    @nn.nowrap
    def param(self, name: str, init_fn: Callable[..., Any], *init_args: Any, **arguments: Any) -> Any:
        """As in `flax.linen.Module`."""
        if name == "kernel" and self.rhs_shard is not None and _is_part(self.rhs_shard):
            init_fn = _part_of(init_fn, self.rhs_shard)
        return super().param(name, init_fn, *init_args, **arguments)


def _part_of(init_fn: Callable[..., PyTree], shard: Shard) -> Callable[..., PyTree]:
    """The part of this device of what `init_fn` makes, so that every device has a part of the same kernel."""

    def part(kernel: Array) -> Array:
        axis, devices = shard.axis % kernel.ndim, lax.axis_size(shard.axis_names)
        if kernel.shape[axis] % devices:
            raise ValueError(
                f"rhs_shard={shard!r}: axis {axis} of a kernel {list(kernel.shape)} cannot be split into {devices} equal "
                f"parts; make it a multiple of {devices}."
            )
        size = kernel.shape[axis] // devices
        return lax.dynamic_slice_in_dim(kernel, lax.axis_index(shard.axis_names) * size, size, axis)

    return lambda *arguments, **options: jax.tree.map(part, init_fn(*arguments, **options))
