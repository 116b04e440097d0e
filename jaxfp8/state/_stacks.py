"""States of many matmuls, computed on together.

What a step does with the state of one matmul takes a hundred small operations. States with equal
rows are therefore stacked, a few at a time, and one call does it for each stack.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxfp8._typing import PyTree
from jaxfp8.state._state import MatmulState

T = TypeVar("T")

MOST_STACKED = 6
"""The largest number of states in a stack.

Each result is a slice of its stack. XLA compiles equal slices of equal stacks once, and slices of
other places again. One stack of all layers would thus compile two kernels for each layer. Small
stacks repeat the operations of a commit. The program of 24 states compiled fastest with 4 to 6.
"""


@dataclasses.dataclass(frozen=True)
class Stacks:
    """Which states of a list are computed on together.

    Attributes:
      groups: the places of the states of each group.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, states: Sequence[MatmulState]) -> "Stacks":
        """The groups of some states, of at most `MOST_STACKED` each.

        Only traced states of single matmuls are in a group with others. In eager code nothing is
        compiled, and messages name single states. States that are stacked already may be split
        over devices, and two of them in different ways.

        Example:
          >>> import jaxfp8 as fp8
          >>> Stacks.of([fp8.init_state(fp8.recipes.delayed())] * 2).groups
          ((0,), (1,))
        """
        groups: dict[Any, list[int]] = {}
        for i, state in enumerate(states):
            leaves, structure = jax.tree.flatten(state)
            alone = state.scale.ndim > 1 or not all(
                isinstance(leaf, jax.core.Tracer) for leaf in leaves
            )
            key = i if alone else (structure, *map(jax.typeof, leaves))
            groups.setdefault(key, []).append(i)
        return cls(
            tuple(
                tuple(places[start : start + MOST_STACKED])
                for places in groups.values()
                for start in range(0, len(places), MOST_STACKED)
            )
        )

    def apply(self, function: Callable[..., T], *lists: Sequence[PyTree]) -> list[T]:
        """`[function(*each) for each in zip(*lists)]`, with one call for each group.

        The arrays of a group with several states get a leading axis.
        """
        results: dict[int, T] = {}

        # Equal stacks are traced and lowered once for each call of `apply`. `together` is defined
        # anew in each call. A user's quantizer may read a global, and a cache that calls share
        # would keep its old value.
        @jax.jit
        @functools.wraps(function)
        def together(*stacked: PyTree) -> T:
            return function(*stacked)

        for group in self.groups:
            members = [[each[i] for i in group] for each in lists]
            if len(group) == 1:
                results[group[0]] = function(*(each[0] for each in members))
                continue
            stacked = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in members)
            result = together(*stacked)
            for place, i in enumerate(group):
                results[i] = jax.tree.map(lambda leaf, place=place: leaf[place], result)
        return [results[i] for i in range(len(results))]
