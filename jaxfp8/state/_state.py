"""Quantizer state: the scales and amaxes that delayed scaling keeps between steps.

State is a separate pytree, not part of parameters or gradients. Inside a loss that
`fp8.value_and_grad` differentiates, a state has a probe. The cotangent of the probe is the ledger
of the amaxes that were seen. Outside of such a loss a state has no probe.

Tree structure, shapes and dtypes never change from step to step. An unset scale is 0, not a missing
leaf.
"""

import dataclasses
import functools
from typing import Literal

import jax

from jaxfp8._typing import Array
from jaxfp8.recipes._recipe import Row


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ledger", "known"],
    meta_fields=["reduce_axes", "channel"],
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """The part of a state that exists only inside a differentiated loss.

    Attributes:
      ledger: f32[..., BINS, R] zeros. Its cotangent holds the amaxes. None in a frozen state.
      known: f32[..., 2, R], the multiplier and the scale of each row (`known_scales`). A loop over
        stacked layers slices one array for both.
      reduce_axes: mesh axes that the caller named, because types do not give them (static).
      channel: "gradient" if `in_gradient_channel` made the probe; None if `value_and_grad` did
        (static).
    """

    ledger: Array | None
    known: Array
    reduce_axes: tuple[str, ...] | None
    channel: Literal["gradient"] | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "amax_history", "nonfinite_steps", "fingerprint", "probe"],
    meta_fields=["rows", "frozen", "settled"],
)
@dataclasses.dataclass(frozen=True)
class MatmulState:
    """Quantizer state of one matmul, with its gradients: fprop, dgrad and wgrad.

    There are R rows, one for each tensor with a stateful quantizer. H is the history length.
    Leading axes stack layers or experts.

    Attributes:
      scale: f32[..., R], the factor from FP8 values to real values; 0 = unset.
      amax_history: f32[..., R, H]; slot 0 is the staging slot, slots 1 to H-1 run from oldest to
        newest.
      nonfinite_steps: f32[..., R], the number of steps whose amax was inf or NaN.
      fingerprint: f32[..., R], identifies the tensor and the quantizer of each row
        (`Row.fingerprint`). A file holds arrays only, so it needs this one to identify the rows. No
        step changes it.
      probe: None, except inside a differentiated loss.
      rows: the tensor and the quantizer of each row (static).
      frozen: whether scales are fixed and no amaxes are collected (static).
      settled: whether all scales are known to be set (static), see `fp8.settle`. A program that is
        compiled for a settled state has no reads for scales that are unset.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> state.scale.shape, state.amax_history.shape
      ((3,), (3, 16))
    """

    scale: Array
    amax_history: Array
    nonfinite_steps: Array
    fingerprint: Array
    probe: Probe | None
    rows: tuple[Row, ...]
    frozen: bool = False
    settled: bool = False

    def __repr__(self) -> str:
        names = " ".join(row.tensor for row in self.rows)
        leaves = (f"{name}={getattr(self, name)}" for name in LEAVES if name != "fingerprint")
        marks = [mark for mark in ("frozen", "settled") if getattr(self, mark)]
        which = f" ({', '.join(marks)})" if marks else ""
        return f"MatmulState of {names}{which}: {', '.join(leaves)}"


LEAVES = ("scale", "amax_history", "nonfinite_steps", "fingerprint")
"""The arrays of a state between steps. A checkpoint saves these."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["amax"], meta_fields=["rows"])
@dataclasses.dataclass(frozen=True)
class SeenAmax:
    """The largest amaxes that a matmul saw since the last commit: f32[..., R].

    0 means that no amax was seen. inf means that an amax was not finite.
    """

    amax: Array
    rows: tuple[Row, ...]


def is_state(node: object) -> bool:
    """Whether a tree node is the state of one matmul.

    Example:
      >>> is_state(None)
      False
    """
    return isinstance(node, MatmulState)


def is_node(node: object) -> bool:
    """Whether a tree node is a `MatmulState` or a `SeenAmax`.

    Example:
      >>> is_node(())
      False
    """
    return isinstance(node, MatmulState | SeenAmax)
