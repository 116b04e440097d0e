"""`autotune`: time every way to do the matmuls of a step, on the GPU that is there."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxfp8._typing import Array, PyTree
from jaxfp8.kernels._platform import chip_named
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul.hopper._tiling import NoRoomError, search_space
from jaxfp8.kernels.tuning import _timer
from jaxfp8.kernels.tuning._timings import Choice, Time, Timings, describe
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

Operands: TypeAlias = tuple[QuantizedTensor, QuantizedTensor]

_PACKAGES = ("jax", "jaxlib", "jaxfp8")
# Of the largest result: what two ways to add may differ by, and bfloat16's rounding.
_CLOSE = 2.0**-6


def autotune(
    step: Callable[..., PyTree], *arguments: Any, chip: str, timings: Timings | None = None
) -> Timings:
    """Time each way to do each matmul of a step, on the GPU of this process.

    `step` is traced with the shapes of its arguments, and not run. Each of its FP8 matmuls is then
    timed alone, on random values, by every backend that can do it and, of a kernel, with every
    tiling that fits: medians of turns. All ways are held against each other; those of one kernel
    must agree to the bit.

    Args:
      step: called as `step(matmuls, *arguments)`; it hands `matmuls` on as
        `fp8.Implementations(matmuls=matmuls)` or `fp8.scaled_matmul(implementation=matmuls)`.
        Forward and backward, whatever it has.
      *arguments: of the step, arrays or `jax.ShapeDtypeStruct`s.
      chip: what that GPU is, "h200" for instance. An argument, never detected.
      timings: to be added to; matmuls that are in there already are not timed again.

    Returns:
      `Timings`, to save, load, and give to the step in place of `matmuls`.

    Raises:
      RuntimeError: without a GPU, or if a way gives a wrong product.
      ValueError: for a step without FP8 matmuls that take `matmuls`; an unknown chip; timings of
        another chip or device.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.blockwise()
      >>> def step(matmuls, x, w):
      ...     kernels = fp8.Implementations(matmuls=matmuls)
      ...     dot = functools.partial(fp8.dot, recipe=recipe, implementation=kernels)
      ...     return jax.grad(lambda w: jnp.sum(dot(x, w)))(w)
      >>> x = jax.ShapeDtypeStruct((4096, 7168), jnp.bfloat16)
      >>> w = jax.ShapeDtypeStruct((7168, 2048), jnp.bfloat16)
      >>> timings = fp8.autotune(step, x, w, chip="h200")  # doctest: +SKIP
      >>> timings.save("h200.json")  # doctest: +SKIP
    """
    chip_named(chip)
    if jax.default_backend() != "gpu":
        raise RuntimeError(
            f"autotune times a GPU, and jax.default_backend() is {jax.default_backend()!r}."
        )
    versions = tuple((name, importlib.metadata.version(name)) for name in _PACKAGES)
    found = Timings(chip=chip, device=jax.devices()[0].device_kind, versions=versions, times=())
    found = found if timings is None else timings.merged(found)
    seen = Recorder()
    jax.eval_shape(functools.partial(step, seen), *arguments)
    if not seen.matmuls:
        raise ValueError(
            "no FP8 matmul of the step took `matmuls`; hand it on as "
            "fp8.Implementations(matmuls=matmuls)."
        )
    for matmul, (operands, call) in seen.matmuls.items():
        if matmul not in dict(found.times):
            times = measure(matmul, operands, dataclasses.replace(call, chip=chip))
            found = dataclasses.replace(found, times=(*found.times, (matmul, times)))
    return found


class Recorder:
    """A chooser that takes down what it is asked, and leaves the choice to others."""

    def __init__(self) -> None:
        self.matmuls: dict[str, tuple[Operands, MatmulCall]] = {}

    def choose(
        self,
        lhs: QuantizedTensor,
        rhs: QuantizedTensor,
        call: MatmulCall,
        *,
        add_to: Array | None = None,
    ) -> tuple[()]:
        del add_to  # the product alone is timed
        types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (lhs, rhs))
        on_one_device = dataclasses.replace(call, out_sharding=None)
        self.matmuls[describe(lhs, rhs, call)] = types, on_one_device
        return ()


def choices(operands: Operands, call: MatmulCall) -> Iterator[Choice]:
    """Every way that can do it."""
    for backend in BACKENDS:
        if backend == "reference":
            continue
        for tiling in search_space() if backend == "mosaic" else (None,):
            choice = Choice(backend=backend, tiling=tiling)
            try:
                jax.eval_shape(multiplied_by(choice, call), *operands)
            except (NotImplementedError, NoRoomError):
                continue
            yield choice


def multiplied_by(choice: Choice, call: MatmulCall) -> Callable[..., Array]:
    """The matmul of two operands, by a choice."""
    tiling: dict[str, Any] = {} if choice.tiling is None else {"tiling": choice.tiling}
    return functools.partial(BACKENDS[choice.backend], call=call, **tiling)


def measure(matmul: str, operands: Operands, call: MatmulCall) -> tuple[Time, ...]:
    """Times of every way to do a matmul.

    Raises:
      RuntimeError: for a wrong product.
    """
    tried = list(choices(operands, call))
    sets = _timer.sets_of(operands)
    products: dict[str, np.ndarray[Any, Any]] = {}
    programs = []
    for choice in tried:
        work = multiplied_by(choice, call)
        product = np.asarray(jax.jit(work)(*sets[0]), np.float32)
        _check(matmul, choice, product, products)
        program, turns = _timer.looped(work, operands)
        programs.append(jax.jit(program))
        jax.block_until_ready(programs[-1](sets))
    seconds = _timer.times(programs, sets, turns * len(sets))
    quartiles = [[float(q) for q in np.percentile(each, (25, 50, 75))] for each in seconds]
    return tuple(
        Time(choice=choice, seconds=middle, quartiles=(low, high))
        for choice, (low, middle, high) in zip(tried, quartiles, strict=True)
    )


def _check(
    matmul: str,
    choice: Choice,
    product: np.ndarray[Any, Any],
    products: dict[str, np.ndarray[Any, Any]],
) -> None:
    """Hold a product against those before it."""
    first = next(iter(products.values()), product)
    if not np.max(np.abs(product - first)) <= _CLOSE * np.max(np.abs(first)):
        raise RuntimeError(
            f"{choice} gives a wrong product of {matmul}: it is not that of {next(iter(products))}."
        )
    if not np.array_equal(product, products.setdefault(choice.backend, product)):
        raise RuntimeError(f"{choice} gives other bits than another tiling, of {matmul}.")
