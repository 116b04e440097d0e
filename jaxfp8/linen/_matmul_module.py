"""The base class of linen modules with an FP8 matmul: the recipe, the options and the PRNG key."""

from collections.abc import Callable
from typing import Any, Unpack

import flax.linen as nn
import jax
from jax import lax

from jaxfp8._typing import Array, PyTree, Tensor
from jaxfp8.matmul._options import (
    LayerOptions,
    MatmulOptions,
    StateChannel,
    check_save_original,
    check_state_channel,
    options_of,
)
from jaxfp8.plan._kernels import Kernels
from jaxfp8.recipes._presets import check_recipe, delayed
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import manual_axes
from jaxfp8.sharding._shard import Shard

_KEYS = "fp8"
"""Name of the PRNG sequence from which stochastic rounding takes its keys."""


class MatmulModule(nn.Module):
    """A module with an FP8 matmul. In a layer these fields follow flax's fields, in this order."""

    recipe: Recipe = delayed()
    reduce_axes: tuple[str, ...] | None = None
    x_shard: Shard | None = None
    w_shard: Shard | None = None
    y_shard: Shard | None = None
    kernels: Kernels | None = None
    state_channel: StateChannel | None = None
    save_original: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)
        super().__post_init__()

    @nn.nowrap
    def matmul_options(self, **given: Unpack[MatmulOptions]) -> MatmulOptions:
        """The options of the matmul at this call, with those that the call is given."""
        return matmul_options(self, self.recipe, options_of(self), **given)


class ExpertsModule(nn.Module, kw_only=True):
    """A layer of experts, with a recipe and the options that its matmuls take."""

    reduce_axes: tuple[str, ...] | None = None
    kernels: Kernels | None = None
    state_channel: StateChannel | None = None
    save_original: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)
        super().__post_init__()


def _check(module: Any) -> None:
    check_recipe(module.recipe)
    check_state_channel(module.state_channel)
    check_save_original(module.save_original)


def matmul_options(
    module: nn.Module, recipe: Recipe, kept: LayerOptions, **given: Unpack[MatmulOptions]
) -> MatmulOptions:
    """The options of a matmul that runs in `module`: those it keeps, and those of the call."""
    options: MatmulOptions = {**kept, **given}
    options["name"] = "/".join(module.path)
    if module.is_initializing():
        # Outside of `jax.shard_map` arrays of `init` are not split, and there may be no mesh.
        for name in ("x_shard", "w_shard", "y_shard"):
            shard: Any = options.get(name)
            if shard is not None and not is_local_shard(shard):
                options[name] = None
    if recipe.needs_key and (module.has_rng(_KEYS) or module.is_initializing()):
        options["key"] = module.make_rng(_KEYS)
    return options


def is_local_shard(shard: Shard) -> bool:
    """Whether this code runs inside `jax.shard_map` over the axes of the shard.

    An array with this shard is then one device's shard, not the global array.
    """
    return set(shard.axis_names) <= set(manual_axes())


def init_local_shard(init_fn: Callable[..., PyTree], shard: Shard) -> Callable[..., PyTree]:
    """An initializer that calls `init_fn` and returns this device's shard of its result.

    All devices draw the same global kernel, so their shards belong to one kernel.
    """

    def part(kernel: Array) -> Array:
        axis, devices = shard.axis % kernel.ndim, lax.axis_size(shard.axis_names)
        if kernel.shape[axis] % devices:
            raise ValueError(
                f"w_shard={shard!r}: axis {axis} of a kernel {list(kernel.shape)} cannot be split "
                f"into {devices} equal shards. Make its size a multiple of {devices}."
            )
        size = kernel.shape[axis] // devices
        start = lax.axis_index(shard.axis_names) * size
        return lax.dynamic_slice_in_dim(kernel, start, size, axis)

    return lambda *arguments, **options: jax.tree.map(part, init_fn(*arguments, **options))
