"""The quantizer states of weights: found by the paths of both in their trees."""

from typing import Any

import jax

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.state._state import MatmulState, is_state


def states_by_path(state: PyTree) -> dict[str, MatmulState]:
    """The states of a tree by their paths.

    Example:
      >>> import jaxfp8 as fp8
      >>> list(states_by_path({"layer": fp8.init_state(fp8.recipes.delayed())}))
      ['layer']
    """
    return {
        path_name(path): node
        for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state)
        if is_state(node)
    }


def path_name(path: Any) -> str:
    """The keys of a path, without the field of an nnx Variable that holds its value."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and "value" in path[-1].name:
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def state_at(name: str, states: dict[str, MatmulState]) -> MatmulState:
    """The state of the matmul that reads the weight of this path."""
    if name in states:
        return states[name]
    if not states:
        raise FP8StateError(
            f"{name} has a recipe with state, but state= holds no quantizer state. Pass "
            "state=variables[fp8.linen.COLLECTION] (linen), state=model (nnx), or the state of the "
            "last step."
        )
    layer = name.rpartition("/")[0]
    below = [path for path in states if not layer or path.startswith(f"{layer}/")]
    if len(below) == 1:
        return states[below[0]]
    raise FP8StateError(
        f"{name}: the state of its matmul must be at the same path, or the only one below "
        f"{layer!r}. There are {below[:6]}. Pass state=, the states of init or of the last step, "
        f"with the structure of params. All paths are {list(states)[:20]}."
    )
