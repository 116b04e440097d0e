"""What a step saw, and the state after it: `nothing_seen`, `merge_seen`, `commit`."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, PyTree
from jaxfp8.quantizers._base import RowState
from jaxfp8.state._identity import check_layout, known
from jaxfp8.state._state import MatmulState, SeenAmax, is_node
from jaxfp8.state._trees import check_tree, map_states


def nothing_seen(state: PyTree) -> PyTree:
    """The neutral element of `merge_seen`: where a scan over microbatches starts.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.nothing_seen(fp8.init_state(fp8.recipes.delayed())).amax
      Array([0., 0., 0.], dtype=float32)
    """

    def one(s: MatmulState) -> SeenAmax:
        check_layout(s)
        return SeenAmax(s.scale * 0, s.rows)

    return map_states(one, state)


def merge_seen(first: PyTree, *others: PyTree) -> PyTree:
    """What several microbatches saw together: the largest of each amax.

    Args:
      first: a tree that `fp8.value_and_grad(..., commit=False)` or `fp8.nothing_seen` returned.
      *others: more of them, for the same state.

    Raises:
      FP8StateError: for committed states, which cannot be merged; for trees that belong to
        different states.

    Example:
      >>> import jaxfp8 as fp8
      >>> seen = fp8.nothing_seen(fp8.init_state(fp8.recipes.delayed()))
      >>> fp8.merge_seen(seen, seen).amax
      Array([0., 0., 0.], dtype=float32)
    """
    for position, tree in enumerate((first, *others)):
        for node in jax.tree.leaves(tree, is_leaf=is_node):
            if not isinstance(node, SeenAmax):
                raise FP8StateError(
                    f"argument {position} of merge_seen holds a {type(node).__name__}; committed "
                    "states cannot be merged. Use fp8.value_and_grad(..., commit=False), merge "
                    "what it saw, and commit once per optimizer step."
                )
    for position, tree in enumerate(others, start=1):
        if _kind(tree) != _kind(first):
            raise FP8StateError(
                f"argument {position} of merge_seen does not belong to the same state as argument "
                f"0: it has the tree {jax.tree.map(jnp.shape, tree)}, argument 0 has "
                f"{jax.tree.map(jnp.shape, first)}."
            )
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), first, *others)


def _kind(tree: PyTree) -> tuple[Any, ...]:
    """What trees that can be merged have in common."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(jnp.shape, leaves)


def commit(state: PyTree, seen: PyTree) -> PyTree:
    """The state after one optimizer step that saw these amaxes.

    Once per step, whatever the number of microbatches.

    Rows whose amax is finite and nonzero are updated, also in a step whose parameter update is
    skipped (loss scaling, `optax.apply_if_finite`); rows with a zero amax stay; a non-finite amax
    is counted and dropped. Frozen states stay.

    Args:
      state: a tree of states.
      seen: the matching tree of what was seen.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> fp8.commit(state, fp8.nothing_seen(state)).scale
      Array([0., 0., 0.], dtype=float32)
    """
    return _commit(state, seen, known)


def commit_known(state: PyTree, seen: PyTree) -> PyTree:
    """`commit` of states that have passed `known` in this step already."""
    return _commit(state, seen, lambda s: s)


def _commit(state: PyTree, seen: PyTree, checked: Callable[[MatmulState], MatmulState]) -> PyTree:
    def one(s: MatmulState, observed: SeenAmax) -> MatmulState:
        if not isinstance(observed, SeenAmax) or observed.rows != s.rows:
            raise FP8StateError(
                "seen does not belong to this state; commit what fp8.value_and_grad(..., "
                "commit=False) returned for it."
            )
        if observed.amax.shape != s.scale.shape:
            raise FP8StateError(
                f"seen has shape {list(observed.amax.shape)}, the state has {list(s.scale.shape)}; "
                "a state of stacked layers is committed with what all of them saw."
            )
        check_layout(s)
        return s if s.frozen else _updated(checked(s), observed.amax)

    return map_states(one, state, _aligned(state, seen))


def _updated(s: MatmulState, amax: Array) -> MatmulState:
    updated = []
    for quantizer, run in itertools.groupby(range(len(s.rows)), key=lambda r: s.rows[r].quantizer):
        indices = list(run)
        # neighbours of one policy together: fewer and larger operations
        these = slice(indices[0], indices[-1] + 1)
        rows = RowState(
            s.scale[..., these], s.amax_history[..., these, :], s.nonfinite_steps[..., these]
        )
        new = quantizer.update(rows, amax[..., these])
        types = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in new or ()]
        if types != [(leaf.shape, leaf.dtype) for leaf in rows]:
            raise FP8StateError(
                f"{type(quantizer).__name__}.update returned {types} for scale, amax_history and "
                f"nonfinite_steps; it must return a RowState of float32 arrays of the shapes "
                f"{[list(leaf.shape) for leaf in rows]}."
            )
        updated.append(new)
    parts = zip(zip(*updated, strict=True), (-1, -2, -1), strict=True)
    scale, history, nonfinite = (jnp.concatenate(part, axis=axis) for part, axis in parts)
    return dataclasses.replace(s, scale=scale, amax_history=history, nonfinite_steps=nonfinite)


def _aligned(state: PyTree, seen: PyTree) -> PyTree:
    """`seen` if it has a node for each state, else a clear error."""
    check_tree(state)
    trees: list[Any] = [
        jax.tree.structure(jax.tree.map(lambda _: 0, tree, is_leaf=is_node))
        for tree in (state, seen)
    ]
    if trees[0] != trees[1]:
        raise FP8StateError(
            f"state and seen have different trees: {trees[0]} and {trees[1]}; commit what this "
            "state saw."
        )
    return seen
