"""What parameters can be: arrays, and quantized weights.

A quantized weight is a pytree node that holds FP8 tensors. It is one parameter: it has one master
weight, and one gradient, which is a plain array. This file alone knows such nodes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.optim._bfloat16_bits import rounded_to_bfloat16


def is_weight(node: Any) -> bool:
    """Whether a node of a tree of parameters is a quantized weight.

    Example:
      >>> is_weight(jnp.ones(2))
      False
    """
    return False


def value_of(node: Any) -> Array:
    """The float32 array [...] that a quantized weight stands for."""
    return node.dequantize().astype(jnp.float32)


def rebuilt(node: Any, w: Array, state: PyTree | None) -> Any:
    """The quantized weight `node` with the tensors of another array.

    Args:
      node: a quantized weight of shape [...].
      w: bfloat16 [...].
      state: the quantizer state that `update` was given, or None.
    """
    raise NotImplementedError(f"{type(node).__name__} is no quantized weight.")


class Parameters(NamedTuple):
    """A tree of parameters, flat. A quantized weight is one of its leaves."""

    paths: list[str]
    leaves: list[Any]
    treedef: Any

    @staticmethod
    def of(params: PyTree) -> "Parameters":
        """The parameters of a tree.

        Example:
          >>> Parameters.of({"w": 1.0, "b": None}).paths
          ["['w']"]
        """
        found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_weight)
        paths = [jax.tree_util.keystr(path) for path, _ in found]
        return Parameters(paths, [leaf for _, leaf in found], treedef)

    def like(self, tree: PyTree) -> list[Any]:
        """What another tree has in the place of each parameter."""
        return list(self.treedef.flatten_up_to(tree))

    def tree(self, leaves: list[Any]) -> PyTree:
        """The tree of parameters with other leaves."""
        return jax.tree.unflatten(self.treedef, leaves)


def dtype_of(leaf: Any) -> DType | None:
    """The dtype of a parameter; None for a quantized weight.

    Example:
      >>> dtype_of(jnp.ones(2, jnp.bfloat16))
      dtype(bfloat16)
    """
    return None if is_weight(leaf) else jnp.result_type(leaf)


def has_master(leaf: Any, path: str) -> bool:
    """Whether a parameter gets a master weight.

    Parameters in float32 and float64 are exact enough themselves. Parameters that are no floats are
    not trained in bfloat16.

    Raises:
      ValueError: if the parameter is an FP8 array, which has no scale.

    Example:
      >>> has_master(jnp.ones(2, jnp.bfloat16), "['w']"), has_master(jnp.ones(2), "['w']")
      (True, False)
    """
    dtype = dtype_of(leaf)
    if dtype is None or dtype in (jnp.bfloat16, jnp.float16):
        return True
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"params{path} is an array of {dtype}, which has no scale. Use bfloat16, float16, "
            "float32 or a quantized weight."
        )
    return False


def start_of(leaf: Any) -> Array:
    """The float32 value [...] of a parameter, at which its master weight starts.

    It is a copy, so the optimizer state can be donated while the parameter is in use.

    Example:
      >>> start_of(jnp.ones(2, jnp.bfloat16))
      Array([1., 1.], dtype=float32)
    """
    return value_of(leaf) if is_weight(leaf) else jnp.array(leaf, jnp.float32, copy=True)


def rounded(master: Array, like: Any, state: PyTree | None) -> Any:
    """The parameter that belongs to a master weight.

    Args:
      master: float32 [...].
      like: the parameter that it replaces: a bfloat16 or float16 array [...], or a quantized weight
        [...].
      state: quantizer state, or None.

    Example:
      >>> rounded(jnp.float32(0.1), jnp.bfloat16(0), None)
      Array(0.100098, dtype=bfloat16)
    """
    if dtype_of(like) == jnp.float16:
        return master.astype(jnp.float16)
    w = rounded_to_bfloat16(master)
    return rebuilt(like, w, state) if is_weight(like) else w
