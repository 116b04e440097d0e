"""The times of every way to do one matmul, on the GPU of this process."""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul.hopper._tiling import NoRoomError, search_space
from jaxfp8.kernels.tuning import _timer
from jaxfp8.kernels.tuning._timings import Time, Way

Operands: TypeAlias = tuple[QuantizedTensor, QuantizedTensor]

# The largest difference of two products, relative to the largest value. It allows for another order
# of addition and for the rounding to bfloat16, which is 2^-9 of a value.
_CLOSE = 2.0**-6

_MOST_THREADS = 8


def ways(operands: Operands, call: MatmulCall, backends: Iterable[str]) -> Iterator[Way]:
    """Every way to do a matmul by these backends.

    Tracing is enough to find them. If a backend cannot do a case or a tiling, it raises an error
    before anything is compiled.
    """
    for backend in backends:
        for tiling in search_space() if backend == "mosaic" else (None,):
            way = Way(backend=backend, tiling=tiling)
            try:
                jax.eval_shape(multiplied_by(way, call), *operands)
            except (NotImplementedError, NoRoomError):
                continue
            yield way


def multiplied_by(way: Way, call: MatmulCall) -> Callable[..., Array]:
    """The function that does the matmul of two operands in this way."""
    tiling: dict[str, Any] = {} if way.tiling is None else {"tiling": way.tiling}
    return functools.partial(BACKENDS[way.backend], call=call, **tiling)


def measure(
    matmul: str, operands: Operands, call: MatmulCall, backends: Iterable[str]
) -> tuple[Time, ...]:
    """The time of every way to do a matmul by these backends.

    Raises:
      RuntimeError: if a way gives a wrong result.
    """
    tried = list(ways(operands, call, backends))
    sets = _timer.sets_of(operands)

    def compiled(way: Way) -> tuple[Callable[..., Array], Callable[..., Any], int]:
        work = multiplied_by(way, call)
        program, turns = _timer.looped(work, operands)
        lowered = jax.jit(work).lower(*sets[0]), jax.jit(program).lower(sets)
        return lowered[0].compile(), lowered[1].compile(), turns

    # There are dozens of tilings, and most of the time of `autotune` is compiling them.
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        works, programs, turns = zip(*pool.map(compiled, tried), strict=True)
    products: dict[str, np.ndarray[Any, Any]] = {}
    for way, work, program in zip(tried, works, programs, strict=True):
        _check(matmul, way, np.asarray(work(*sets[0]), np.float32), products)
        jax.block_until_ready(program(sets))
    seconds = _timer.times(programs, sets, turns[0] * len(sets))
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
    """Compare a product with the first one, and bit by bit with the first one of its backend.

    The products are finite, because the operands are.

    Tilings of one kernel add in the same order, so their products have equal bits.
    """
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
    if not np.array_equal(product, products.setdefault(way.backend, product)):
        raise RuntimeError(
            f"{way} gives other bits than another tiling, of {matmul}. All tilings must give the "
            "same bits. Report this as a bug."
        )
