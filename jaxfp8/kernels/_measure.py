"""Times every backend of a matmul."""

import concurrent.futures
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, PyTree
from jaxfp8.kernels._timings import Time, Way
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul.hopper._tiling import NoRoomError

# How many seconds programs take on a GPU.
#
# Programs run in turns and in random order, so that changes of clocks and heat affect all of them.
#
# A program is a loop. Each turn of the loop does the work on every one of several sets of inputs.
# The sets together are larger than the L2 cache, unless the inputs are very small. So a set has
# left the cache when it is used again. An `optimization_barrier` makes each piece of work depend on
# the piece before it. So XLA can neither move work out of the loop nor merge two pieces.

_TURNS = 4  # of the loop of a program
_CACHE = 2**28  # bytes of all sets together: twice the L2 of a B200 (126 MB)
_MOST_SETS = 8  # all sets of very small inputs may fit in the cache
_ROUNDS = 11
_SECONDS = 2e-2  # how long each program runs in a round


def _looped(work: Callable[..., PyTree], types: PyTree) -> tuple[Callable[..., PyTree], int]:
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


def _sets_of(types: PyTree) -> list[PyTree]:
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


def _times(
    programs: Sequence[Callable[..., Any]], arguments: Any, repetitions: int
) -> list[list[float]]:
    """Seconds of one repetition, of each compiled program in each round."""

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


# The times of every way to do one matmul, on the GPU of this process.

Operands: TypeAlias = tuple[QuantizedTensor, QuantizedTensor]

# The largest difference of two products, relative to the largest value. It allows for another order
# of addition and for the rounding to bfloat16, which is 2^-9 of a value.
_CLOSE = 2.0**-6

_MOST_THREADS = 8


def _ways(operands: Operands, call: MatmulCall, backends: Iterable[str]) -> Iterator[Way]:
    """Every way to do a matmul by these backends."""
    for backend in backends:
        tilings = BACKENDS[backend].tilings
        for tiling in (None,) if tilings is None else tilings():
            way = Way(backend=backend, tiling=tiling)
            try:
                # A backend that cannot do a case or a tiling raises before anything is compiled.
                jax.eval_shape(_multiplied_by(way, call), *operands)
            except (NotImplementedError, NoRoomError):
                continue
            yield way


def _multiplied_by(way: Way, call: MatmulCall) -> Callable[..., Array]:
    """The function that does the matmul of two operands in this way."""
    tiling: dict[str, Any] = {} if way.tiling is None else {"tiling": way.tiling}
    return functools.partial(BACKENDS[way.backend], call=call, **tiling)


def measure(
    matmul: str, operands: Operands, call: MatmulCall, backends: Iterable[str]
) -> tuple[Time, ...]:
    """The time of every way to do a matmul. Raises RuntimeError if a way gives a wrong result."""
    tried = list(_ways(operands, call, backends))
    sets = _sets_of(operands)

    def compiled(way: Way) -> tuple[Callable[..., Array], Callable[..., Any], int]:
        work = _multiplied_by(way, call)
        program, turns = _looped(work, operands)
        lowered = jax.jit(work).lower(*sets[0]), jax.jit(program).lower(sets)
        return lowered[0].compile(), lowered[1].compile(), turns

    # There are dozens of tilings, and most of the time of `autotune` is compiling them.
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        works, programs, turns = zip(*pool.map(compiled, tried), strict=True)
    products: dict[str, np.ndarray[Any, Any]] = {}
    for way, work, program in zip(tried, works, programs, strict=True):
        _check(matmul, way, np.asarray(work(*sets[0]), np.float32), products)
        jax.block_until_ready(program(sets))
    seconds = _times(programs, sets, turns[0] * len(sets))
    quartiles = [[float(q) for q in np.percentile(each, (25, 50, 75))] for each in seconds]
    return tuple(
        Time(way=way, seconds=middle, quartiles=(low, high))
        for way, (low, middle, high) in zip(tried, quartiles, strict=True)
    )


def _check(
    matmul: str,
    way: Way,
    product: np.ndarray[Any, Any],
    products: dict[str, np.ndarray[Any, Any]],
) -> None:
    """Compare a product of finite operands with the first one, and with that of its backend."""
    if not np.isfinite(product).all():
        raise RuntimeError(
            f"{way} gives inf or NaN for {matmul}, whose operands are finite. Report this as a bug."
        )
    first = next(iter(products.values()), product)
    if not np.max(np.abs(product - first)) <= _CLOSE * np.max(np.abs(first)):
        raise RuntimeError(
            f"{way} gives a wrong product of {matmul}: it differs from the product of "
            f"{next(iter(products))}. Report this as a bug."
        )
    # Tilings of one kernel add in the same order.
    if not np.array_equal(product, products.setdefault(way.backend, product)):
        raise RuntimeError(
            f"{way} gives other bits than another tiling, of {matmul}. All tilings must give the "
            "same bits. Report this as a bug."
        )
