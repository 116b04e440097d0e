"""`autotune`: time every way to do the matmuls of a step, on the GPU of this process."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, cast

import jax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import PyTree
from jaxfp8._version import __version__
from jaxfp8.kernels._dispatch import chip_named, kernels_of
from jaxfp8.kernels._timings import Operands, Timings, describe, measure
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.plan._kernels import Kernels, check_kernels


def autotune(step: Callable[..., PyTree], *arguments: Any, kernels: Kernels) -> Kernels:
    """Time each way to do each matmul of a step, on the GPU of this process.

    `step` is traced with the shapes of its arguments, and does not run. Each of its FP8 matmuls is
    then timed alone, on random values, with every backend for the chip and every tiling that fits.
    A time is the median of several rounds. The results of all ways are compared. Casts are not
    timed.

    Args:
      step: called as `step(kernels, *arguments)`. It passes `kernels` to its layers and ops. It may
        have a backward pass.
      *arguments: of the step, arrays or `jax.ShapeDtypeStruct`s.
      kernels: `fp8.Kernels` for the chip of this GPU. If it has timings, autotune times only the
        matmuls that they lack.

    Returns:
      The same kernels with timings, to pass to the step. Save them by
      `kernels.timings.save(path)`. Load them by
      `fp8.Kernels("h200", timings=fp8.plan.Timings.load(path))`.

    Raises:
      RuntimeError: without a GPU, or if a way gives a wrong result.
      ValueError: if no FP8 matmul of the step takes `kernels`. Also for kernels without a chip or
        with `matmuls`, and for timings of another chip or device.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.blockwise()
      >>> def step(kernels, x, w):
      ...     dot = functools.partial(fp8.dot, recipe=recipe, kernels=kernels)
      ...     return jax.grad(lambda w: jnp.sum(dot(x, w)))(w)
      >>> x = jax.ShapeDtypeStruct((4096, 7168), jnp.bfloat16)
      >>> w = jax.ShapeDtypeStruct((7168, 2048), jnp.bfloat16)
      >>> tuned = fp8.plan.autotune(step, x, w, kernels=fp8.Kernels("h200"))  # doctest: +SKIP
      >>> tuned.timings.save("h200.json")  # doctest: +SKIP
    """
    given = check_kernels(kernels)
    if given.chip is None or given.matmuls is not None:
        raise ValueError(
            f"kernels={kernels!r} must name the chip of this GPU, and no backend of matmuls. "
            'Write for instance kernels=fp8.Kernels("h200").'
        )
    if jax.default_backend() != "gpu":
        raise RuntimeError(
            f"autotune times a GPU, but jax.default_backend() is {jax.default_backend()!r}. Run it "
            "on a machine with the GPU."
        )
    # jaxfp8 may be imported from a checkout that is not installed, which has no metadata.
    others = tuple((name, importlib.metadata.version(name)) for name in ("jax", "jaxlib"))
    versions = (*others, ("jaxfp8", __version__))
    device = jax.devices()[0].device_kind
    found = Timings(chip=given.chip, device=device, versions=versions, times=())
    if isinstance(given.timings, Timings):
        found = given.timings.merged(found)
    seen = _Recorder()
    recording = dataclasses.replace(given, timings=cast(Timings, seen))
    jax.eval_shape(functools.partial(step, recording), *arguments)
    if not seen.matmuls:
        raise ValueError(
            "no FP8 matmul of the step took `kernels`. Pass it to layers and ops as "
            "kernels=kernels."
        )
    for matmul, (operands, call) in seen.matmuls.items():
        if matmul not in dict(found.times):
            backends = (*kernels_of(chip_named(given.chip), BACKENDS), "xla")
            times = measure(matmul, operands, call, backends)
            found = dataclasses.replace(found, times=(*found.times, (matmul, times)))
    return dataclasses.replace(given, timings=found)


class _Recorder:
    """Takes the place of timings while a step is traced. It records each matmul."""

    def __init__(self) -> None:
        self.matmuls: dict[str, tuple[Operands, MatmulCall]] = {}

    def choose(
        self, lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall, *, add_to: Any
    ) -> tuple[()]:
        del add_to  # the matmul is timed without its addition
        types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (lhs, rhs))
        # One GPU times the matmul, so the sharding of its result is dropped.
        on_one_device = dataclasses.replace(call, out_sharding=None)
        self.matmuls[describe(lhs, rhs, call)] = types, on_one_device
        return ()  # so that `Kernels` choose by their estimates
