"""Layouts: the names that files of known families of models have, as data.

Names and shapes are those that transformers 5.24 writes. What engines split and merge is from vLLM
0.33 (`vllm/model_executor/models/`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxfp8._check import check_one_of, check_type
from jaxfp8.checkpoint._names import AxisMap, Kind, Parallel, Row, default_path, mirrored

Names: TypeAlias = Sequence[Row] | str | None

_LAYER = "model.layers.{layer}."


def _module(
    name: str,
    kind: Kind = "linear",
    parallel: Parallel | None = None,
    merged: str | None = None,
    *,
    bias: bool = False,
) -> tuple[Row, ...]:
    """The weight of a module, and its bias."""
    weight = Row(name=f"{name}.weight", kind=kind, parallel=parallel, merged=merged)
    return (weight, Row(name=f"{name}.bias")) if bias else (weight,)


def _norms(*names: str) -> tuple[Row, ...]:
    return sum((_module(_LAYER + name, "norm") for name in names), ())


def _attention(bias: bool = False) -> tuple[Row, ...]:
    """The four projections, whose biases models have or have not."""
    block = f"{_LAYER}self_attn."
    of_qkv = (_module(f"{block}{n}_proj", "linear", "columns", "qkv", bias=bias) for n in "qkv")
    return sum(of_qkv, ()) + _module(f"{block}o_proj", "linear", "rows", bias=bias)


def _swiglu(block: str, names: tuple[str, str, str]) -> tuple[Row, ...]:
    """A gated MLP. `names` are those of gate, up and down."""
    gate, up, down = (f"{_LAYER}{block}.{name}" for name in names)
    wide = sum((_module(name, "linear", "columns", "gate_up") for name in (gate, up)), ())
    return wide + _module(down, "linear", "rows")


_PROJ = ("gate_proj", "up_proj", "down_proj")
_OUTER = (
    *_module("model.embed_tokens", "embedding"),
    *_module("model.norm", "norm"),
    *_module("lm_head", "head"),
)
_LLAMA = (
    *_OUTER,
    *_norms("input_layernorm", "post_attention_layernorm"),
    *_attention(bias=True),
    *_swiglu("mlp", _PROJ),
)
_QWEN = (*_LLAMA, *_norms("self_attn.q_norm", "self_attn.k_norm"))

LAYOUTS: Mapping[str, tuple[Row, ...]] = {
    "llama": _LLAMA,
    "qwen": (
        *_QWEN,
        *_module(f"{_LAYER}mlp.gate", "router"),
        *_swiglu("mlp.experts.{expert}", _PROJ),
    ),
    "gemma": (*_QWEN, *_norms("pre_feedforward_layernorm", "post_feedforward_layernorm")),
    "mixtral": (
        *_OUTER,
        *_norms("input_layernorm", "post_attention_layernorm"),
        *_attention(),
        *_module(f"{_LAYER}block_sparse_moe.gate", "router"),
        *_swiglu("block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")),
    ),
    "deepseek": (
        *_OUTER,
        *_norms("input_layernorm", "post_attention_layernorm"),
        *_norms("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
        *_module(f"{_LAYER}self_attn.q_proj", "linear", "columns"),  # models without q_a
        *_module(f"{_LAYER}self_attn.q_a_proj", merged="qkv_a"),
        *_module(f"{_LAYER}self_attn.kv_a_proj_with_mqa", merged="qkv_a"),
        *_module(f"{_LAYER}self_attn.q_b_proj", "linear", "columns"),
        *_module(f"{_LAYER}self_attn.kv_b_proj", "linear", "columns"),
        *_module(f"{_LAYER}self_attn.o_proj", "linear", "rows"),
        *_swiglu("mlp", _PROJ),
        *_module(f"{_LAYER}mlp.gate", "router"),
        Row(name=f"{_LAYER}mlp.gate.e_score_correction_bias"),
        *_swiglu("mlp.experts.{expert}", _PROJ),
        *_swiglu("mlp.shared_experts", _PROJ),
    ),
    "gpt_oss": (
        *_OUTER,
        *_norms("input_layernorm", "post_attention_layernorm"),
        *_attention(bias=True),
        Row(name=f"{_LAYER}self_attn.sinks"),
        *_module(f"{_LAYER}mlp.router", "router", bias=True),
        # One tensor for all experts, with inputs before outputs. No FP8 format has these.
        *(
            Row(name=f"{_LAYER}mlp.experts.{name}")
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        ),
    ),
}
"""The rows of each family. A file has some of them: rows without a parameter are not used."""


def names(
    layout: str,
    modules: Mapping[str, str] | None = None,
    *,
    axes: Mapping[str, str] | None = None,
) -> tuple[Row, ...]:
    """The rows of a known family, with the paths that a model of yours has.

    Args:
      layout: "llama" (also Mistral), "qwen" (Qwen 2 and 3, dense or with experts), "gemma" (2 and
        3, text), "mixtral", "deepseek" (V2 and V3) or "gpt_oss".
      modules: a dict from names of modules in the file to paths in the model. An entry holds for
        all that is below it: {"model.layers.{layer}": "blocks/{layer}"}. The longest name decides.
        An empty path is the root of the model. A path without the placeholder stacks the tensors
        along leading axes, as `nn.scan` does. Default: {}. A path is then the name in the file,
        with flax's word for the last key: "model/layers/0/mlp/up_proj/kernel".
      axes: the axes of weights by the name of their module, if a kernel is not [in, out]:
        {"model.layers.{layer}.self_attn.q_proj": "(heads features) in -> in heads features"}. With
        stacked layers the right side has "layer", too. The axes of a bias follow.

    Returns:
      A tuple of `Row`s. Add rows for parameters that the family lacks.

    Raises:
      ValueError: if the layout is unknown, or if no row begins with a name of `modules` or `axes`.

    Example:
      >>> import jaxfp8 as fp8
      >>> paths = {"model.layers.{layer}": "blocks/{layer}", "model": ""}
      >>> rows = fp8.checkpoint.names("llama", paths)
      >>> [row.found_at for row in rows][:3]
      ['embed_tokens/embedding', 'norm/scale', 'lm_head/kernel']
    """
    check_one_of("layout", layout, tuple(LAYOUTS))
    modules, axes = dict(modules or {}), dict(axes or {})
    for name, value in {**modules, **axes}.items():
        check_type("modules and axes", value, str, "dicts of strings")
        if not any(_begins(name, row.name) for row in LAYOUTS[layout]):
            raise ValueError(
                f"{name!r} is the beginning of no name of layout {layout!r}. Names are "
                f"{[row.name for row in LAYOUTS[layout]][:20]}."
            )
    return tuple(_placed(row, modules, axes) for row in LAYOUTS[layout])


def rows_for(names: Names, parameters: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows that an argument `names` says. None: names like the paths of the parameters."""
    if names is None:
        return mirrored(parameters)
    if isinstance(names, str):
        check_one_of("names", names, tuple(LAYOUTS))
        return LAYOUTS[names]
    for row in names:
        check_type("names", row, Row, "fp8.checkpoint.Rows, such as fp8.checkpoint.names(...)")
    return tuple(names)


def _begins(module: str, name: str) -> bool:
    return name.startswith(f"{module}.")


def _placed(row: Row, modules: Mapping[str, str], axes: Mapping[str, str]) -> Row:
    """A row with the path and the axes of a model."""
    path = default_path(row.name, row.kind)
    if known := [module for module in modules if _begins(module, row.name)]:
        module = max(known, key=len)
        below = path[len(module) + 1 :]  # dots and slashes are as long
        path = f"{modules[module]}/{below}" if modules[module] else below
    text = axes.get(row.module, "")
    if text and row.name.endswith(".bias"):
        text = str(AxisMap.parse(text).without_input())
    return dataclasses.replace(row, path=path, axes=text)
