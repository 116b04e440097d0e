"""A fresh state in place of an abstract one, which has shapes but no values."""

import dataclasses
from typing import Any

import jax
import jax.extend.backend
import numpy as np

from jaxfp8._typing import PyTree
from jaxfp8.state._state import LEAVES, MatmulState, is_state
from jaxfp8.state._unset import unset_state


def fresh_like(state: MatmulState) -> MatmulState:
    """The state before the first step, stacked, frozen and sharded like `state`.

    `state` may be abstract. A leaf without a place on devices becomes a NumPy array, which fits a
    mesh of any size. If a checkpoint library uses it as a target, the library does not put the
    restored array on one device.

    Example:
      >>> import jax
      >>> import jaxfp8 as fp8
      >>> abstract = jax.eval_shape(lambda: fp8.init_state(fp8.recipes.delayed()))
      >>> fresh_like(abstract).scale
      array([0., 0., 0.], dtype=float32)
    """
    with jax.ensure_compile_time_eval():  # makes arrays, also while a function is traced
        fresh = unset_state(state.rows, state.scale.shape[:-1])
        placed = {name: _placed(getattr(fresh, name), getattr(state, name)) for name in LEAVES}
        return dataclasses.replace(fresh, frozen=state.frozen, **placed)


def _placed(fresh: jax.Array, like: Any) -> Any:
    sharding = placement(like)
    return np.array(fresh) if sharding is None else jax.device_put(fresh, sharding)


def placement(like: Any) -> jax.sharding.Sharding | None:
    """The sharding of an array or type. None if nobody placed it on devices.

    Example:
      >>> import jax.numpy as jnp
      >>> placement(jnp.ones(3))
    """
    if isinstance(like, jax.Array) and not getattr(like, "committed", False):
        return None  # jax moves it to the devices of what it is used with
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or _of_an_abstract_mesh(sharding):
        return None
    return sharding


def _of_an_abstract_mesh(sharding: jax.sharding.Sharding) -> bool:
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def concrete(tree: PyTree) -> PyTree:
    """The same tree, with a fresh state in place of each abstract one.

    `jax.eval_shape` makes abstract states. No step has used such a state, so a fresh one has the
    same values. A state stays abstract on devices that this process can only compile for.

    Example:
      >>> concrete(())
      ()
    """

    def one(node: Any) -> Any:
        return fresh_like(node) if is_state(node) and _can_be_made(node) else node

    return jax.tree.map(one, tree, is_leaf=is_state)


def _can_be_made(state: MatmulState) -> bool:
    types = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.ShapeDtypeStruct)]
    return bool(types) and all(_exists(each.sharding) for each in types)


def _exists(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether the devices of a sharding can run programs. Compile-only devices have no backend."""
    if sharding is None or _of_an_abstract_mesh(sharding):
        return True
    backends = jax.extend.backend.backends().values()
    clients = [getattr(device, "client", None) for device in sharding.device_set]
    return all(any(client is backend for backend in backends) for client in clients)
