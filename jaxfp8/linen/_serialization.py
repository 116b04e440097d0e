"""Quantizer state and weights in FP8 in flax's serialization, for instance `to_bytes`."""

import dataclasses
from typing import Any

import flax.serialization

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.state._check_state import check_state
from jaxfp8.state._state import LEAVES, MatmulState
from jaxfp8.weights._quantized_weight import QuantizedWeight

_ARRAYS = ("values", "scales", "amaxes", "original")


def dict_of_weight(weight: QuantizedWeight) -> dict[str, Any]:
    """The arrays of a weight in FP8 by name.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> w = fp8.quantize_params({"kernel": jnp.ones((4, 4))}, fp8.recipes.current())["kernel"]
      >>> list(dict_of_weight(w))
      ['values', 'scales', 'amaxes', 'original']
    """
    return {name: flax.serialization.to_state_dict(getattr(weight, name)) for name in _ARRAYS}


def weight_from_dict(weight: QuantizedWeight, values: PyTree) -> QuantizedWeight:
    """A weight in FP8 with the arrays of `dict_of_weight`, checked against those of `weight`."""
    path = flax.serialization.current_path()
    if not isinstance(values, dict) or set(values) != set(_ARRAYS):
        raise ValueError(
            f"{path}: the target is {weight}, but the saved tree has no weight in FP8 there. "
            "Restore the weights in high precision, then call fp8.quantize_params."
        )
    restored = {
        name: flax.serialization.from_state_dict(getattr(weight, name), values[name], name)
        for name in _ARRAYS
    }
    arrays = weight.values + weight.scales, restored["values"] + restored["scales"]
    for mine, theirs in zip(*arrays, strict=True):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise ValueError(
                f"{path}: the target is {weight}, with an array {mine.dtype}{list(mine.shape)}. "
                f"The saved one is {theirs.dtype}{list(theirs.shape)}. Quantize the target with "
                "the recipe and the axes of the saved weight."
            )
    return dataclasses.replace(weight, **restored)


def dict_of_tensor(tensor: QuantizedTensor) -> dict[str, Any]:
    """The arrays of an FP8 tensor by name.

    Example:
      >>> import jax.numpy as jnp, jaxfp8 as fp8
      >>> list(dict_of_tensor(fp8.quantize(jnp.ones(4), fp8.E4M3)))
      ['values', 'scale']
    """
    return {"values": tensor.values, "scale": tensor.scale}


def tensor_from_dict(tensor: QuantizedTensor, values: PyTree) -> QuantizedTensor:
    """An FP8 tensor with the arrays of `dict_of_tensor`, checked against those of `tensor`."""
    path = flax.serialization.current_path()
    mine = dict_of_tensor(tensor)
    if not isinstance(values, dict) or set(values) != set(mine):
        raise ValueError(
            f"{path}: the target is an FP8 tensor {list(tensor.shape)}, but the saved tree has "
            "none there. Restore into a target that was made as the saved tree was."
        )
    for name, array in mine.items():
        found = values[name]
        if (found.shape, found.dtype) != (array.shape, array.dtype):
            raise ValueError(
                f"{path}: the target has {name} {array.dtype}{list(array.shape)}, and the saved "
                f"tree {found.dtype}{list(found.shape)}. Restore into a target that was made as "
                "the saved tree was."
            )
    return dataclasses.replace(tensor, **values)


def dict_of_state(state: MatmulState) -> dict[str, Any]:
    """The arrays of a state by name.

    Example:
      >>> import jaxfp8 as fp8
      >>> list(dict_of_state(fp8.init_state(fp8.recipes.delayed())))[0]
      'scale'
    """
    return {name: getattr(state, name) for name in LEAVES}


def state_from_dict(state: MatmulState, values: dict[str, Any]) -> MatmulState:
    """A state with the arrays of `dict_of_state`, checked by `fp8.check_state`."""
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
