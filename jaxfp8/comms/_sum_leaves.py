"""Which gradients can be summed over which mesh axes: the checks of `all_reduce_gradients`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, PyTree
from jaxfp8.sharding._amax import manual_axes, types_tell, varying
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def leaves_of(tree: PyTree) -> tuple[list[Any], Any]:
    """The leaves of a tree and its structure. A QuantizedTensor is one leaf.

    Example:
      >>> leaves_of({"w": 1.0})[0]
      [1.0]
    """
    return jax.tree.flatten(tree, is_leaf=_is_quantized)


def names_of(axis_name: str | Sequence[str], argument: str = "axis_name") -> tuple[str, ...]:
    """The names of mesh axes as a tuple, after a check that all of them are manual here.

    Raises:
      ValueError: if there is none, if one is named twice, or if one is no manual axis.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if len(set(names)) != len(names) or (not names and argument == "axis_name"):
        raise ValueError(
            f"{argument}={axis_name!r} must name each mesh axis once, and at least one. Write "
            '"data", or ("data", "fsdp").'
        )
    if unknown := [name for name in names if name not in manual_axes()]:
        raise ValueError(
            f"{argument}={axis_name!r}: {unknown} are no manual mesh axes here. The manual axes "
            f"are {list(manual_axes())}. Call this inside jax.shard_map, over some of its axes."
        )
    return names


def local_gradients(grads: PyTree, names: tuple[str, ...]) -> tuple[list[str], list[Any], Any]:
    """The paths of the leaves, the leaves, and their structure, after a check of all leaves.

    Args:
      grads: a tree of gradients [...] of this device.
      names: the mesh axes over which they will be summed.

    Raises:
      TypeError, ValueError: for a leaf that is no local gradient. Leaves of dtype float0 pass.
    """
    leaves, structure = leaves_of(grads)
    numbered = structure.unflatten(range(len(leaves)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(numbered)]
    for path, leaf in zip(paths, leaves, strict=True):
        if not has_no_values(leaf):
            check_leaf(path, leaf, names)
    return paths, leaves, structure


@jax.custom_jvp
def not_differentiated(x: Array) -> Array:
    """x, which cannot be differentiated. A cast to FP8 would have the derivative 0.

    Example:
      >>> not_differentiated(jax.numpy.float32(1.0))
      Array(1., dtype=float32)
    """
    return x


@not_differentiated.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "sums of gradients in FP8 have no derivative. Use method=BFloat16Sum(), or "
        "jax.lax.stop_gradient around the gradients."
    )


def has_no_values(leaf: Any) -> bool:
    """Whether a leaf is the gradient of an integer parameter, which has no values (float0)."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def check_leaf(path: str, leaf: Any, names: tuple[str, ...]) -> None:
    """Raise TypeError or ValueError if a leaf is no local gradient.

    Args:
      path: where the leaf is in its tree.
      leaf: the gradient, [...].
      names: the mesh axes over which it will be summed.
    """
    where = f"the gradient {path or 'grads'}"
    if _is_quantized(leaf):
        raise TypeError(
            f"{where} is a QuantizedTensor. Its values have scales of their own, so they cannot be "
            "added. Pass the gradient that leaf.dequantize() returns."
        )
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        found = getattr(leaf, "dtype", type(leaf).__name__)
        raise TypeError(
            f"{where} has the dtype {found}, and a gradient must be real floating point. Take "
            "other leaves out, for instance with jax.tree.map or eqx.partition."
        )
    if jnp.dtype(leaf.dtype).itemsize == 1:
        raise TypeError(
            f"{where} has the dtype {leaf.dtype}, which has no scale. Pass the gradient in "
            "bfloat16 or float32. The method casts it to FP8."
        )
    if types_tell() and (missing := [name for name in names if name not in varying(leaf)]):
        raise ValueError(
            f"{where} does not vary over {missing}. JAX has already summed it, because the "
            "parameters do not vary over these axes. Differentiate with respect to "
            f'jax.lax.pcast(params, {tuple(missing)}, to="varying").'
        )


def check_state_varies_not(path: str, state: Sequence[Array], names: tuple[str, ...]) -> None:
    """Raise ValueError if the state of a gradient differs between the devices that are summed."""
    found = sorted({name for leaf in state for name in varying(leaf)} & set(names))
    if found:
        raise ValueError(
            f"the state of the gradient {path or 'grads'} varies over {found}, over which the "
            "gradient is summed. All devices of a sum need the same mu. Pass the state with "
            "in_specs=jax.P() and out_specs=jax.P()."
        )


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedTensor)
