"""Formats of FP8 checkpoints: which values share a scale, its name, and the text of the config.

A matrix of a file is [N, K], outputs and inputs. Formats differ in cells: the sides of the part of
the matrix that has one scale.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Axes, DType
from jaxfp8.checkpoint._safetensors import CheckpointError, TensorSpec, show
from jaxfp8.numerics._formats import E4M3, E8M0
from jaxfp8.numerics._granularity import AbstractGranularity, PerAxis, PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale import ScaleRule

Cells: TypeAlias = Literal["tensor", "channel"] | tuple[int, int]
Config: TypeAlias = dict[str, Any]

_FLOAT32 = np.dtype(np.float32)
VALUES = jnp.dtype(E4M3.dtype)
"""The dtype of all values in FP8."""
_GRANULARITIES: dict[str, AbstractGranularity] = {"tensor": PerTensor(), "channel": PerAxis(0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How an FP8 checkpoint stores a matrix [N, K]: E4M3 values, and their scales beside them.

    `FORMATS` has those that are known.

    Attributes:
      name: what `export` and `weights` call it.
      cells: what has one scale: "tensor", "channel" (an output), or the sides of a block.
      scale_name: the last word of the name of the scale.
      also_read: other last words that files of this format have.
      scale_dtype: float32 or float8_e8m0fnu; uint8 stores the exponents of E8M0.
      scale_shape: the shape of a scale of a tensor: [] or [1].
      static_inputs: whether files also hold a scale for the inputs of each matrix.
      config: the `quantization_config` of config.json, from the modules in high precision.
      hf_quant_config: whether the config is also a file of its own, hf_quant_config.json.

    Example:
      >>> FORMATS["hf-fp8"].scale_spec((256, 384))
      TensorSpec(dtype=dtype('float32'), shape=(2, 3))
    """

    name: str
    cells: Cells
    scale_name: str
    config: Callable[["Format", Sequence[str]], Config]
    scale_dtype: DType = _FLOAT32
    scale_shape: tuple[int, ...] = ()
    also_read: tuple[str, ...] = ()
    static_inputs: bool = False
    hf_quant_config: bool = False

    @property
    def granularity(self) -> AbstractGranularity:
        """Which values of a matrix [N, K] share a scale."""
        return PerBlock(self.cells) if isinstance(self.cells, tuple) else _GRANULARITIES[self.cells]

    @property
    def exponents(self) -> bool:
        """Whether scales are powers of two in a byte."""
        return self.scale_dtype != np.float32

    @property
    def rule(self) -> ScaleRule:
        """How an amax becomes a scale."""
        return ScaleRule(scale_format=E8M0) if self.exponents else ScaleRule()

    def sides(self, shape: Axes) -> Axes:
        """The sides of a cell of a matrix of this shape."""
        if isinstance(self.cells, tuple):
            return self.cells
        return (1 if self.cells == "channel" else shape[0], shape[1])

    def scale_spec(self, shape: Axes) -> TensorSpec:
        """The dtype and the shape of the scale of a matrix [N, K] in a file."""
        if self.cells == "tensor":
            return TensorSpec(np.dtype(self.scale_dtype), self.scale_shape)
        return TensorSpec(np.dtype(self.scale_dtype), self.granularity.scale_shape(shape))

    def scale_to_file(self, scale: np.ndarray) -> np.ndarray:
        """Scales by cell, [n, k], float32 or E8M0, as a file has them."""
        if self.scale_dtype == np.uint8:
            scale = scale.view(np.uint8)
        return scale.reshape(()).reshape(self.scale_shape) if self.cells == "tensor" else scale

    def scale_name_of(self, name: str) -> str:
        """The name of the scale of a tensor `X.weight`."""
        return f"{name.removesuffix('weight')}{self.scale_name}"

    def names_to_read(self, name: str) -> tuple[str, ...]:
        """All names that the scale of a tensor `X.weight` can have in a file."""
        words = (self.scale_name, *self.also_read)
        return tuple(f"{name.removesuffix('weight')}{word}" for word in words)

    def input_scale_name_of(self, name: str) -> str:
        """The name of the scale of the inputs of a tensor `X.weight`."""
        return f"{name.removesuffix('weight')}input_scale"


# The configs, as transformers 5.24 and compressed-tensors 0.20 write and read them.


def _fine_grained(format: Format, kept: Sequence[str]) -> Config:
    config: Config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(format.cells) if isinstance(format.cells, tuple) else None,
        "modules_to_not_convert": list(kept),
    }
    return config | ({"scale_fmt": "ue8m0"} if format.exponents else {})


_ACTIVATIONS: dict[Cells, Config] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "token"},
    (128, 128): {"strategy": "group", "group_size": 128},
    (1, 32): {"strategy": "group", "group_size": 32},
}
_WEIGHTS: dict[Cells, Config] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    (128, 128): {"strategy": "block", "block_structure": [128, 128]},
    (1, 32): {"strategy": "group", "group_size": 32},
}


def _compressed(format: Format, kept: Sequence[str]) -> Config:
    common: Config = {"num_bits": 8, "type": "float", "symmetric": True}
    if format.exponents:
        common["scale_dtype"] = "torch.uint8"
    inputs = common | {"dynamic": True} | _ACTIVATIONS[format.cells]
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False} | _WEIGHTS[format.cells],
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if format.exponents else "float-quantized",
        "quantization_status": "compressed",
        "ignore": list(kept),
        "config_groups": {"group_0": group},
    }


def _modelopt(format: Format, kept: Sequence[str]) -> Config:
    del format
    of_cells: Config = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": of_cells, "weights": of_cells, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": list(kept),
        "config_groups": {"group_0": group},
        "producer": {"name": "modelopt"},
    }


def hf_quant_config(kept: Sequence[str]) -> Config:
    """The file hf_quant_config.json of ModelOpt's FP8."""
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": list(kept)}
    # vLLM reads the file only if the producer has this name.
    return {"producer": {"name": "modelopt"}, "quantization": quantization}


_E8M0, _BYTE = np.dtype(E8M0.dtype), np.dtype(np.uint8)
_HF: dict[str, Any] = {
    "cells": (128, 128), "scale_name": "weight_scale_inv", "config": _fine_grained,
    "also_read": ("scale",),  # as DeepSeek-V4 calls it
}  # fmt: skip
_CT: dict[str, Any] = {"scale_name": "weight_scale", "config": _compressed}
_MODELOPT: dict[str, Any] = {"static_inputs": True, "hf_quant_config": True, "config": _modelopt}

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format(name="hf-fp8", **_HF),
        Format(name="hf-fp8-ue8m0", scale_dtype=_E8M0, **_HF),
        Format(name="compressed-tensor", cells="tensor", scale_shape=(1,), **_CT),
        Format(name="compressed-channel", cells="channel", **_CT),
        Format(name="compressed-block", cells=(128, 128), **_CT),
        Format(name="compressed-mxfp8", cells=(1, 32), scale_dtype=_BYTE, **_CT),
        Format(name="modelopt-fp8", cells="tensor", scale_name="weight_scale", **_MODELOPT),
    )
}
"""The known formats by name. `None` in their place is a checkpoint without FP8."""


def format_named(name: object) -> Format | None:
    """A format by its name. ValueError if it is unknown."""
    if name is None or isinstance(name, Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"format={name!r} is unknown; use None (no FP8) or one of {list(FORMATS)}."
        )
    return FORMATS[name]


# The format of a file, by its config.


def format_of_config(config: Mapping[str, Any], where: str) -> Format:
    """The format that a `quantization_config` describes.

    Raises:
      CheckpointError: if it is none of `FORMATS`. `where` names the file.
    """
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else None)
    read = {"fp8": _of_fine_grained, "compressed-tensors": _of_compressed, "modelopt": _of_modelopt}
    if not isinstance(method, str) or method not in read:
        raise _unknown(where, "quant_method", method, sorted(read))
    return FORMATS[read[method](config, where)]


def _unknown(where: str, field: str, value: object, known: object) -> CheckpointError:
    return CheckpointError(
        f"{where}: {field} is {show(value)}, but {known} can be read. Pass format= if it is in a "
        "known format."
    )


def _of_fine_grained(config: Mapping[str, Any], where: str) -> str:
    block, scales = config.get("weight_block_size", [128, 128]), config.get("scale_fmt")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unknown(where, "fmt", config["fmt"], ["e4m3"])
    if block != [128, 128]:
        raise _unknown(where, "weight_block_size", block, [128, 128])
    if scales not in (None, "float", "ue8m0"):
        raise _unknown(where, "scale_fmt", scales, ["ue8m0", None])
    return "hf-fp8-ue8m0" if scales == "ue8m0" else "hf-fp8"


def _of_compressed(config: Mapping[str, Any], where: str) -> str:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _unknown(where, "config_groups", groups, "one group")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _unknown(where, "config_groups", groups, "one group with weights")
    found = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
    block, size = weights.get("block_structure"), weights.get("group_size")
    if found[:2] == ("float", 8):
        match found[2]:
            case "tensor" | "channel":
                return f"compressed-{found[2]}"
            case "block" if block == [128, 128]:
                return "compressed-block"
            case "group" if size == 32 and "mxfp8" in str(config.get("format")):
                return "compressed-mxfp8"
    raise _unknown(where, "config_groups.weights", dict(weights), list(FORMATS))


def _of_modelopt(config: Mapping[str, Any], where: str) -> str:
    algorithm = config.get("quant_algo")
    if algorithm != "FP8":
        raise _unknown(where, "quant_algo", algorithm, ["FP8"])
    return "modelopt-fp8"
