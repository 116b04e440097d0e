"""Rows of quantizer state: what each row of each state holds after a step."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

from jaxfp8._typing import FP8StateError, Tensor
from jaxfp8.diagnostics._names import layer_name
from jaxfp8.state._state import MatmulState, is_state

# Parts of a path that all states have: the collection of linen, and fields of Variables.
_SILENT = ("_overwrite_with_gradient", "fp8", "state", "value", "raw_value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRow:
    """One row of the quantizer state of a matmul, between two steps.

    Attributes:
      layer: the name of the layer. A state that is stacked along a leading axis gives a row for
        each index: "blocks/up[3]".
      tensor: "x", "w" or "g", the gradient of the layer's result.
      scale: the scale of the next step, 0 if it is unset.
      amax: the newest amax of the history. It is 0 before the first one, and NaN if the history has
        a length of 1, because then it is not kept.
      amax_min: the smallest amax of the history; 0 until the history is full.
      amax_max: the largest amax of the history.
      nonfinite_steps: the number of steps whose amax was inf or NaN.
      unset: whether the scale is unset, because no finite amax above 0 was seen.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = {"up": fp8.init_state(fp8.recipes.delayed())}
      >>> row = fp8.diagnostics.summary(state).rows[0]
      >>> row.layer, row.tensor, row.scale, row.unset
      ('up', 'x', 0.0, True)
    """

    layer: str
    tensor: Tensor
    key: str = dataclasses.field(repr=False)
    scale: float
    amax: float
    amax_min: float
    amax_max: float
    nonfinite_steps: int
    unset: bool


def state_rows(tree: Any) -> list[StateRow]:
    """One row for each row of each state in a tree. Anything else in the tree is left out.

    Raises:
      FP8StateError: if there is no state, or if its values are not known yet.

    Example:
      >>> import jaxfp8 as fp8
      >>> [row.key for row in state_rows(fp8.init_state(fp8.recipes.delayed()))]
      ['x', 'w', 'g']
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state)
    states = [(path, leaf) for path, leaf in leaves if is_state(leaf)]
    if not states:
        raise FP8StateError(
            f"an object of type {type(tree).__name__} has no quantizer state. Pass what "
            "fp8.value_and_grad returned, linen variables or an nnx model. Recipes such as "
            "current() and blockwise() have no state. For these use fp8.diagnostics.collect()."
        )
    return [row for path, state in states for row in _rows(path, state)]


def _rows(path: tuple[Any, ...], state: MatmulState) -> list[StateRow]:
    if isinstance(state.scale, jax.core.Tracer):
        raise FP8StateError(
            "fp8.diagnostics.summary reads values, but the state is traced here. Call it outside "
            "of jax.jit, with the state that the step returned."
        )
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    while parts and parts[-1] in _SILENT:
        parts.pop()
    layer = layer_name(part for part in parts if part != _SILENT[0])
    scale, history, nonfinite = map(
        np.asarray, (state.scale, state.amax_history, state.nonfinite_steps)
    )
    # Slot 0 is the staging slot. Without other slots nothing is kept.
    kept = history[..., 1:] if history.shape[-1] > 1 else np.full((*scale.shape, 1), np.nan)
    tensors = [row.tensor for row in state.rows]
    rows = []
    for index in itertools.product(*map(range, scale.shape[:-1])):
        for i, tensor in enumerate(tensors):
            place = (*index, i)
            rows.append(
                StateRow(
                    layer=layer + "".join(f"[{each}]" for each in index),
                    tensor=tensor,
                    # A tensor with two quantizers has two rows.
                    key=tensor if tensors.count(tensor) == 1 else f"{tensor}/{i}",
                    scale=float(scale[place]),
                    amax=float(kept[place][-1]),
                    amax_min=float(kept[place].min()),
                    amax_max=float(kept[place].max()),
                    nonfinite_steps=int(nonfinite[place]),
                    unset=bool(scale[place] == 0),
                )
            )
    return rows
