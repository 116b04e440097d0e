"""The collection in which linen layers keep their quantizer state.

`fp8.linen.TrainState` has a field for this collection. flax's own TrainState treats a collection of
this name as values that replace the old ones, not as gradients:
`apply_gradients(grads={"params": grads, COLLECTION: new_state})`.
"""

import contextvars
import sys
import types
from collections.abc import Iterator
from typing import Any

import flax.core.lift
import flax.linen as nn
import flax.serialization
from flax.core import meta
from flax.core.scope import in_filter

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import FP8StateError
from jaxfp8.linen._serialization import (
    dict_of_state,
    dict_of_tensor,
    dict_of_weight,
    state_from_dict,
    tensor_from_dict,
    weight_from_dict,
)
from jaxfp8.ops._options import StateChannel
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._fresh_state import concrete
from jaxfp8.state._state import MatmulState
from jaxfp8.state._unset import unset_state
from jaxfp8.weights._quantized_weight import QuantizedWeight

COLLECTION = "_overwrite_with_gradient"
NAME = "fp8"
"""The name of a state in the variables of its module."""
home = contextvars.ContextVar("home", default=COLLECTION)
"""The collection that holds states while a model runs.

A converted model (`fp8.convert`) moves its states into "params" for the time of a call. Code that
knows nothing of quantizer state then hands states on with the parameters of their layers:
`nn.scan` and `nn.vmap` stack both along the same axis.
"""


def matmul_state(
    module: nn.Module,
    recipe: Recipe,
    channel: StateChannel | None,
    name: str = NAME,
    *,
    stacked: tuple[int, ...] = (),
) -> MatmulState | tuple[()]:
    """The state of a module's matmul. `init` creates it. () for a recipe without state.

    Modules of one scope need states of different names. `stacked` is (E,) for a state of each of E
    groups.

    Raises:
      FP8StateError: if the module is applied without its collection, or if `nn.scan` carries it, or
        broadcasts it although it leaves by the gradient channel.
    """
    if not recipe.rows:
        return ()
    _refuse_carry(module)
    if channel == "gradient":
        _refuse_broadcast(module)
    collection = home.get()
    creates = module.is_initializing() and module.is_mutable_collection(collection)
    if not creates and not module.has_variable(collection, name):
        path = "/".join(module.path) or type(module).__name__
        raise FP8StateError(
            f"{path}: the state of recipe {recipe.name!r} is missing from collection "
            f"{COLLECTION!r}. Pass the state of model.init or of the last step beside the "
            f"parameters: model.apply({{'params': params, {COLLECTION!r}: state}}, ...). Under "
            f"nn.scan or nn.vmap add {COLLECTION!r} to variable_axes (0: a state for each layer)."
        )
    if not module.has_variable(collection, name):
        # Not `module.variable`, which flax allows in compact methods only.
        module.put_variable(collection, name, unset_state(recipe.rows, stacked))
    return stored_state(module, recipe, name)


def stored_state(module: nn.Module, recipe: Recipe, name: str = NAME) -> MatmulState | tuple[()]:
    """The state that `matmul_state` created or found. () for a recipe without state."""
    return concrete(meta.unbox(module.get_variable(home.get(), name))) if recipe.rows else ()


def _refuse_carry(module: nn.Module) -> None:
    """Raise FP8StateError inside `nn.scan(variable_carry=)` of the collection.

    Without this check jax raises an error that names neither flax's argument nor the collection.
    flax gives a module no way to ask what a scan carries. So this function reads the local
    variables of flax's stack frame. If flax renames them, users see jax's error instead.
    """
    if module.has_variable(COLLECTION, NAME) and module.is_mutable_collection(COLLECTION):
        return  # flax can carry a variable that exists before the scan and that every call returns
    for broadcast, carried in _scans():
        if in_filter(carried, home.get()) and not in_filter(broadcast, home.get()):
            raise FP8StateError(
                f"nn.scan(variable_carry={carried!r}) carries {COLLECTION!r}. flax can carry "
                "only variables that exist before the scan. Leave it out of variable_carry, "
                f"and write variable_axes={{{COLLECTION!r}: 0}} for one state per layer, or "
                f"variable_broadcast={COLLECTION!r} for one shared state."
            )


def _refuse_broadcast(module: nn.Module) -> None:
    """Raise FP8StateError inside `nn.scan(variable_broadcast=)` of the collection.

    JAX would add the next states of all iterations. If flax renames its local variables, the next
    step gives NaN instead.
    """
    for broadcast, _ in _scans():
        if in_filter(broadcast, home.get()):
            raise FP8StateError(
                f"{'/'.join(module.path) or type(module).__name__} has "
                f'state_channel="gradient" inside nn.scan(variable_broadcast={broadcast!r}), which '
                f"shares {COLLECTION!r} between all iterations. JAX would add their states. Write "
                f"variable_axes={{{COLLECTION!r}: 0}} for one state per layer. For one shared "
                "state use fp8.value_and_grad and state_channel=None."
            )


def _scans() -> Iterator[tuple[Any, Any]]:
    """variable_broadcast and variable_carry of each `nn.scan` that this code runs in."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _pack_code and frame.f_locals.get("name") == "scan":
            filters: tuple[Any, ...] = frame.f_locals.get("in_variable_filters", (False, False))
            yield filters[0], filters[1]
        frame = frame.f_back


_codes = (
    code
    for code in flax.core.lift.pack.__code__.co_consts
    if getattr(code, "co_name", "") == "wrapper"
)
_pack_code = next(_codes, None)


flax.serialization.register_serialization_state(MatmulState, dict_of_state, state_from_dict)
flax.serialization.register_serialization_state(QuantizedTensor, dict_of_tensor, tensor_from_dict)
flax.serialization.register_serialization_state(QuantizedWeight, dict_of_weight, weight_from_dict)
