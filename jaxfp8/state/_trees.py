"""Trees of states: mapping over them, and the check that they hold only states."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.state._state import MatmulState, SeenAmax, is_node


def map_states(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` over states. Anything else in the tree is an error.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> map_states(lambda state: state.scale.shape, {"layer": state})
      {'layer': (3,)}
    """
    nodes, flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)
    structure: Any = flat  # jax gives it no type
    _check_nodes(nodes)
    trees = ([node for _, node in nodes], *map(structure.flatten_up_to, rest))
    return structure.unflatten(map(function, *trees))


RESTORED = (
    "If it was restored from a file without a target (Orbax, msgpack), it is a tree of dicts. Pass "
    "it through fp8.check_state(restored, like=fresh_state) first."
)


def check_tree(tree: PyTree) -> None:
    """Raise FP8StateError unless the tree holds states and nothing else.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_tree({"layer": fp8.init_state(fp8.recipes.delayed())})
    """
    _check_nodes(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node))


def _check_nodes(nodes: Iterable[tuple[Any, object]]) -> None:
    """`check_tree` of a tree that is flattened to pairs (path, node)."""
    for path, node in nodes:
        if isinstance(node, SeenAmax):
            raise FP8StateError(
                "expected quantizer state, found SeenAmax (the amaxes that a step saw) at "
                f"{jax.tree_util.keystr(path) or 'the top of the tree'}. Pass fp8.commit(state, "
                "seen)."
            )
        if not isinstance(node, MatmulState):
            raise FP8StateError(
                f"expected quantizer state, found {shown(node)} at "
                f"{jax.tree_util.keystr(path) or 'the top of the tree'}. Pass only the state from "
                "fp8.init_state, from variables[COLLECTION] or from the last step. "
                f"{RESTORED}"
            )


def shown(node: object) -> str:
    """How a message shows an object that is no state.

    Example:
      >>> shown({"scale": 0.0})
      "a dict with the keys ['scale']"
    """
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
