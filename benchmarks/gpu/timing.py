"""Times programs alternately on one device, and takes medians.

One measurement has several calls of a program in a row, and one wait at the end. Each call gets the
results of the previous call. So the device is never idle between calls. Python and the driver
prepare a call while the previous program runs.
"""

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from case import Case, Compiled

SEED = 0
FEWEST_CARRIED = 3
"""The fewest calls in a row of a case whose calls continue each other.

A single call would not overlap with the preparation of the next one, as it does in training.
"""
POOL = 2**22
"""The number of random values that are drawn. Larger arrays repeat them."""


class Inputs:
    """Random arrays on a device, the same for every program that asks for the same shapes."""

    def __init__(self, device: Any) -> None:
        random = np.random.default_rng(SEED)
        normal = random.standard_normal(POOL, np.float32)
        powers = np.exp2(random.integers(-3, 4, POOL)).astype(np.float32)
        # Values in FP8 fill most of the format's range; float32 is the dtype of scales.
        self._pools = {
            np.dtype(dtype): powers.astype(dtype)
            for dtype in (np.float32, ml_dtypes.float8_e8m0fnu)
        }
        for dtype, spread in (
            (ml_dtypes.bfloat16, 1),
            (ml_dtypes.float8_e4m3fn, 64),
            (ml_dtypes.float8_e5m2, 64),
        ):
            self._pools[np.dtype(dtype)] = (normal * spread).astype(dtype)
        self.device = device
        self._known: dict[Any, Any] = {}

    def sets(self, case: Case) -> list[Any]:
        """All sets of inputs of a case. No two sets share an array."""
        return [self.of(case.arguments, number) for number in range(case.sets)]

    def of(self, tree: Any, number: int = 0) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(self._array(leaf, (number, n)) for n, leaf in enumerate(leaves))

    def made(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, the same for every program that asks for this key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _array(self, leaf: Any, place: tuple[int, int]) -> jax.Array:
        key = (leaf.shape, leaf.dtype, place)
        if key not in self._known:
            offset = 7919 * (1 + place[0] + 97 * place[1])  # a different slice of the pool for each
            values = np.resize(self._pools[np.dtype(leaf.dtype)][offset:], leaf.shape)
            self._known[key] = jax.device_put(values, self.device)
        return self._known[key]

    def forget(self) -> None:
        self._known.clear()


class Buffers:
    """Memory for results. Programs use it one after the other."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._free: dict[Any, list[jax.Array]] = collections.defaultdict(list)

    def take(self, tree: Any) -> Any:
        return jax.tree.map(self._one, tree)

    def give(self, tree: Any) -> None:
        for array in jax.tree.leaves(tree):
            self._free[array.shape, array.dtype].append(array)

    def forget(self) -> None:
        self._free.clear()

    def _one(self, leaf: Any) -> jax.Array:
        free = self._free[leaf.shape, leaf.dtype]
        return (
            free.pop() if free else jax.device_put(np.zeros(leaf.shape, leaf.dtype), self._device)
        )


class Runner:
    """A program with its inputs, ready to be timed."""

    def __init__(
        self, compiled: Compiled, inputs: Inputs, buffers: Buffers, arguments: Any = None
    ) -> None:
        self.compiled = compiled
        self.buffers = buffers
        self.arguments = inputs.sets(compiled.case) if arguments is None else arguments
        self.calls = 1

    def seconds(self, calls: int) -> float:
        """Seconds of one repetition of the work, from so many calls in a row."""
        case, program = self.compiled.case, self.compiled.program
        if not case.looped:
            start, results = chained(case, program, self.arguments[0], calls)
            jax.block_until_ready(results)
            return (time.perf_counter() - start) / calls
        results = self.buffers.take([self.compiled.results] * case.sets)
        jax.block_until_ready(results)
        start = time.perf_counter()
        for _ in range(calls):
            results = program(results, self.arguments)
        jax.block_until_ready(results)
        elapsed = time.perf_counter() - start
        self.buffers.give(results)
        return elapsed / (calls * self.compiled.repetitions)

    def warm_up(self, least: float) -> None:
        """Run the program twice, and set `calls` so that the calls take about `least` seconds."""
        self.seconds(1)
        fewest = FEWEST_CARRIED if self.compiled.case.carried else 1
        self.calls = max(fewest, round(least / (self.seconds(1) * self.compiled.repetitions)))


def copies(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def chained(case: Case, program: Any, arguments: Any, calls: int) -> tuple[float, Any]:
    """The time before the first call, and the results of the last one, which may still run.

    What a call donates is a copy. So the next measurement starts from the same arguments, and cases
    can share them. There is one copy at a time, and it is made before the time starts.
    """
    carried, rest = copies(arguments[: case.carried]), arguments[case.carried :]
    jax.block_until_ready(carried)
    start = time.perf_counter()
    for _ in range(calls):
        results = program(*carried, *rest)
        if case.carried:
            carried = results[: case.carried]
    return start, results


def rounds(
    runners: Sequence[Runner], count: int, *, late: Callable[[], bool]
) -> Iterator[tuple[int, Runner, float | Exception]]:
    """Yields (round, program, seconds of one repetition), in a new random order each round.

    A program that fails yields its error, and is left out of later rounds. If `late()` is true
    after a round, no further round starts.
    """
    order, left = np.random.default_rng(SEED), list(runners)
    for number in range(count):
        if number and late():
            return
        for runner in order.permutation(np.array(left, dtype=object)):
            try:
                yield number, runner, runner.seconds(runner.calls)
            except Exception as error:  # a kernel that fails ends its case, not the run
                left.remove(runner)
                yield number, runner, error


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, middle, high = (float(q) for q in np.percentile(seconds, (25, 50, 75)))
    return {"median": middle, "quartiles": [low, high], "rounds": len(seconds)}
