"""Where linen layers keep quantizer state: a collection that flax's own TrainState knows.

The collection has the name that `flax.training.train_state.TrainState` overwrites instead of optimizing, so `create` and
`apply_gradients` work unchanged: `apply_gradients(grads={"params": grads, COLLECTION: new_state})`.
"""

from typing import Any

import flax.linen as nn
import flax.serialization
from flax.core import meta

from jaxfp8._errors import FP8StateError
from jaxfp8.ops._check_state import check_state
from jaxfp8.ops._fresh_state import concrete
from jaxfp8.ops._state import LEAVES, MatmulState, init_state
from jaxfp8.recipes._recipe import Recipe

COLLECTION = "_overwrite_with_gradient"
_NAME = "fp8"


def matmul_state(module: nn.Module, recipe: Recipe) -> MatmulState | tuple[()]:
    """The state of a module's matmul, created by `init`.

    Raises:
      FP8StateError: if the module is applied without its collection.
    """
    if not recipe.rows:
        return ()
    creates = module.is_initializing() and module.is_mutable_collection(COLLECTION)
    if not creates and not module.has_variable(COLLECTION, _NAME):
        path = "/".join(module.path) or type(module).__name__
        raise FP8StateError(
            f"{path}: the state of recipe {recipe.name!r} is missing from collection {COLLECTION!r}. Pass it beside the "
            f"parameters, model.apply({{'params': params, {COLLECTION!r}: state}}, ...), with what model.init or the last step "
            f"returned; under nn.scan or nn.vmap add {COLLECTION!r} to variable_axes (0: a state for each layer)."
        )
    state = module.variable(COLLECTION, _NAME, init_state, recipe).value
    return concrete(meta.unbox(state))


def _to_state_dict(state: MatmulState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in LEAVES}


def _from_state_dict(state: MatmulState, values: dict[str, Any]) -> MatmulState:
    try:
        restored: MatmulState = check_state(values, state)
    except FP8StateError as error:
        path = flax.serialization.current_path()
        raise FP8StateError(f"{path}: {error}") from None
    return restored


flax.serialization.register_serialization_state(MatmulState, _to_state_dict, _from_state_dict)
