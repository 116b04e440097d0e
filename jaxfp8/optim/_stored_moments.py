"""The nodes of an optimizer state that hold stored moments."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import PyTree
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.optim._grouped_formats import ExpandedFP8State, Int8State, LinearInt8State
from jaxfp8.optim._masters import Float16State

_STORED = (QuantizedTensor, Float16State, Int8State, LinearInt8State, ExpandedFP8State)
_CODES, _FP8 = (jnp.int8, jnp.uint8), (jnp.float8_e4m3fn, jnp.float8_e5m2)


def is_stored(node: Any) -> bool:
    """Whether a node is a moment that a format has stored. A bfloat16 array is no node.

    Example:
      >>> is_stored(jnp.ones(2))
      False
    """
    return isinstance(node, _STORED)


def with_nodes(state: PyTree) -> PyTree:
    """An optimizer state whose stored moments are nodes again.

    `nnx.Optimizer.update` turns a node into an `nnx.State` with its fields. They are told from
    parameters by their dtypes.

    Example:
      >>> with_nodes({"w": 1.0})
      {'w': 1.0}
    """
    return jax.tree.map(
        lambda node: _node_of(node) or node, state, is_leaf=lambda node: bool(_node_of(node))
    )


def _node_of(fields: Any) -> Any:
    """The stored moment with these fields, or None."""
    if not isinstance(fields, nnx.State):
        return None
    arrays: dict[Any, Any] = dict(fields)
    dtypes = {name: getattr(x, "dtype", None) for name, x in arrays.items()}
    match {*arrays}:
        case names if names == {*Int8State._fields} and dtypes["roots"] in _CODES:
            return Int8State(**arrays)
        case names if names == {*LinearInt8State._fields} and dtypes["codes"] == jnp.int8:
            return LinearInt8State(**arrays)
        case names if names == {*ExpandedFP8State._fields} and dtypes["values"] in _FP8:
            return ExpandedFP8State(**arrays)
        case names if names == {*Float16State._fields} and dtypes["values"] == jnp.float16:
            return Float16State(**arrays)
        case names if names == {"values", "scale"} and dtypes["values"] in _FP8:
            return QuantizedTensor(**arrays, granularity=PerTensor(), dtype=jnp.dtype(jnp.float32))
    return None
