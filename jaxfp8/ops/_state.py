"""Quantizer state: what delayed scaling remembers between steps, and how it changes.

State is a pytree of its own, apart from parameters and gradients. Inside a loss that `fp8.value_and_grad` differentiates,
a state carries a probe, whose cotangent is the ledger of the amaxes that were seen; outside it never does. Tree structure,
shapes and dtypes never change from step to step: "unset" is a scale of 0, not a missing leaf.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, PyTree
from jaxfp8.ops._ledger import BINS
from jaxfp8.quantizers._delayed import DelayedRow
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


def init_state(recipe: Recipe) -> MatmulState | tuple[()]:
    """The state of one matmul before its first step: all scales unset. `()` for a recipe without state.

    For L stacked layers or E experts, give the leaves a leading axis: `jax.vmap(lambda _: init_state(r))(jnp.zeros(L))`.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.init_state(fp8.recipes.current())
      ()
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={recipe!r} is no Recipe; make one with fp8.recipes, for instance fp8.recipes.delayed().")
    if not recipe.rows:
        return ()
    n, length = len(recipe.rows), recipe.rows[0].quantizer.history_length
    # Three separate arrays: a donated buffer must not appear twice.
    return MatmulState(jnp.zeros(n), jnp.zeros((n, length)), jnp.zeros(n), None, recipe.rows)


def _is_node(node: object) -> bool:
    return isinstance(node, MatmulState | SeenAmax)


def _map(function, tree: PyTree, *rest: PyTree) -> PyTree:
    """tree.map over states; anything else in the tree is an error."""

    def checked(node, *others):
        if not is_state(node):
            raise FP8StateError(
                f"expected quantizer state, found {type(node).__name__} in its tree; pass what fp8.init_state, the layer's "
                "collection or the last step returned, and nothing else."
            )
        return function(node, *others)

    return jax.tree.map(checked, tree, *rest, is_leaf=_is_node)


def nothing_seen(state: PyTree) -> PyTree:
    """The neutral element of `merge_seen`: where a scan over microbatches starts.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.nothing_seen(fp8.init_state(fp8.recipes.delayed())).amax
      Array([0., 0., 0.], dtype=float32)
    """
    return _map(lambda s: SeenAmax(s.scale * 0, s.rows), state)


def merge_seen(first: PyTree, *others: PyTree) -> PyTree:
    """What several microbatches saw together: the largest of each amax.

    Args:
      first: a tree that `fp8.value_and_grad(..., commit=False)` or `fp8.nothing_seen` returned.
      *others: more of them, for the same state.

    Raises:
      FP8StateError: for committed states, which cannot be merged; for trees that belong to different states.

    Example:
      >>> import jaxfp8 as fp8
      >>> seen = fp8.nothing_seen(fp8.init_state(fp8.recipes.delayed()))
      >>> fp8.merge_seen(seen, seen).amax
      Array([0., 0., 0.], dtype=float32)
    """
    for position, tree in enumerate((first, *others)):
        for node in jax.tree.leaves(tree, is_leaf=_is_node):
            if not isinstance(node, SeenAmax):
                raise FP8StateError(
                    f"argument {position} of merge_seen holds a {type(node).__name__}; committed states cannot be merged. "
                    "Use fp8.value_and_grad(..., commit=False), merge what it saw, and commit once per optimizer step."
                )
    structure, shapes = jax.tree.structure(first), [jnp.shape(leaf) for leaf in jax.tree.leaves(first)]
    for position, tree in enumerate(others, start=1):
        if jax.tree.structure(tree) != structure or [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] != shapes:
            raise FP8StateError(
                f"argument {position} of merge_seen does not belong to the same state as argument 0: it has the tree "
                f"{jax.tree.map(jnp.shape, tree)}, argument 0 has {jax.tree.map(jnp.shape, first)}."
            )
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), first, *others)


def commit(state: PyTree, seen: PyTree) -> PyTree:
    """The state after one optimizer step that saw these amaxes. Once per step, whatever the number of microbatches.

    Rows whose amax is finite and nonzero are updated, also in a step whose parameter update is skipped (loss scaling,
    `optax.apply_if_finite`); rows with a zero amax stay; a non-finite amax is counted and dropped. Frozen states stay.

    Args:
      state: a tree of states.
      seen: the matching tree of what was seen.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> fp8.commit(state, fp8.nothing_seen(state)).scale
      Array([0., 0., 0.], dtype=float32)
    """

    def one(s: MatmulState, observed: SeenAmax) -> MatmulState:
        if not isinstance(observed, SeenAmax) or observed.rows != s.rows:
            raise FP8StateError("seen does not belong to this state; commit what fp8.value_and_grad(..., commit=False) returned for it.")
        if observed.amax.shape != s.scale.shape:
            raise FP8StateError(
                f"seen has shape {list(observed.amax.shape)}, the state has {list(s.scale.shape)}; a state of stacked layers is "
                "committed with what all of them saw."
            )
        if s.frozen:
            return s
        updated = [
            row.quantizer.update(
                DelayedRow(s.scale[..., r], s.amax_history[..., r, :], s.nonfinite_steps[..., r]), observed.amax[..., r]
            )
            for r, row in enumerate(s.rows)
        ]
        stacked = DelayedRow(
            *(jnp.stack(fields, axis=axis) for fields, axis in zip(zip(*updated, strict=True), (-1, -2, -1), strict=True))
        )
        return dataclasses.replace(s, **stacked._asdict())

    return _map(one, state, _aligned(state, seen))


def _aligned(state: PyTree, seen: PyTree) -> PyTree:
    """`seen` if it has a node for each state, else a clear error."""
    structures = [jax.tree.structure(jax.tree.map(lambda _: 0, tree, is_leaf=_is_node)) for tree in (state, seen)]
    if structures[0] != structures[1]:
        raise FP8StateError(f"state and seen have different trees: {structures[0]} and {structures[1]}.")
    return seen


def freeze(state: PyTree) -> PyTree:
    """The same scales, fixed: uses collect nothing and no commit changes them. For LoRA on a frozen base, for evaluation.

    A row that is still unset quantizes with the current amax of its tensor.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.freeze(fp8.init_state(fp8.recipes.delayed())).frozen
      True
    """
    return _map(lambda s: dataclasses.replace(s, frozen=True), state)


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

    pairs = _map(one, state)
    is_pair = lambda n: isinstance(n, tuple) and len(n) == 2 and all(map(is_state, n))
    first, second = (jax.tree.map(lambda pair, i=i: pair[i], pairs, is_leaf=is_pair) for i in (0, 1))
    return first, second


def with_probes(state: PyTree, ledgers: PyTree | None, *, all_set: bool, reduce_axes: tuple[str, ...] | None) -> PyTree:
    """The state as a differentiated loss sees it. `ledgers`: a tree of f32[..., R, BINS] as `zero_ledgers` gives."""

    def one(s: MatmulState, ledger: Array | None) -> MatmulState:
        return dataclasses.replace(s, probe=Probe(None if s.frozen else ledger, all_set, reduce_axes))

    return _map(one, state, ledgers)


def zero_ledgers(state: PyTree) -> PyTree:
    """Zeros f32[..., R, BINS] that inherit stacking, sharding and variance of their state."""
    return _map(lambda s: jnp.broadcast_to(s.scale[..., None] * 0, (*s.scale.shape, BINS)), state)
