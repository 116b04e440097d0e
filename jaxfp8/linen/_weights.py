"""Weights in FP8 in flax's serialization: `flax.serialization.to_bytes` and its relatives."""

import dataclasses
from typing import Any

import flax.serialization

from jaxfp8._typing import PyTree
from jaxfp8.weights._quantized_weight import QuantizedWeight

_ARRAYS = ("values", "scales", "amaxes", "original")


def _to_state_dict(weight: QuantizedWeight) -> dict[str, Any]:
    return {name: flax.serialization.to_state_dict(getattr(weight, name)) for name in _ARRAYS}


def _from_state_dict(weight: QuantizedWeight, values: PyTree) -> QuantizedWeight:
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


flax.serialization.register_serialization_state(QuantizedWeight, _to_state_dict, _from_state_dict)
