"""What every linen module with an FP8 matmul has: a recipe, the options of its matmul, its key."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax import lax

from jaxfp8._typing import Array, PyTree
from jaxfp8.ops._arguments import check_prologue
from jaxfp8.ops._options import MatmulOptions, options_of
from jaxfp8.plan._kernels import Kernels
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.recipes._per_tensor import delayed
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import manual_axes
from jaxfp8.sharding._shard import Shard

KEYS = "fp8"
"""The name of the PRNG sequence that stochastic rounding takes its keys from."""


class MatmulModule(nn.Module):
    """A module with an FP8 matmul. These fields follow the fields of flax in this order.

    Attributes:
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, kernels: see `fp8.dot_general`.
    """

    recipe: Recipe = delayed()
    reduce_axes: tuple[str, ...] | None = None
    x_shard: Shard | None = None
    w_shard: Shard | None = None
    kernels: Kernels | None = None

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        super().__post_init__()

    @nn.nowrap
    def matmul_options(self) -> MatmulOptions:
        """What the matmul takes besides operands and state, at this call.

        Outside of `jax.shard_map`, `init` has whole arrays. So it leaves out the shards.
        """
        options = MatmulOptions(**options_of(self))
        if self.is_initializing():
            for name in ("x_shard", "w_shard"):
                shard: Any = options[name]
                if shard is not None and not is_part(shard):
                    options[name] = None
        if self.recipe.needs_key and (self.has_rng(KEYS) or self.is_initializing()):
            options["key"] = self.make_rng(KEYS)
        return options


def is_part(shard: Shard) -> bool:
    """Whether an array with this shard is one device's part of it here, inside `jax.shard_map`."""
    return set(shard.axis_names) <= set(manual_axes())


class KernelModule(MatmulModule):
    """A layer with a kernel. Inside `jax.shard_map` it may have one device's part of the kernel.

    flax compares a kernel with the shape that `init_fn` would give it. So `init_fn` has to give the
    shape of the part there.
    """

    @nn.nowrap
    def param(
        self, name: str, init_fn: Callable[..., Any], *init_args: Any, **arguments: Any
    ) -> Any:
        """As in `flax.linen.Module`."""
        if name == "kernel" and self.w_shard is not None and is_part(self.w_shard):
            init_fn = _part_of(init_fn, self.w_shard)
        return super().param(name, init_fn, *init_args, **arguments)


class PrologueModule(KernelModule):
    """A layer that can compute a prologue inside the cast of its input.

    Attributes:
      prologue: makes the left operand from the arrays of `inputs`; None if `inputs` is one array.
    """

    prologue: AbstractPrologue | None = None

    def __post_init__(self) -> None:
        check_prologue("inputs", self.prologue)
        super().__post_init__()


def _part_of(init_fn: Callable[..., PyTree], shard: Shard) -> Callable[..., PyTree]:
    """An initializer that makes what `init_fn` makes, and keeps the part of this device.

    So the parts of all devices are parts of the same kernel.
    """

    def part(kernel: Array) -> Array:
        axis, devices = shard.axis % kernel.ndim, lax.axis_size(shard.axis_names)
        if kernel.shape[axis] % devices:
            raise ValueError(
                f"w_shard={shard!r}: axis {axis} of a kernel {list(kernel.shape)} cannot be split "
                f"into {devices} equal parts; make it a multiple of {devices}."
            )
        size = kernel.shape[axis] // devices
        start = lax.axis_index(shard.axis_names) * size
        return lax.dynamic_slice_in_dim(kernel, start, size, axis)

    return lambda *arguments, **options: jax.tree.map(part, init_fn(*arguments, **options))
