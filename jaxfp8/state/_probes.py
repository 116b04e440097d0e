"""Probes, which a state has inside a differentiated loss: add them, remove them, fork a state."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, PyTree
from jaxfp8.state._ledger import BINS
from jaxfp8.state._state import MatmulState, Probe, is_state
from jaxfp8.state._trees import map_states


@jax.custom_vjp
def _split(ledger: Array) -> tuple[Array, Array]:
    return ledger, ledger


# JAX would add the two ledgers. Their maximum loses no amax, and is exact.
_split.defvjp(
    lambda ledger: ((ledger, ledger), None), lambda _, cotangents: (jnp.maximum(*cotangents),)
)


def fork(state: PyTree) -> tuple[PyTree, PyTree]:
    """Two handles on one state, for a layer that is used twice.

    Pass one handle to each use. The state then gets the exact maximum of both amaxes. In a loop,
    carry one handle and use the other.

    Without `fork`, JAX adds the ledgers of several uses. The amax that is read from the sum is
    never below the true maximum, and at most 1/8 above it.

    Args:
      state: a tree of states.

    Returns:
      Two trees of the same structure as `state`.

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


def with_probes(
    state: PyTree, ledgers: PyTree, known: PyTree, *, reduce_axes: tuple[str, ...] | None
) -> PyTree:
    """The state with probes, for a differentiated loss.

    `ledgers` is a tree of f32[..., BINS, R], as `zero_ledgers` returns. `known` is a tree of
    f32[..., 2, R].
    """

    def one(s: MatmulState, ledger: Array, scales: Array) -> MatmulState:
        return dataclasses.replace(
            s, probe=Probe(None if s.frozen else ledger, scales, reduce_axes)
        )

    return map_states(one, state, ledgers, known)


def without_probes(tree: PyTree) -> PyTree:
    """The tree without the probes of its states; other nodes do not change."""
    return jax.tree.map(
        lambda n: dataclasses.replace(n, probe=None) if is_state(n) else n, tree, is_leaf=is_state
    )


def zero_ledgers(state: PyTree) -> PyTree:
    """Zeros f32[..., BINS, R], stacked and sharded as the states, and varying over their axes."""

    def one(s: MatmulState) -> Array:
        *stacked, rows = s.scale.shape
        # Multiplied from the scale, because `jnp.zeros` would have another sharding and type.
        return jnp.broadcast_to(s.scale[..., None, :] * 0, (*stacked, BINS, rows))

    return map_states(one, state)
