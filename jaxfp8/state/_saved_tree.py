"""The places of states in a restored tree.

The containers of a restored tree often differ from those of the model's tree. A file that is read
without a target gives nested dicts. A list becomes a dict with the keys "0", "1" and so on. A
Variable of nnx has one more level, "value". So places are compared by name.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.state._state import MatmulState, is_state

_SHOWN = 6


def parts_of(state: PyTree, like: PyTree) -> list[tuple[str, MatmulState, Any]]:
    """For each state of `like`: its place, the state, and the node of `state` in that place.

    Raises:
      FP8StateError: if `like` holds anything but states, or the places differ.

    Example:
      >>> import jaxfp8 as fp8
      >>> like = [fp8.init_state(fp8.recipes.delayed())]
      >>> [(place, part) for place, _, part in parts_of({"0": {"scale": None}}, like)]
      [('[0]', {'scale': None})]
    """
    wanted: dict[tuple[str, ...], tuple[str, Any]] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(like, is_leaf=is_state)[0]:
        place = jax.tree_util.keystr(path) or "the state"
        if not is_state(node):
            raise FP8StateError(
                f"like holds a {type(node).__name__} at {place}, where a quantizer state is "
                "needed. Pass only the states, without parameters."
            )
        wanted[names_of(path)] = place, node
    found, others = {}, []

    def is_part(path: tuple[Any, ...], node: Any) -> bool:
        return is_state(node) or (isinstance(node, Mapping) and names_of(path) in wanted)

    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_part, is_leaf_takes_path=True)
    for path, node in leaves:
        if names_of(path) in wanted:
            found[names_of(path)] = _without_value(node)
        else:
            others.append(jax.tree_util.keystr(path))
    missing = [place for names, (place, _) in wanted.items() if names not in found]
    if missing or others:
        raise FP8StateError(
            f"state has another tree than like. It lacks {missing[:_SHOWN]} and holds "
            f"{others[:_SHOWN]} besides ({len(missing)} and {len(others)} in all). Restore it into "
            "the tree of like, or make like from the model that was saved."
        )
    return [(place, node, found[names]) for names, (place, node) in wanted.items()]


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names along a path, the same for all kinds of containers.

    The attribute `value` of a Variable is left out. A key "value" of a dict is a name.

    Example:
      >>> import jax
      >>> [names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path({"a": [1]})]
      [('a', '0')]
    """
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return tuple(
        str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path
    )


def _without_value(node: Any) -> Any:
    """The value of a Variable, from a file that was read without a target; else the node itself."""
    return node["value"] if isinstance(node, Mapping) and set(node) == {"value"} else node
