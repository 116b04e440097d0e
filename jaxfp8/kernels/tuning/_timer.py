"""How many seconds programs take on a GPU.

Programs run in turns and in random order, so that changes of clocks and heat affect all of them.

A program is a loop. Each turn of the loop does the work on every one of several sets of inputs. The
sets together are larger than the L2 cache, unless the inputs are very small. So a set has left the
cache when it is used again. An `optimization_barrier` makes each piece of work depend on the piece
before it. So XLA can neither move work out of the loop nor merge two pieces.
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

_TURNS = 4  # of the loop of a program
_CACHE = 2**28  # bytes of all sets together: twice the L2 of a B200 (126 MB)
_MOST_SETS = 8  # all sets of very small inputs may fit in the cache
_ROUNDS = 11
_SECONDS = 2e-2  # how long each program runs in a round


def looped(work: Callable[..., PyTree], types: PyTree) -> tuple[Callable[..., PyTree], int]:
    """A program that repeats `work`, and how many times it does so for each set of arguments."""

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
    """Random arguments of these types: as many sets as exceed the L2 cache, but at most 8."""
    leaves, structure = jax.tree.flatten(types)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    count = min(math.ceil(_CACHE / max(size, 1)), _MOST_SETS)
    random = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        # FP8 values and E8M0 scales have one byte. All other arrays are scales. Scales are powers
        # of two, so that E8M0 holds them exactly.
        if leaf.dtype.itemsize == 1 and "e8m0" not in leaf.dtype.name:
            return jnp.asarray(
                (64 * random.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)
            )
        return jnp.asarray(np.exp2(random.integers(-3, 4, leaf.shape)).astype(leaf.dtype))

    return [jax.tree.unflatten(structure, map(draw, leaves)) for _ in range(count)]


def times(
    programs: Sequence[Callable[..., Any]], arguments: Any, repetitions: int
) -> list[list[float]]:
    """The seconds of one repetition: a list for each program, with a number for each round.

    Each program must have been called once before, so that it is compiled.
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
