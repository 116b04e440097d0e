"""The arguments of the high-precision twin of a step: weights in FP8 become arrays."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxfp8._typing import PyTree
from jaxfp8.diagnostics._argument_kinds import (
    is_master_weights_state,
    is_optimizer_state,
    is_quantized_weight,
)
from jaxfp8.ops._weight_states import path_name
from jaxfp8.optim._masters import BFloat16PlusState
from jaxfp8.state._state import is_node
from jaxfp8.weights._quantized_weight import is_weight


def arguments_of_twin(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with FP8 weights as types of arrays of their own dtype.

    A bfloat16 weight is a part of its `BFloat16Plus` master weight. So the optimizer of the twin
    does not store that part.

    Example:
      >>> arguments_of_twin([1.0])
      (1.0,)
    """
    flat = jax.tree_util.tree_leaves_with_path(args, is_leaf=_is_leaf)
    weights = [path_name(path) for path, node in flat if is_quantized_weight(node)]
    if not weights:
        return tuple(args)
    return tuple(jax.tree.map(lambda node: _of_twin(node, weights), args, is_leaf=_is_leaf))


def _is_leaf(node: Any) -> bool:
    return (
        is_optimizer_state(node)
        or is_master_weights_state(node)
        or is_node(node)
        or is_quantized_weight(node)
    )


def _of_twin(node: Any, weights: list[str]) -> Any:
    if is_quantized_weight(node):
        values = node.values[0] if is_weight(node) else node.values
        sharding = getattr(values, "sharding", None)
        return jax.ShapeDtypeStruct(node.shape, node.dtype, sharding=sharding)
    if is_master_weights_state(node) or is_optimizer_state(node):
        return jax.tree.map(
            lambda n: _without_high(n, weights) if isinstance(n, BFloat16PlusState) else n,
            node, is_leaf=lambda n: isinstance(n, BFloat16PlusState),
        )  # fmt: skip
    return node


def _without_high(masters: BFloat16PlusState, weights: list[str]) -> PyTree:
    """The master weights without the high parts that the twin has as its weights."""

    def one(path: Any, high: Any) -> Any:
        name = path_name(path)
        in_twin = any(weight == name or weight.endswith(f"/{name}") for weight in weights)
        return None if in_twin else high

    return masters._replace(high=jax.tree_util.tree_map_with_path(one, masters.high))
