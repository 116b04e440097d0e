"""Seconds that programs take on a GPU, in turns, so that clocks and heat are shared.

A program is a loop. In each turn it does the work on every one of several sets of inputs, so that
no set is in the L2 cache when its turn comes again, and an `optimization_barrier` ties each piece
of work to the one before: XLA can neither take work out of the loop nor merge two pieces.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import PyTree

_TURNS = 4
_CACHE = 2**28  # bytes of all sets together: twice the L2 of a B200 (126 MB)
_MOST_SETS = 8
_ROUNDS = 11
_SECONDS = 2e-2  # of a round, of each program


def looped(work: Callable[..., PyTree], types: PyTree) -> tuple[Callable[..., PyTree], int]:
    """A program that does `work` many times, and how often it does it for each set of arguments."""

    def program(sets: Sequence[Any]) -> PyTree:
        def turn(_: Any, carry: Any) -> Any:
            results, sets = carry
            for index, arguments in enumerate(sets):
                results, arguments = lax.optimization_barrier((results, arguments))
                results = work(*arguments)
                sets = [*sets[:index], arguments, *sets[index + 1 :]]
            return results, sets

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(work, *types)
        )
        return lax.fori_loop(0, _TURNS, turn, (nothing, list(sets)))[0]

    return program, _TURNS


def sets_of(types: PyTree) -> list[PyTree]:
    """Random arguments of these types: as many sets as do not fit in a cache."""
    leaves, structure = jax.tree.flatten(types)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    count = min(math.ceil(_CACHE / max(size, 1)), _MOST_SETS)
    random = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        if leaf.dtype.itemsize == 1 and "e8m0" not in leaf.dtype.name:  # values; others are scales
            return jnp.asarray(
                (64 * random.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)
            )
        return jnp.asarray(np.exp2(random.integers(-3, 4, leaf.shape)).astype(leaf.dtype))

    return [jax.tree.unflatten(structure, map(draw, leaves)) for _ in range(count)]


def times(
    programs: Sequence[Callable[..., Any]], arguments: Any, repetitions: int
) -> list[list[float]]:
    """Of each program, the seconds of one repetition in every round.

    They must have been called once before.
    """

    def once(program: Callable[..., Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            results = program(arguments)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / calls

    calls = [max(1, round(_SECONDS / once(program, 1))) for program in programs]
    seconds: list[list[float]] = [[] for _ in programs]
    order = np.random.default_rng(0)
    for _ in range(_ROUNDS):
        for index in order.permutation(len(programs)):
            seconds[index].append(once(programs[index], calls[index]) / repetitions)
    return seconds
