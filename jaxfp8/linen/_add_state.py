"""`add_state`: a linen model's variables from a checkpoint without quantizer state."""

import types
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta, unfreeze

from jaxfp8._call import Example
from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.linen._state import COLLECTION
from jaxfp8.state._fresh_state import concrete
from jaxfp8.state._saved_params import matched, saved_leaves
from jaxfp8.state._saved_tree import names_of
from jaxfp8.state._trees import check_tree, shown


def add_state(
    variables: PyTree,
    model: nn.Module,
    *args: Any,
    rename: Mapping[str, str] = types.MappingProxyType({}),
    **kwargs: Any,
) -> dict[str, Any]:
    r"""The variables of a checkpoint without quantizer state, with fresh state of an FP8 model.

    Nothing is computed to find what the model needs: `model.init` is traced. The arrays of the
    checkpoint are returned as they are. An array of a narrower dtype is converted to that of the
    model, for instance from bfloat16 to float32. A conversion that would round is an error.

    Args:
      variables: the variables of the checkpoint, `{"params": ...}`, with the other collections of
        the model (`"batch_stats"`). They may be restored without a target, from orbax or msgpack.
        Collections that a call makes, such as a cache, may be missing.
      model: the model that will run, with FP8 layers or from `fp8.convert`.
      *args: the positional arguments of a call of the model. Arrays may be
        `jax.ShapeDtypeStruct`s.
      rename: regular expressions of names, and what replaces them. A name is one part of a path
        below the collection. The whole name must match, and the first pattern that matches
        decides. Layers without a name are called after their class:
        `rename={r"Dense_(\d+)": r"FP8Dense_\1"}`.
      **kwargs: the keyword arguments of the call.

    Returns:
      Variables with the tree of `model.init`, boxes included (`nn.Partitioned`). The state is in
      the collection `fp8.linen.COLLECTION`, as NumPy arrays, which fit a mesh of any size. If the
      recipes have no state, there is no such collection.

    Raises:
      TypeError: if `model` is no unbound linen module, or `rename` is no dict of strings.
      FP8StateError: if `variables` hold quantizer state.
      ValueError: if `variables` lack an array of the model, hold another one, or hold one of
        another shape or a wider dtype. Also if a pattern of `rename` matches no name, or makes one
        name of two.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x = jnp.ones((8, 32))
      >>> old = nn.Dense(16).init(jax.random.key(0), x)
      >>> model = fp8.linen.FP8Dense(16)
      >>> sorted(fp8.linen.add_state(old, model, x))
      ['_overwrite_with_gradient', 'params']
    """
    if not isinstance(model, nn.Module) or model.scope is not None:
        raise TypeError(
            f"model is {shown(model) if not isinstance(model, nn.Module) else 'a bound module'}, "
            "but an unbound flax.linen.Module is needed. Write for instance "
            "add_state(variables, FP8Dense(16), x). For nnx see fp8.nnx.add_state."
        )
    _check_variables(variables)
    keys = {"params": jax.random.key(0)}  # flax draws from it for every stream that is missing
    types_of = Example(args, kwargs).shapes(lambda *a, **k: nn.Module.init(model, keys, *a, **k))
    fresh: dict[str, Any] = dict(unfreeze(types_of))
    states = concrete(fresh.pop(COLLECTION, {}))
    check_tree(states)
    # What a call sows or caches is in no checkpoint. A call makes it anew, or flax names it.
    for name in set(fresh) - {"params", "batch_stats"} - set(variables):
        del fresh[name]
    wanted = saved_leaves(fresh, {}, called="model", read=_unboxed)
    given = saved_leaves(variables, rename, called="variables", read=_unboxed, kept=1)
    found = matched(wanted, given, called="variables", optional=())

    def joined(path: Any, node: Any) -> Any:
        array = found[names_of(path)]
        return node.replace_boxed(array) if isinstance(node, meta.AxisMetadata) else array

    new: dict[str, Any] = jax.tree_util.tree_map_with_path(joined, fresh, is_leaf=_is_box)
    return new | ({COLLECTION: states} if states else {})


def _check_variables(variables: Any) -> None:
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables is {shown(variables)}, but a dict of collections is needed. Write "
            "{'params': params}."
        )
    if COLLECTION in variables:
        raise FP8StateError(
            f"variables already hold the collection {COLLECTION!r}, but a checkpoint without "
            "quantizer state is needed. If it is this model's, use the variables as they are, and "
            f"check the state with fp8.check_state(variables[{COLLECTION!r}], like). If it is "
            "another library's, leave the collection out."
        )
    if "params" not in variables:
        raise ValueError(
            f"variables hold {sorted(map(str, variables))[:8]}, but no collection 'params'. Write "
            "{'params': params}, with the other collections of the model beside it."
        )


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _unboxed(node: Any) -> Any:
    """The array in a box. `unbox` of flax's own boxes would also place it on a mesh."""
    if isinstance(node, meta.Partitioned):
        return node.value
    return node.unbox() if isinstance(node, meta.AxisMetadata) else node
