"""States between steps: `nothing_seen`, `merge_seen`, `commit` and `settle`."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, FP8StateError, PyTree
from jaxfp8.quantizers._base import RowState
from jaxfp8.state._check_weights import on_host
from jaxfp8.state._identity import check_layout, unset_foreign_rows
from jaxfp8.state._state import MatmulState, SeenAmax, check_tree, is_node, map_states

# The amaxes that a step saw, and the state after it: `nothing_seen`, `merge_seen`, `commit`.


def nothing_seen(state: PyTree) -> PyTree:
    """The neutral element of `merge_seen`: the first carry of a scan over microbatches.

    Args:
      state: a tree of states.

    Returns:
      The matching tree of `SeenAmax`, with amaxes of 0.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.nothing_seen(fp8.init_state(fp8.recipes.delayed())).amax
      Array([0., 0., 0.], dtype=float32)
    """

    def one(s: MatmulState) -> SeenAmax:
        check_layout(s)
        # Multiplied, to keep the sharding and the varying mesh axes of the scale.
        return SeenAmax(s.scale * 0, s.rows)

    return map_states(one, state)


def merge_seen(first: PyTree, *others: PyTree) -> PyTree:
    """The amaxes that several microbatches saw: the largest of each.

    Args:
      first: a tree that `fp8.value_and_grad(..., commit=False)` or `fp8.nothing_seen` returned.
      *others: more of these trees, for the same state.

    Returns:
      A tree for `fp8.commit`.

    Raises:
      FP8StateError: if an argument holds committed states, which cannot be merged. Also if the
        arguments belong to different states.

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
                    f"argument {position} of merge_seen holds a {type(node).__name__}. Committed "
                    "states cannot be merged. Use fp8.value_and_grad(..., commit=False), merge "
                    "its third result, and commit once per optimizer step."
                )
    for position, tree in enumerate(others, start=1):
        if _kind(tree) != _kind(first):
            raise FP8StateError(
                f"argument {position} of merge_seen does not belong to the same state as argument "
                f"0. It has the tree {jax.tree.map(jnp.shape, tree)}. Argument 0 has the tree "
                f"{jax.tree.map(jnp.shape, first)}. Merge what one state saw."
            )
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), first, *others)


def _kind(tree: PyTree) -> tuple[Any, ...]:
    """The structure and the shapes of a tree. Trees that can be merged have them in common."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(jnp.shape, leaves)


def commit(state: PyTree, seen: PyTree) -> PyTree:
    """The state after one optimizer step that saw these amaxes.

    Call it once per optimizer step, for any number of microbatches. Call it also if the step skips
    its parameter update, as loss scaling and `optax.apply_if_finite` do.

    A row with a finite, nonzero amax is updated. A row with an amax of 0 does not change. A
    non-finite amax is counted and dropped. Frozen states do not change.

    Args:
      state: a tree of states.
      seen: the matching tree, from `fp8.value_and_grad(..., commit=False)` or `fp8.merge_seen`.

    Returns:
      The tree of states for the next step.

    Raises:
      FP8StateError: if `seen` does not belong to `state`.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> fp8.commit(state, fp8.nothing_seen(state)).scale
      Array([0., 0., 0.], dtype=float32)
    """

    def one(s: MatmulState, observed: SeenAmax) -> MatmulState:
        if not isinstance(observed, SeenAmax) or observed.rows != s.rows:
            raise FP8StateError(
                "seen does not belong to this state. Commit what fp8.value_and_grad(..., "
                "commit=False) returned for it."
            )
        if observed.amax.shape != s.scale.shape:
            raise FP8StateError(
                f"seen has shape {list(observed.amax.shape)}, but the state has shape "
                f"{list(s.scale.shape)}. Commit a state of stacked layers with the amaxes of all "
                "its layers."
            )
        check_layout(s)
        return commit_one(s, observed)

    check_tree(state)
    trees: list[Any] = [jax.tree.structure(tree, is_leaf=is_node) for tree in (state, seen)]
    if trees[0] != trees[1]:
        raise FP8StateError(
            f"state and seen have different trees: {trees[0]} and {trees[1]}. Commit what this "
            "state saw."
        )
    return jax.tree.map(one, state, seen, is_leaf=is_node)


def commit_one(state: MatmulState, seen: SeenAmax) -> MatmulState:
    """`commit` of one state, which may be stacked, without checks."""
    state = unset_foreign_rows(state)
    return state if state.frozen else _updated(state, seen.amax)


def _updated(s: MatmulState, amax: Array) -> MatmulState:
    updated = []
    for quantizer, run in itertools.groupby(range(len(s.rows)), key=lambda r: s.rows[r].quantizer):
        indices = list(run)
        # Neighbouring rows with one quantizer are updated in one call. A step then runs fewer and
        # larger operations.
        these = slice(indices[0], indices[-1] + 1)
        rows = RowState(
            s.scale[..., these], s.amax_history[..., these, :], s.nonfinite_steps[..., these]
        )
        new = quantizer.update(rows, amax[..., these])
        types = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in new or ()]
        if types != [(leaf.shape, leaf.dtype) for leaf in rows]:
            raise FP8StateError(
                f"{type(quantizer).__name__}.update returned {types} for scale, amax_history and "
                f"nonfinite_steps. It must return a RowState of float32 arrays of the shapes "
                f"{[list(leaf.shape) for leaf in rows]}."
            )
        updated.append(new)
    parts = zip(zip(*updated, strict=True), (-1, -2, -1), strict=True)
    scale, history, nonfinite = (jnp.concatenate(part, axis=axis) for part, axis in parts)
    return dataclasses.replace(s, scale=scale, amax_history=history, nonfinite_steps=nonfinite)


# `settle`: states whose scales are all set, so that no program reads a tensor for an unset scale.
#
# A cast with an unset scale needs the amax of its own tensor before it can start. That is one more
# read of the tensor. Only the first steps have unset scales. But a compiled program cannot know
# that: an expert may see its first token late. So it reads every tensor once more, in each step.
#
# `settle` looks at the scales. A state whose scales are all set is marked, and the mark is static.
# JAX then compiles a program without these reads. A scale that is set stays set.


def settle(state: PyTree) -> PyTree:
    """The same state, marked where all scales of a matmul are set.

    Call it once, outside of `jax.jit`: after the first step, or after a checkpoint is restored. A
    step then compiles once more, for the marked state, and reads x, w and g once less. On an H200
    that is about a tenth of a layer's bytes. The results are the same, bit for bit.

    A matmul with an unset scale is not marked, and works as before. Call `settle` again later, to
    mark it too.

    If a marked state is given unset scales after all, for instance by a checkpoint that is restored
    into it, the results are NaN.

    Args:
      state: a tree of states. A tree of types (`jax.eval_shape`), which has no values, is marked
        everywhere. Use it to compile the later steps ahead of time.

    Returns:
      The tree of states, with the same arrays.

    Raises:
      FP8StateError: inside of `jax.jit`, where no value can be read.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> step = fp8.value_and_grad(
      ...     lambda w, state, x: jnp.sum(fp8.dot(x, w, recipe=recipe, state=state))
      ... )
      >>> w, x, state = jnp.ones((4, 2)), jnp.ones((3, 4)), fp8.init_state(recipe)
      >>> fp8.settle(state).settled
      False
      >>> _, _, state = step(w, state, x)
      >>> fp8.settle(state).settled
      True
    """
    return map_states(
        lambda s: dataclasses.replace(s, settled=s.settled or scales_are_set(s)), state
    )


def scales_are_set(state: MatmulState) -> bool:
    """Whether all scales of a state are set. True for a state of types."""
    if isinstance(state.scale, jax.core.Tracer):
        raise FP8StateError(
            "fp8.settle was called inside jax.jit or another transformation, where the scales "
            "cannot be read. Call it outside, between two steps."
        )
    if isinstance(state.scale, jax.ShapeDtypeStruct):
        return True
    return bool(np.all(on_host(state.scale) > 0))
