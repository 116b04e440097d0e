"""Variables of a converted linen model: states beside parameters, and apart from them.

Many models contain `nn.scan` or `nn.vmap`, which name the collections that they stack. They do not
name that of quantizer state. So while a converted model runs, each state is a variable in "params",
beside the parameters of its layer. A transformation treats it as it treats them. Before and after,
states are in a collection of their own, and "params" is the tree of the unconverted model.
"""

from collections.abc import Mapping
from typing import Any

from flax.core import unfreeze

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.linen._state import COLLECTION
from jaxfp8.state._state import is_state


def together(variables: PyTree) -> dict[str, Any]:
    """The variables while a converted model runs: states are in "params".

    Raises:
      FP8StateError: if a parameter has the path of a state.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> variables = {"params": {"w": 1.0}, COLLECTION: {"op": {"fp8": state}}}
      >>> sorted(together(variables)["params"])
      ['op', 'w']
    """
    plain: dict[str, Any] = unfreeze(variables)
    states, others = _split(plain.get(COLLECTION, {}))
    params = _merged(plain.get("params", {}), states, ())
    rest = {name: tree for name, tree in plain.items() if name not in ("params", COLLECTION)}
    return rest | {"params": params} | ({COLLECTION: others} if others else {})


def apart(variables: PyTree) -> dict[str, Any]:
    """The variables after a converted model ran: states are in their own collection.

    Example:
      >>> import jaxfp8 as fp8
      >>> variables = {"params": {"w": 1.0, "fp8": fp8.init_state(fp8.recipes.delayed())}}
      >>> sorted(apart(variables))
      ['_overwrite_with_gradient', 'params']
    """
    plain: dict[str, Any] = dict(unfreeze(variables))
    if "params" not in plain:
        return plain
    states, params = _split(plain["params"])
    if params or not states:
        plain["params"] = params or {}
    else:
        del plain["params"]
    if states:
        plain[COLLECTION] = _merged(plain.get(COLLECTION, {}), states, ())
    return plain


def _split(tree: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of a tree of dicts, and the rest. Neither has a dict for the other alone."""
    states: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, node in tree.items():
        if isinstance(node, Mapping):
            for part, inner in zip((states, rest), _split(node), strict=True):
                if inner or (part is rest and not node):
                    part[name] = inner
        elif is_state(node):
            states[name] = node
        else:
            rest[name] = node
    return states, rest


def _merged(first: PyTree, second: PyTree, path: tuple[str, ...]) -> dict[str, Any]:
    merged = dict(first)
    for name, node in second.items():
        here = (*path, name)
        if name not in merged:
            merged[name] = node
        elif isinstance(node, Mapping) and isinstance(merged[name], Mapping):
            merged[name] = _merged(merged[name], node, here)
        else:
            raise FP8StateError(
                f"{'/'.join(here)} is both in 'params' and in {COLLECTION!r}. Pass the parameters "
                "of the model and the quantizer states apart, as model.init returns them."
            )
    return merged
