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

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, PyTree
from jaxfp8.ops._ledger import BINS
from jaxfp8.recipes._recipe import Recipe, Row


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ledger"], meta_fields=["all_set", "reduce_axes"])
@dataclasses.dataclass(frozen=True)
class Probe:
    """What a state carries while it is being differentiated.

    Attributes:
      ledger: f32[..., R, BINS] zeros; its cotangent brings the amaxes back. None in a frozen state.
      all_set: no scale is unset, so no cast has to look at its own amax (static).
      reduce_axes: mesh axes that the caller named because types do not tell them (static).
    """

    ledger: Array | None
    all_set: bool
    reduce_axes: tuple[str, ...] | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "amax_history", "nonfinite_steps", "probe"],
    meta_fields=["rows", "frozen"],
)
@dataclasses.dataclass(frozen=True)
class MatmulState:
    """Quantizer state of one matmul (of its three: fprop, dgrad, wgrad). Leading axes stack layers or experts.

    Attributes:
      scale: f32[..., R], multiplies stored values back to real ones; 0 = unset.
      amax_history: f32[..., R, H]; slot 0 is the staging slot, slots 1 to H-1 run from oldest to newest.
      nonfinite_steps: f32[..., R], steps whose amax was inf or NaN.
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
    probe: Probe | None
    rows: tuple[Row, ...]
    frozen: bool = False

    def __repr__(self) -> str:
        names = " ".join(row.tensor for row in self.rows)
        leaves = (f"{name}={getattr(self, name)}" for name in ("scale", "amax_history", "nonfinite_steps"))
        return f"MatmulState of {names}{' (frozen)' if self.frozen else ''}: {', '.join(leaves)}"


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
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe={recipe!r} is no Recipe; make one with fp8.recipes, for instance fp8.recipes.delayed()."
        )
    if not recipe.rows:
        return ()
    return unset_state(recipe.rows)


def unset_state(rows: tuple[Row, ...], stacked: tuple[int, ...] = ()) -> MatmulState:
    """The state of matmuls before their first step; `stacked`: the leading axes, of layers or experts.

    Example:
      >>> import jaxfp8 as fp8
      >>> unset_state(fp8.recipes.delayed().rows, (4,)).amax_history.shape
      (4, 3, 16)
    """
    shape = *stacked, len(rows)
    # Separate arrays: a donated buffer must not appear twice.
    scale, nonfinite_steps = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    history = jnp.zeros((*shape, rows[0].quantizer.history_length), jnp.float32)
    return MatmulState(scale, history, nonfinite_steps, None, rows)


def map_states(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """tree.map over states; anything else in the tree is an error.

    Example:
      >>> import jaxfp8 as fp8
      >>> map_states(lambda state: state.scale.shape, {"layer": fp8.init_state(fp8.recipes.delayed())})
      {'layer': (3,)}
    """

    def checked(node: Any, *others: Any) -> Any:
        if not is_state(node):
            raise FP8StateError(
                f"expected quantizer state, found {type(node).__name__} in its tree; pass what fp8.init_state, the layer's "
                "collection or the last step returned, and nothing else."
            )
        return function(node, *others)

    return jax.tree.map(checked, tree, *rest, is_leaf=is_node)


def freeze(state: PyTree) -> PyTree:
    """The same scales, fixed: uses collect nothing and no commit changes them. For LoRA on a frozen base, for evaluation.

    A row that is still unset quantizes with the current amax of its tensor.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.freeze(fp8.init_state(fp8.recipes.delayed())).frozen
      True
    """
    return map_states(lambda s: dataclasses.replace(s, frozen=True), state)


@jax.custom_vjp
def _split(ledger: Array) -> tuple[Array, Array]:
    return ledger, ledger


_split.defvjp(lambda ledger: ((ledger, ledger), None), lambda _, cotangents: (jnp.maximum(*cotangents),))


def fork(state: PyTree) -> tuple[PyTree, PyTree]:
    """Two handles on one state, for a layer that is used twice: their amaxes are joined by an exact maximum.

    Without it amaxes of several uses meet in a sum of ledgers, whose maximum is never below the true one and at most 1/8
    above. In a loop, carry one handle and use the other.

    Example:
      >>> import jaxfp8 as fp8
      >>> first, second = fp8.fork(fp8.init_state(fp8.recipes.delayed()))
    """

    def one(s: MatmulState) -> tuple[MatmulState, MatmulState]:
        if s.probe is None or s.probe.ledger is None:
            return s, s
        handles = (dataclasses.replace(s.probe, ledger=ledger) for ledger in _split(s.probe.ledger))
        first, second = (dataclasses.replace(s, probe=probe) for probe in handles)
        return first, second

    states, structure = jax.tree.flatten(state, is_leaf=is_state)
    pairs = map_states(one, states)
    first, second = (jax.tree.unflatten(structure, [pair[i] for pair in pairs]) for i in (0, 1))
    return first, second


def with_probes(state: PyTree, ledgers: PyTree | None, *, all_set: bool, reduce_axes: tuple[str, ...] | None) -> PyTree:
    """The state as a differentiated loss sees it. `ledgers`: a tree of f32[..., R, BINS] as `zero_ledgers` gives."""

    def one(s: MatmulState, ledger: Array | None) -> MatmulState:
        return dataclasses.replace(s, probe=Probe(None if s.frozen else ledger, all_set, reduce_axes))

    return map_states(one, state, ledgers)


def without_probes(tree: PyTree) -> PyTree:
    """A tree whose states, if it has any, are as they are outside of a differentiated loss."""
    return jax.tree.map(lambda n: dataclasses.replace(n, probe=None) if is_state(n) else n, tree, is_leaf=is_state)


def zero_ledgers(state: PyTree) -> PyTree:
    """Zeros f32[..., R, BINS] that inherit stacking, sharding and variance of their state."""
    return map_states(lambda s: jnp.broadcast_to(s.scale[..., None] * 0, (*s.scale.shape, BINS)), state)
