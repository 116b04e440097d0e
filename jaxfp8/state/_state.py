"""Quantizer state: the scales and amaxes that delayed scaling keeps, and trees of them.

State is a separate pytree, not part of parameters or gradients. Inside a loss that
`fp8.value_and_grad` differentiates, a state has a probe. The cotangent of the probe is the ledger
of the amaxes that were seen. Outside of such a loss a state has no probe.

Tree structure, shapes and dtypes never change from step to step. An unset scale is 0, not a missing
leaf.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._typing import Array, FP8StateError, PyTree
from jaxfp8.recipes._recipe import Row

# The state of one matmul, and what a step saw of it.


@register_node
@dataclasses.dataclass(frozen=True)
class Probe:
    """The part of a state that exists only inside a differentiated loss."""

    ledger: Array | None  # f32[..., BINS, R] zeros; its cotangent has the amaxes. None if frozen
    # f32[..., 2R], see `known_scales`. A loop over stacked layers slices one array for both.
    known: Array
    # Named by the caller, because types do not give them.
    reduce_axes: tuple[str, ...] | None = dataclasses.field(metadata=STATIC)
    # None if `value_and_grad` made the probe.
    channel: Literal["gradient"] | None = dataclasses.field(default=None, metadata=STATIC)


@register_node
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
    rows: tuple[Row, ...] = dataclasses.field(metadata=STATIC)
    frozen: bool = dataclasses.field(default=False, metadata=STATIC)
    settled: bool = dataclasses.field(default=False, metadata=STATIC)

    def __repr__(self) -> str:
        names = " ".join(row.tensor for row in self.rows)
        leaves = (f"{name}={getattr(self, name)}" for name in LEAVES if name != "fingerprint")
        marks = [mark for mark in ("frozen", "settled") if getattr(self, mark)]
        which = f" ({', '.join(marks)})" if marks else ""
        return f"MatmulState of {names}{which}: {', '.join(leaves)}"


OF_READ_MATMULS = "fp8_matmuls"
"""The attribute of an nnx model with the matmuls of its own code, by the path of the parameter."""
LEAVES = ("scale", "amax_history", "nonfinite_steps", "fingerprint")
"""The arrays of a state between steps. A checkpoint saves these."""


@register_node
@dataclasses.dataclass(frozen=True)
class SeenAmax:
    """The largest amaxes that a matmul saw since the last commit: f32[..., R].

    0 means that no amax was seen. inf means that an amax was not finite.
    """

    amax: Array
    rows: tuple[Row, ...] = dataclasses.field(metadata=STATIC)


def is_state(node: object) -> bool:
    """Whether a tree node is the state of one matmul."""
    return isinstance(node, MatmulState)


def is_node(node: object) -> bool:
    """Whether a tree node is a `MatmulState` or a `SeenAmax`."""
    return isinstance(node, MatmulState | SeenAmax)


# Trees of states: mapping over them, and the check that they hold only states.


def map_states(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` over states. Anything else in the tree is an error."""
    check_tree(tree)
    return jax.tree.map(function, tree, *rest, is_leaf=is_node)


RESTORED = (
    "If it was restored from a file without a target (Orbax, msgpack), it is a tree of dicts. Pass "
    "it through fp8.check_state(restored, like=fresh_state) first."
)


def check_tree(tree: PyTree) -> None:
    """Raise FP8StateError unless the tree holds states and nothing else."""
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node):
        if isinstance(node, SeenAmax):
            raise FP8StateError(
                "expected quantizer state, found SeenAmax (the amaxes that a step saw) at "
                f"{jax.tree_util.keystr(path) or 'the top of the tree'}. Pass fp8.commit(state, "
                "seen)."
            )
        if not isinstance(node, MatmulState):
            raise FP8StateError(
                f"expected quantizer state, found {describe_node(node)} at "
                f"{jax.tree_util.keystr(path) or 'the top of the tree'}. Pass only the state from "
                "fp8.init_state, from variables[COLLECTION] or from the last step. "
                f"{RESTORED}"
            )


def describe_node(node: object) -> str:
    """How a message shows an object that is no state."""
    if node is None or isinstance(node, str | int | float):
        return repr(node)
    if isinstance(node, dict):
        return f"a dict with the keys {list(node)[:6]}"
    shape = getattr(node, "shape", None)
    return f"an object of type {type(node).__name__}" + (
        f" of shape {list(shape)}" if shape is not None else ""
    )


def freeze(state: PyTree) -> PyTree:
    """The state with fixed scales. Matmuls collect no amaxes, and commits do not change it.

    Use it for evaluation, and for the frozen base of LoRA. A row that is still unset quantizes with
    the current amax of its tensor.

    Args:
      state: a tree of states.

    Returns:
      The tree of frozen states.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.freeze(fp8.init_state(fp8.recipes.delayed())).frozen
      True
    """
    return map_states(lambda s: dataclasses.replace(s, frozen=True), state)
