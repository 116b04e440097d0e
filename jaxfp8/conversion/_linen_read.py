"""linen models whose own code multiplies by parameters: their states, and the run of a call.

Such a matmul has its state in the collection of states, beside the path of its row: that of `mlp/w`
is at ("mlp", "fp8_of_w"). It is taken out before the model runs, so no module of the model sees it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import meta, unfreeze
from flax.core.scope import LazyRng, in_filter
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.conversion._plan import Decision, Plan
from jaxfp8.conversion._read import Extra, Reading, read_and_run
from jaxfp8.conversion._rule import Layer
from jaxfp8.linen._state import COLLECTION, OF_PARAMETER
from jaxfp8.state._init import make_concrete, unset_state

_KEYS = "fp8"


def parameters_of(variables: PyTree) -> dict[int, str]:
    """The path of each parameter, by its number among the leaves of the variables."""
    found = {}
    # A box of a parameter is no part of its path.
    leaves = jax.tree_util.tree_leaves_with_path(meta.unbox(unfreeze(variables)))
    for number, (keys, _) in enumerate(leaves):
        name, *rest = jax.tree_util.keystr(keys, simple=True, separator="/").split("/")
        if name == "params":
            found[number] = "/".join(rest)
    return found


def init_read(plan: Plan, variables: PyTree) -> PyTree:
    """The variables of `init`, with fresh states for the matmuls that were read."""
    fresh, decided = {}, dict(plan.decided)
    for path, loops in plan.reads:
        recipe = decided[path].recipe
        if recipe is not None and recipe.rows:
            fresh[path] = unset_state(recipe.rows, loops)
    return _with_states(variables, fresh)


def read_apply(
    reading: Reading,
    apply: Callable[..., Any],
    variables: PyTree,
    rngs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mutable: Any,
    *,
    makes_states: bool = False,
) -> Any:
    """`apply(variables, *args, rngs=rngs, **kwargs)` with FP8 matmuls in the model's own code.

    `mutable` says which collections `apply` returns. With `makes_states` all matmuls get fresh
    states, and the collection of states is returned with them.
    """
    given, states = _take_states(variables)
    key: Any = rngs.get(_KEYS) if isinstance(rngs, Mapping) else None
    if hasattr(key, "as_jax_rng"):  # in a part of another model
        key = key.as_jax_rng()

    def extra_of(layer: Layer, decision: Decision, loops: tuple[int, ...]) -> Extra:
        assert decision.recipe is not None
        own = key if decision.recipe.needs_key else None
        if not decision.recipe.rows:
            return Extra(key=own)
        if makes_states:
            states[layer.path] = unset_state(decision.recipe.rows, loops)
        if layer.path not in states:
            raise FP8StateError(
                f"{layer.path}: the state of recipe {decision.recipe.name!r} is missing from "
                f"collection {COLLECTION!r}. Pass the state of model.init or of the last step "
                f"beside the parameters: model.apply({{'params': params, {COLLECTION!r}: state}}, "
                "...). If inputs= of fp8.convert did not run this matmul, give it inputs= that do."
            )
        return Extra(make_concrete(meta.unbox(states[layer.path])), own)

    out = read_and_run(
        lambda variables, rngs, args, kwargs: apply(variables, *args, rngs=rngs, **kwargs),
        (given, rngs, args, kwargs),
        parameters_of(given),
        reading,
        extra_of,
    )
    if mutable is False:
        return out
    y, changed = out
    if states and in_filter(mutable, COLLECTION):
        changed = _with_states(changed, states)
    return y, changed


def run_in_scope(
    module: Any, run: Callable[[Any, PyTree, dict[str, Any], Any], tuple[Any, PyTree]]
) -> Any:
    """The result of a module that is bound, or a part of another model, by a run of its own.

    `run(model, variables, rngs, mutable)` gets the module as one that is not bound. It returns the
    result and the changed variables, which are then written to the scope of the module.
    """
    scope, before = module.scope, f"{_KEYS} calls"
    model, variables = module.unbind()
    # A run begins to count keys anew. So each call in a scope but the first has others.
    call = scope.rng_counters.get(before, 0)
    scope.rng_counters[before] = call + 1
    rngs = {
        name: LazyRng.create(rng, before, call) if call else rng for name, rng in scope.rngs.items()
    }
    y, changed = run(model, variables, rngs, scope.mutable)
    for collection, values in changed.items():
        for name, value in values.items():
            scope.put_variable(collection, name, value)
    return y


# The states of matmuls that were read, in the collection of states.


def _take_states(variables: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables without the states of matmuls that were read, and these states by path."""
    given: dict[str, Any] = dict(unfreeze(variables))
    flat = flatten_dict(given.pop(COLLECTION, {}), keep_empty_nodes=True)
    own = [keys for keys in flat if keys[-1].startswith(OF_PARAMETER)]
    found = {
        "/".join((*keys[:-1], keys[-1].removeprefix(OF_PARAMETER))): flat.pop(keys) for keys in own
    }
    return given | ({COLLECTION: unflatten_dict(flat)} if flat else {}), found


def _with_states(variables: PyTree, states: Mapping[str, Any]) -> PyTree:
    """The variables, with these states in their collection."""
    if not states:
        return variables
    given: dict[str, Any] = dict(unfreeze(variables))
    flat = flatten_dict(given.get(COLLECTION, {}), keep_empty_nodes=True)
    flat |= {_keys_of(path): state for path, state in states.items()}
    return given | {COLLECTION: unflatten_dict(flat)}


def _keys_of(path: str) -> tuple[str, ...]:
    *module, name = path.split("/")
    return (*module, OF_PARAMETER + name)
