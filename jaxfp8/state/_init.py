"""States before their first step, and their partition specs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import PyTree
from jaxfp8.quantizers._base import RowState
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe, Row
from jaxfp8.state._state import LEAVES, MatmulState, check_tree, is_state

# States before their first step, and the fingerprints of their rows.


def init_state(recipe: Recipe) -> MatmulState | tuple[()]:
    """The state of one matmul before its first step. All scales are unset.

    For L stacked layers or experts, give the leaves a leading axis: `jax.vmap(lambda _:
    init_state(recipe))(jnp.zeros(L))`.

    Args:
      recipe: the recipe of the matmul.

    Returns:
      A `MatmulState`, or `()` for a recipe without state.

    Raises:
      TypeError: if `recipe` is no recipe.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.init_state(fp8.recipes.current())
      ()
    """
    check_recipe(recipe)
    if not recipe.rows:
        return ()
    return unset_state(recipe.rows)


def unset_state(rows: tuple[Row, ...], stacked: tuple[int, ...] = ()) -> MatmulState:
    """The state of matmuls before their first step.

    `stacked` are the sizes of the leading axes, which stack layers or experts.
    """
    shape = *stacked, len(rows)
    # Each leaf gets its own array, because a donated buffer must not appear twice.
    scale, history, nonfinite_steps = map(jnp.asarray, unset_leaves(rows, shape))
    return MatmulState(
        scale, history, nonfinite_steps, jnp.asarray(fingerprints(rows, shape)), None, rows
    )


@functools.lru_cache(maxsize=1024)
def unset_leaves(rows: tuple[Row, ...], shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """scale, amax_history and nonfinite_steps before the first step, for a state of this shape."""
    # A step may be traced here, and an `init` may compute with jax. Its results must be values.
    with jax.ensure_compile_time_eval():
        leaves = [np.stack(each) for each in zip(*map(_first, rows), strict=True)]
    return tuple(np.broadcast_to(leaf, (*shape, *leaf.shape[1:])) for leaf in leaves)


def _first(row: Row) -> RowState:
    """The row before its first step. ValueError if the quantizer makes arrays of other shapes."""
    first = row.quantizer.init()
    shapes = tuple(np.shape(leaf) for leaf in first) if isinstance(first, tuple) else first
    if shapes != ((), (row.quantizer.history_length,), ()):
        raise ValueError(
            f"{type(row.quantizer).__name__}.init() makes arrays of shapes {shapes} for scale, "
            f"amax_history and nonfinite_steps. With history_length={row.quantizer.history_length} "
            f"the shapes must be (), ({row.quantizer.history_length},) and ()."
        )
    leaves: Any = (np.asarray(leaf, np.float32) for leaf in first)
    return RowState(*leaves)


@functools.lru_cache(maxsize=1024)
def fingerprints(rows: tuple[Row, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The fingerprints of rows, f32[..., R], for a state of this shape."""
    return np.broadcast_to(np.array([row.fingerprint for row in rows], np.float32), shape)


def same_rows(first: tuple[Row, ...], second: tuple[Row, ...]) -> bool:
    """Whether a state with the first rows may be used with the second.

    Their quantizers may round differently, because a state does not depend on the rounding.
    """
    if first == second:
        return True
    prints = [[(row.tensor, row.fingerprint) for row in rows] for rows in (first, second)]
    return prints[0] == prints[1]


# A fresh state in place of an abstract one, which has shapes but no values.


def fresh_like(state: MatmulState) -> MatmulState:
    """The state before the first step, stacked, frozen and sharded like `state`.

    `state` may be abstract. A leaf without a place on devices becomes a NumPy array, which fits a
    mesh of any size. A checkpoint library then does not restore it to one device.
    """
    with jax.ensure_compile_time_eval():  # makes arrays, also while a function is traced
        fresh = unset_state(state.rows, state.scale.shape[:-1])
        placed = {name: _placed(getattr(fresh, name), getattr(state, name)) for name in LEAVES}
        return dataclasses.replace(fresh, frozen=state.frozen, **placed)


def _placed(fresh: jax.Array, like: Any) -> Any:
    sharding = placement(like)
    return np.array(fresh) if sharding is None else jax.device_put(fresh, sharding)


def placement(like: Any) -> jax.sharding.Sharding | None:
    """The sharding of an array or type. None if nobody placed it on devices."""
    if isinstance(like, jax.Array) and not getattr(like, "committed", False):
        return None  # jax moves it to the devices of what it is used with
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or _of_an_abstract_mesh(sharding):
        return None
    return sharding


def _of_an_abstract_mesh(sharding: jax.sharding.Sharding) -> bool:
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def make_concrete(tree: PyTree) -> PyTree:
    """The same tree, with a fresh state in place of each abstract one.

    `jax.eval_shape` makes abstract states. No step has used such a state, so a fresh one has the
    same values. A state stays abstract on devices that this process can only compile for.
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


# The partition specs of quantizer state, from those of the weights.


def state_specs(state: PyTree, weight_specs: PyTree) -> PyTree:
    """The partition specs of quantizer state.

    The state of one matmul is a few numbers. It is replicated. States of stacked layers, experts or
    pipeline stages have the leading axes of their weights. A mesh splits these axes as it splits
    those of the weights.

    Args:
      state: a tree of `MatmulState`, or its types.
      weight_specs: a tree of the same structure. In the place of each state it has the `jax.P` of
        the weight.

    Returns:
      The tree of states, with a `jax.P` in the place of each array. Use it for `in_specs`,
      shardings or checkpoints.

    Raises:
      FP8StateError: if `state` holds anything but states.
      ValueError: if the trees differ.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> stages = jax.vmap(lambda _: fp8.init_state(fp8.recipes.delayed()))(jnp.zeros(4))
      >>> state_specs({"up": stages}, {"up": jax.P("pipe", "fsdp", "tensor")})["up"].scale
      P('pipe',)
    """
    check_tree(state)
    places = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state)
    ]
    leaves = jax.tree_util.tree_leaves_with_path(
        weight_specs, is_leaf=lambda node: node is None or isinstance(node, jax.P)
    )
    specs = {jax.tree_util.keystr(path): spec for path, spec in leaves}
    specs = {place: spec for place, spec in specs.items() if spec is not None or place in places}
    if set(places) != set(specs):
        raise ValueError(
            f"weight_specs has leaves at {list(specs)[:6]}, but the states are at {places[:6]}. "
            "Give one jax.P for each state."
        )

    def one(path: tuple[Any, ...], state: MatmulState) -> MatmulState:
        spec = specs[jax.tree_util.keystr(path)]
        if not isinstance(spec, jax.P):
            raise ValueError(
                f"weight_specs has {spec!r} in the place of the state of a matmul. Write the jax.P "
                "of its weight there."
            )
        # The axes of a state before its rows are the leading axes of the weight.
        return jax.tree.map(lambda _: jax.P(*spec[: state.scale.ndim - 1]), state)

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=is_state)
