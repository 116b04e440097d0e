"""Quantizer state: what delayed scaling remembers between steps.

State is a pytree of its own, apart from parameters and gradients. Inside a loss that `fp8.value_and_grad` differentiates,
a state carries a probe, whose cotangent is the ledger of the amaxes that were seen; outside it never does. Tree structure,
shapes and dtypes never change from step to step: "unset" is a scale of 0, not a missing leaf.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, PyTree
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe, Row


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ledger"], meta_fields=["all_set", "reduce_axes"])
@dataclasses.dataclass(frozen=True)
class Probe:
    """What a state carries while it is being differentiated.

    Attributes:
      ledger: f32[..., BINS, R] zeros; its cotangent brings the amaxes back. None in a frozen state.
      all_set: no scale is unset, so no cast has to look at its own amax (static).
      reduce_axes: mesh axes that the caller named because types do not tell them (static).
    """

    ledger: Array | None
    all_set: bool
    reduce_axes: tuple[str, ...] | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "amax_history", "nonfinite_steps", "fingerprint", "probe"],
    meta_fields=["rows", "frozen"],
)
@dataclasses.dataclass(frozen=True)
class MatmulState:
    """Quantizer state of one matmul (of its three: fprop, dgrad, wgrad). Leading axes stack layers or experts.

    Attributes:
      scale: f32[..., R], multiplies stored values back to real ones; 0 = unset.
      amax_history: f32[..., R, H]; slot 0 is the staging slot, slots 1 to H-1 run from oldest to newest.
      nonfinite_steps: f32[..., R], steps whose amax was inf or NaN.
      fingerprint: f32[..., R], identifies the tensor and the quantizer of each row (`Row.fingerprint`).
        A file holds arrays only, so it needs this one to identify the rows. No step changes it.
      probe: None except inside a differentiated loss.
      rows: what each of the R rows follows, and by which policy (static).
      frozen: scales are fixed and nothing is collected (static).

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> state.scale.shape, state.amax_history.shape
      ((3,), (3, 16))
    """

    scale: Array
    amax_history: Array
    nonfinite_steps: Array
    fingerprint: Array
    probe: Probe | None
    rows: tuple[Row, ...]
    frozen: bool = False

    def __repr__(self) -> str:
        names = " ".join(row.tensor for row in self.rows)
        leaves = (f"{name}={getattr(self, name)}" for name in LEAVES if name != "fingerprint")
        return f"MatmulState of {names}{' (frozen)' if self.frozen else ''}: {', '.join(leaves)}"


LEAVES = ("scale", "amax_history", "nonfinite_steps", "fingerprint")
"""The arrays of a state between steps. A checkpoint saves these."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["amax"], meta_fields=["rows"])
@dataclasses.dataclass(frozen=True)
class SeenAmax:
    """The largest amaxes that a matmul saw since the last commit: f32[..., R]; 0 = none, inf = one was not finite."""

    amax: Array
    rows: tuple[Row, ...]


def is_state(node: object) -> bool:
    """Whether a tree node is the state of one matmul.

    Example:
      >>> is_state(None)
      False
    """
    return isinstance(node, MatmulState)


def is_node(node: object) -> bool:
    """Whether a tree node is a state, or what a state saw.

    Example:
      >>> is_node(())
      False
    """
    return isinstance(node, MatmulState | SeenAmax)


def init_state(recipe: Recipe) -> MatmulState | tuple[()]:
    """The state of one matmul before its first step: all scales unset. `()` for a recipe without state.

    For L stacked layers or E experts, give the leaves a leading axis: `jax.vmap(lambda _: init_state(r))(jnp.zeros(L))`.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.init_state(fp8.recipes.current())
      ()
    """
    check_recipe(recipe)
    if not recipe.rows:
        return ()
    return unset_state(recipe.rows)


def history_length(rows: tuple[Row, ...]) -> int:
    """H, the history length, which is the same for all rows of a state.

    Example:
      >>> import jaxfp8 as fp8
      >>> history_length(fp8.recipes.delayed().rows)
      16
    """
    return rows[0].quantizer.history_length


def unset_state(rows: tuple[Row, ...], stacked: tuple[int, ...] = ()) -> MatmulState:
    """The state of matmuls before their first step.

    `stacked` has the sizes of the leading axes, of layers or experts.

    Example:
      >>> import jaxfp8 as fp8
      >>> unset_state(fp8.recipes.delayed().rows, (4,)).amax_history.shape
      (4, 3, 16)
    """
    shape = *stacked, len(rows)
    # Separate arrays: a donated buffer must not appear twice.
    scale, nonfinite_steps = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    history = jnp.zeros((*shape, history_length(rows)), jnp.float32)
    return MatmulState(scale, history, nonfinite_steps, jnp.asarray(fingerprints(rows, shape)), None, rows)


def fingerprints(rows: tuple[Row, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The fingerprints of rows, f32[..., R], for a state of this shape.

    Example:
      >>> import jaxfp8 as fp8
      >>> fingerprints(fp8.recipes.delayed().rows, (4, 3)).shape
      (4, 3)
    """
    return np.broadcast_to(np.array([row.fingerprint for row in rows], np.float32), shape)


def map_states(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """tree.map over states; anything else in the tree is an error.

    Example:
      >>> import jaxfp8 as fp8
      >>> map_states(lambda state: state.scale.shape, {"layer": fp8.init_state(fp8.recipes.delayed())})
      {'layer': (3,)}
    """
    check_tree(tree)
    return jax.tree.map(function, tree, *rest, is_leaf=is_node)


RESTORED = (
    "If it was restored from a file without a target (Orbax, msgpack), it is a tree of dicts: pass it through "
    "fp8.check_state(restored, like=fresh_state) first."
)


def check_tree(tree: PyTree) -> None:
    """Raise FP8StateError unless the tree holds states and nothing else.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_tree({"layer": fp8.init_state(fp8.recipes.delayed())})
    """
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node):
        if isinstance(node, SeenAmax):
            raise FP8StateError(
                "expected quantizer state, found SeenAmax, what a step saw, at "
                f"{jax.tree_util.keystr(path) or 'the top of the tree'}; pass fp8.commit(state, seen)."
            )
        if not is_state(node):
            raise FP8StateError(
                f"expected quantizer state, found {shown(node)} at {jax.tree_util.keystr(path) or 'the top of the tree'}; pass "
                f"the state from fp8.init_state, from variables[COLLECTION] or from the last step, and nothing else. {RESTORED}"
            )


def shown(node: object) -> str:
    """What a message shows of something that is no state.

    Example:
      >>> shown({"scale": 0.0})
      "a dict with the keys ['scale']"
    """
    if node is None or isinstance(node, str | int | float):
        return repr(node)
    if isinstance(node, dict):
        return f"a dict with the keys {list(node)[:6]}"
    shape = getattr(node, "shape", None)
    return f"an object of type {type(node).__name__}" + (f" of shape {list(shape)}" if shape is not None else "")


def freeze(state: PyTree) -> PyTree:
    """The same scales, fixed: uses collect nothing and no commit changes them. For LoRA on a frozen base, for evaluation.

    A row that is still unset quantizes with the current amax of its tensor.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.freeze(fp8.init_state(fp8.recipes.delayed())).frozen
      True
    """
    return map_states(lambda s: dataclasses.replace(s, frozen=True), state)
