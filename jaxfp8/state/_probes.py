"""Probes, which a state carries inside a differentiated loss.

Add them, remove them, or `fork` a state.
"""

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


_split.defvjp(
    lambda ledger: ((ledger, ledger), None), lambda _, cotangents: (jnp.maximum(*cotangents),)
)


def fork(state: PyTree) -> tuple[PyTree, PyTree]:
    """Two handles on one state, for a layer that is used twice.

    Their amaxes are joined by an exact maximum.

    Without `fork` the ledgers of several uses are added. The maximum of the sum is never below the
    true one, and at most 1/8 above it. In a loop, carry one handle and use the other.

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
    state: PyTree, ledgers: PyTree | None, *, all_set: bool, reduce_axes: tuple[str, ...] | None
) -> PyTree:
    """The state as a differentiated loss sees it.

    `ledgers`: a tree of f32[..., BINS, R] as `zero_ledgers` gives.
    """

    def one(s: MatmulState, ledger: Array | None) -> MatmulState:
        return dataclasses.replace(
            s, probe=Probe(None if s.frozen else ledger, all_set, reduce_axes)
        )

    return map_states(one, state, ledgers)


def without_probes(tree: PyTree) -> PyTree:
    """The tree without the probes of its states; other nodes do not change."""
    return jax.tree.map(
        lambda n: dataclasses.replace(n, probe=None) if is_state(n) else n, tree, is_leaf=is_state
    )


def zero_ledgers(state: PyTree) -> PyTree:
    """Zeros f32[..., BINS, R] that inherit stacking, sharding and variance of their state."""

    def one(s: MatmulState) -> Array:
        *stacked, rows = s.scale.shape
        return jnp.broadcast_to(s.scale[..., None, :] * 0, (*stacked, BINS, rows))

    return map_states(one, state)
