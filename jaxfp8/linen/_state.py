"""Quantizer state in flax.linen: the collection, its files and its partition specs.

`fp8.linen.TrainState` has a field for this collection. flax's own TrainState treats a collection of
this name as values that replace the old ones, not as gradients:
`apply_gradients(grads={"params": grads, COLLECTION: new_state})`.
"""

import contextvars
import dataclasses
import sys
import types
from collections.abc import Mapping
from typing import Any

import flax.core.lift
import flax.linen as nn
import flax.serialization
import jax
from flax.core import meta
from flax.core.scope import in_filter

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.matmul._options import StateChannel
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._check_state import check_state
from jaxfp8.state._init import make_concrete, unset_state
from jaxfp8.state._init import state_specs as specs_of_states
from jaxfp8.state._state import LEAVES, MatmulState, check_tree, describe_node, is_state
from jaxfp8.weights._quantized_weight import QuantizedWeight

# Quantizer state and weights in FP8 in flax's serialization, for instance `to_bytes`.

_ARRAYS = {
    MatmulState: LEAVES,
    QuantizedTensor: ("values", "scale"),
    QuantizedWeight: ("values", "scales", "amaxes", "original"),
}


def _dict_of(node: MatmulState | QuantizedTensor | QuantizedWeight) -> dict[str, Any]:
    """The arrays of a state, or of an FP8 tensor or weight, by name."""
    names = _ARRAYS[type(node)]
    return {name: flax.serialization.to_state_dict(getattr(node, name)) for name in names}


def _fp8_from_dict(node: Any, saved: PyTree) -> Any:
    """`node` with the arrays of `_dict_of`, if they have its shapes and dtypes."""
    path, names = flax.serialization.current_path(), _ARRAYS[type(node)]
    target = f"an FP8 tensor {list(node.shape)}" if isinstance(node, QuantizedTensor) else str(node)
    if not isinstance(saved, dict) or set(saved) != set(names):
        raise ValueError(
            f"{path}: the target is {target}, but the saved tree has none there. Restore into a "
            "target that was made as the saved tree was. For FP8 weights call fp8.quantize_params "
            "after parameters are restored in high precision."
        )
    restored = {
        name: flax.serialization.from_state_dict(getattr(node, name), saved[name], name)
        for name in names
    }
    for name in names:
        # amaxes and original may be None in one of both
        pairs = zip(*map(jax.tree.leaves, (getattr(node, name), restored[name])), strict=False)
        for mine, theirs in pairs:
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise ValueError(
                    f"{path}: the target is {target}, with {name} {mine.dtype}{list(mine.shape)}. "
                    f"The saved ones are {theirs.dtype}{list(theirs.shape)}. Restore into a target "
                    "that was made as the saved tree was, with the same recipe and axes."
                )
    return dataclasses.replace(node, **restored)


def _state_from_dict(state: MatmulState, values: dict[str, Any]) -> MatmulState:
    """A state with the arrays of `_dict_of`, checked by `fp8.check_state`."""
    if set(values) == set(LEAVES) and all(values[name] is getattr(state, name) for name in LEAVES):
        # flax restores attributes of modules from their own leaves, also while it traces. A check
        # of values would fail on tracers.
        return state
    try:
        restored: MatmulState = check_state(values, state)
    except FP8StateError as error:
        path = flax.serialization.current_path()
        raise FP8StateError(f"{path}: {error}") from None
    return restored


flax.serialization.register_serialization_state(MatmulState, _dict_of, _state_from_dict)
for _kind in (QuantizedTensor, QuantizedWeight):
    flax.serialization.register_serialization_state(_kind, _dict_of, _fp8_from_dict)


# The collection in which linen layers keep their quantizer state.

COLLECTION = "_overwrite_with_gradient"
NAME = "fp8"
"""The name of a state in the variables of its module."""
OF_PARAMETER = "fp8_of_"
"""Before the name of a parameter that code of a converted model multiplies: the name of the state.
It is a sibling of the parameter, as attributes of a module are."""
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
    groups. FP8StateError if the module is applied without its collection, or if `nn.scan`
    broadcasts it although it leaves by the gradient channel.
    """
    if not recipe.rows:
        return ()
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
    return make_concrete(meta.unbox(module.get_variable(home.get(), name))) if recipe.rows else ()


def _refuse_broadcast(module: nn.Module) -> None:
    """Raise FP8StateError inside `nn.scan(variable_broadcast=)` of the collection.

    JAX would add the next states of all iterations, and the next step would give NaN.
    """
    # flax gives a module no way to ask what a scan broadcasts. So this reads the local variables of
    # its stack frame. If flax renames them, only the error is lost.
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _pack_code and frame.f_locals.get("name") == "scan":
            broadcast: Any = frame.f_locals.get("in_variable_filters", (False,))[0]
            if in_filter(broadcast, home.get()):
                raise FP8StateError(
                    f"{'/'.join(module.path) or type(module).__name__} has "
                    f'state_channel="gradient" inside nn.scan(variable_broadcast={broadcast!r}), '
                    f"which shares {COLLECTION!r} between all iterations. JAX would add their "
                    f"states. Write variable_axes={{{COLLECTION!r}: 0}} for one state per layer. "
                    "For one shared state use fp8.value_and_grad and state_channel=None."
                )
        frame = frame.f_back


_codes = (
    code
    for code in flax.core.lift.pack.__code__.co_consts
    if getattr(code, "co_name", "") == "wrapper"
)
_pack_code = next(_codes, None)


# The partition specs of a linen model's quantizer state.


def refuse_variables(name: str, tree: PyTree, needed: str, cure: str) -> None:
    """Raise FP8StateError if an argument holds collections, and not what is in one of them."""
    if isinstance(tree, Mapping) and COLLECTION in tree:
        raise FP8StateError(
            f"{name} holds the collections {list(tree)}, but only {needed} are needed. Write "
            f"{cure}."
        )


def state_specs(state: PyTree, param_specs: PyTree) -> PyTree:
    """`fp8.state_specs` of a linen model.

    A stack of layers, from `nn.scan` or `nn.vmap`, has a stack of states. The mesh splits that
    stack as it splits the leading axes of the layer's `kernel`. The states of matmuls that code of
    a converted model computes are on all devices.

    Args:
      state: the collection `fp8.linen.COLLECTION`, or its types.
      param_specs: a `jax.P` for each parameter, for instance
        `flax.linen.get_partition_spec(variables)["params"]`.

    Returns:
      A tree like `state`, with a `jax.P` for each array.

    Raises:
      FP8StateError: if `state` holds anything but states.
      ValueError: if `param_specs` has no `kernel` for a layer with state.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import COLLECTION, FP8Dense
      >>> variables = FP8Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
      >>> specs = state_specs(variables[COLLECTION], {"kernel": jax.P("fsdp"), "bias": jax.P()})
      >>> set(jax.tree.leaves(specs))
      {P()}
    """
    refuse_variables("state", state, "the states", f"state=variables[{COLLECTION!r}]")
    check_tree(state)

    def kernel_spec(path: tuple[Any, ...]) -> jax.P:
        node = param_specs
        if str(path[-1].key).startswith(OF_PARAMETER):
            return jax.P()  # its stack is that of loops, not of the parameter
        for key in path:
            if not (isinstance(node, Mapping) and key.key in node):
                break  # the path goes on to the module of the matmul, which has no parameters
            node = node[key.key]
        if not (isinstance(node, Mapping) and "kernel" in node):
            raise ValueError(
                f"param_specs is {describe_node(param_specs)}, which has no kernel for the state "
                f"at {jax.tree_util.keystr(path)}. Give a jax.P for each parameter, for instance "
                'flax.linen.get_partition_spec(variables)["params"]. '
                "For matmuls without a kernel of their own (FP8EinsumOp) use fp8.state_specs."
            )
        return node["kernel"]

    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: kernel_spec(path), state, is_leaf=is_state
    )
    return specs_of_states(state, specs)
