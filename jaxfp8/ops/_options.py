"""The options of a matmul: its arguments besides operands, recipe and state.

A new option is a new field of `Options`, and of the `TypedDict` of the functions that take it. An
option in `LayerOptions` is also a field of `linen.MatmulModule`.
"""

import dataclasses
from typing import Any, Literal, TypeAlias, TypedDict

from jaxfp8._call import check_options, option_names
from jaxfp8._typing import Array, Tensor
from jaxfp8.plan._kernels import Kernels
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.sharding._shard import Shard

StateChannel: TypeAlias = Literal["gradient"]
"""How quantizer state leaves the backward pass, if `fp8.value_and_grad` does not collect it."""


def check_state_channel(channel: object) -> None:
    """Raise ValueError unless the argument is a channel or None.

    Example:
      >>> check_state_channel("gradient")
    """
    if channel is not None and channel != "gradient":
        raise ValueError(
            f'state_channel={channel!r} must be None, for fp8.value_and_grad, or "gradient", for '
            "jax.value_and_grad over all variables and a loop that overwrites states with their "
            "gradients."
        )


def check_save_original(tensors: object) -> None:
    """Raise ValueError unless the argument is None or a tuple of "x" and "w".

    Example:
      >>> check_save_original(("x",))
    """
    if tensors is not None and not (isinstance(tensors, tuple) and set(tensors) <= {"x", "w"}):
        raise ValueError(
            f'save_original={tensors!r} must be a tuple of the names "x" and "w": the operands '
            'that the backward pass casts again from high precision, for instance ("x",).'
        )


class UnshardedOptions(TypedDict, total=False):
    """The options of a layer whose matmul takes no shards; see `fp8.ragged_dot`."""

    reduce_axes: tuple[str, ...] | None
    kernels: Kernels | None
    state_channel: StateChannel | None
    save_original: tuple[Tensor, ...] | None


class LayerOptions(UnshardedOptions, total=False):
    """The options that a layer has as attributes, for its matmul; see `fp8.dot_general`."""

    x_shard: Shard | None
    w_shard: Shard | None
    y_shard: Shard | None


class MatmulOptions(LayerOptions, total=False):
    """The options of every matmul; see `fp8.dot_general`."""

    out_sharding: Any
    key: Array | None
    prologue: AbstractPrologue | None
    name: str | None


class DotOptions(MatmulOptions, total=False):
    """The options of `dot_general` and `dot`; see `fp8.dot_general`."""

    bias: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The options of one call, with their defaults."""

    reduce_axes: tuple[str, ...] | None = None
    x_shard: Shard | None = None
    w_shard: Shard | None = None
    y_shard: Shard | None = None
    kernels: Kernels | None = None
    state_channel: StateChannel | None = None
    save_original: tuple[Tensor, ...] | None = None
    out_sharding: Any = None
    key: Array | None = None
    prologue: AbstractPrologue | None = None
    bias: Array | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        check_state_channel(self.state_channel)
        check_save_original(self.save_original)


def read_options(function: str, known: type, options: Any) -> Options:
    """The options of a call.

    Args:
      function: the name of the function, for the message.
      known: the TypedDict of its options.
      options: the keyword arguments that the user passed.

    Raises:
      TypeError: for an option that the function does not have.

    Example:
      >>> read_options("dot", DotOptions, {"x_shard": None}).bias is None
      True
    """
    check_options(function, known, options)
    return Options(**options)


def options_of(layer: Any) -> LayerOptions:
    """The options that a layer has as attributes. Attributes have the names of the options.

    Example:
      >>> import jaxfp8 as fp8
      >>> layer = fp8.linen.FP8Dense(4, kernels=fp8.Kernels("h200"))
      >>> options_of(layer)["kernels"]
      Kernels('h200')
    """
    given: Any = {name: getattr(layer, name) for name in option_names(LayerOptions)}
    return LayerOptions(**given)
