"""States of many matmuls, computed on together.

What a step does with the state of one matmul takes a hundred small operations. States with equal
rows are therefore stacked, and one call does it for each stack.

The results are many small arrays again: a scale that cuBLASLt reads, or an array of the next
state. XLA:GPU writes many of them in one kernel. A cast that read a slice would differ from the
others in its offset. So each scale has memory of its own. The casts of equal layers are then equal,
and XLA compiles them once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array, PyTree
from jaxfp8.numerics._exact import LARGEST
from jaxfp8.state._identity import known_scales
from jaxfp8.state._state import MatmulState

T = TypeVar("T")

_MOST_STACKED = 15
"""The largest number of states in a stack.

3 rows (x, w and g) with a multiplier and a scale each make 6 arrays for a state: 15 states have 90.
XLA:GPU writes the 96 of 16 states in two kernels (jax 0.12).
"""


def groups_of(states: Sequence[MatmulState]) -> list[list[int]]:
    """Which states are computed on together: their places, at most `_MOST_STACKED` in a group.

    Only traced states of single matmuls are in a group with others. In eager code nothing is
    compiled, and messages name single states. States that are stacked already may be split over
    devices, and two of them in different ways.
    """
    alike: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        leaves, structure = jax.tree.flatten(state)
        traced = all(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        together = traced and state.scale.ndim == 1
        alike.setdefault((structure, *map(jax.typeof, leaves)) if together else i, []).append(i)
    found = []
    for places in alike.values():
        # Stacks of equal size, because XLA compiles the kernels of equal stacks once.
        size = -(-len(places) // -(-len(places) // _MOST_STACKED))
        found += [places[start : start + size] for start in range(0, len(places), size)]
    return found


def by_groups(
    groups: list[list[int]],
    function: Callable[..., T],
    *lists: Sequence[PyTree],
    stored: bool = True,
) -> list[T]:
    """`[function(*each) for each in zip(*lists)]`, with one call for each group.

    The arrays of a group with several states get a leading axis. Results are float32 arrays.
    `stored` says whether they are written to memory, and not only read by the next such call.
    """
    results: dict[int, T] = {}

    # Equal stacks are traced and lowered once for each call of `by_groups`. `together` is defined
    # anew in each call. A user's quantizer may read a global, and a cache that calls share would
    # keep its old value.
    @jax.jit
    @functools.wraps(function)
    def together(*lists: list[PyTree]) -> list[T]:
        stacked = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in lists)
        result, count = function(*stacked), len(lists[0])
        if stored:
            return _parts(result, count)
        return [jax.tree.map(lambda leaf, i=i: leaf[i], result) for i in range(count)]

    for group in groups:
        members = [[each[i] for i in group] for each in lists]
        if len(group) == 1:
            results[group[0]] = function(*(each[0] for each in members))
        else:
            results |= zip(group, together(*members), strict=True)
    return [results[i] for i in range(len(results))]


def _parts(stacked: T, count: int) -> list[T]:
    """A tree of float32[count, ...], as a tree of [...] for each of the stacked states."""
    leaves, structure = jax.tree.flatten(stacked)

    def slices(*leaves: Array) -> list[list[Array]]:
        return [[leaf[i] for leaf in leaves] for i in range(count)]

    def in_one_kernel(*leaves: Array) -> list[list[Array]]:
        rows = [leaf.reshape(count, -1) for leaf in leaves]
        ends = np.cumsum([row.shape[1] for row in rows])[:-1]
        # Without the barrier, each kernel that writes parts would compute the whole once more.
        packed = lax.optimization_barrier(jnp.concatenate(rows, axis=1))
        # Without this select each part is a copy, in a kernel of its own. It changes no value: only
        # -inf is below `-LARGEST`.
        packed = jnp.where(packed < -LARGEST, -np.inf, packed)
        return [
            [part.reshape(leaf.shape[1:]) for part, leaf in zip(parts, leaves, strict=True)]
            for parts in (jnp.split(row, ends) for row in packed)
        ]

    if any(map(_is_split, leaves)):  # these have no common array
        found = slices(*leaves)
    else:
        found = lax.platform_dependent(*leaves, cuda=in_one_kernel, default=slices)
    return [jax.tree.unflatten(structure, each) for each in found]


def _is_split(x: Array) -> bool:
    """Whether an Explicit mesh splits an axis of x."""
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)


def known_scales_of(groups: list[list[int]], states: Sequence[MatmulState]) -> list[Array]:
    """`known_scales` of each state."""

    def numbers(state: MatmulState) -> list[Array]:
        return list(jnp.moveaxis(known_scales(state), -1, 0))

    def together(*states: MatmulState) -> list[Array]:
        found = by_groups([[*range(len(states))]], numbers, states)
        # Without the barrier XLA would put the numbers of a state together again, and each matmul
        # would copy its scale from there.
        return [jnp.stack(lax.optimization_barrier(each)) for each in found]

    def apart(*states: MatmulState) -> list[Array]:
        return [known_scales(state) for state in states]

    found: dict[int, Array] = {}
    for group in groups:
        members = [states[i] for i in group]
        cuda = together if len(group) > 1 else apart
        found |= zip(group, lax.platform_dependent(*members, cuda=cuda, default=apart), strict=True)
    return [found[i] for i in range(len(found))]
