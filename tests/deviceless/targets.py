"""Compiling for a GPU that is not there: XLA needs its description, not the device.

`<chip>.txtpb` beside this file describes a chip. The CUDA wheels have to be installed, and
JAX_SKIP_CUDA_CONSTRAINTS_CHECK set before jax is imported (tests/conftest.py); no driver is needed.
Nothing runs; the compiled program is read.
"""

import concurrent.futures
import functools
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from program import Program

import jaxfp8 as fp8


@functools.cache
def topology(chip: str, shape: str = "1x1x1") -> Any:
    """Devices of a chip; `shape` is partitions x hosts x devices per host."""
    target = Path(__file__).with_name(f"{chip}.txtpb").read_text()
    return topologies.get_topology_desc(
        f"{chip} {shape}", "cuda", topology=shape, target_config=target
    )


def compile_for(
    chip: str,
    function: Callable[..., Any],
    *arguments: Any,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """`function`, compiled for one device of that chip.

    `arguments`: trees of anything with a shape and a dtype.
    """
    sharding = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    lowered = jax.jit(function).lower(*jax.tree.map(on_device, arguments))
    check_one_chip(chip, lowered)
    return lowered.compile(compiler_options=dict(options or {}))


_with_pallas_for: set[str] = set()


def check_one_chip(chip: str, lowered: jax.stages.Lowered) -> None:
    """Raise AssertionError if this process has compiled kernels in Pallas for another chip.

    XLA assembles all of them for the first one.
    """
    if "mosaic_gpu" in lowered.as_text():
        _with_pallas_for.add(chip)
        assert len(_with_pallas_for) == 1, "compile for Blackwell by in_its_process"


@functools.cache
def _for_blackwell() -> concurrent.futures.Executor:
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn)


def in_its_process(chip: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, which compiles kernels in Pallas for that chip."""
    if chip != "b200":
        return function(*arguments)
    return _for_blackwell().submit(function, *arguments).result(timeout=600)


def program_for(
    chip: str,
    function: Callable[..., Any],
    *arguments: Any,
    options: Mapping[str, Any] | None = None,
) -> Program:
    return Program(compile_for(chip, function, *arguments, options=options).as_text())


def dense_step(
    recipe: fp8.Recipe,
    dot: Callable[..., Any] | None = None,
    kernels: fp8.Kernels | None = None,
) -> Callable[..., Any]:
    """Forward and backward of one dense layer, `step(x, w, c, state)`, with c the gradient of its
    output.

    `dot(x, w, state)` is the matmul, by default `fp8.dot` with these kernels. c is an
    argument and not a constant, so that its amax is that of a tensor with a name.
    """
    dot = dot or functools.partial(_dot, recipe, kernels)

    def step(x: Any, w: Any, c: Any, state: Any) -> Any:
        def loss(params: Any, state: Any, c: Any) -> Any:
            return jnp.sum((dot(*params, state) * c).astype(jnp.float32))

        return fp8.value_and_grad(loss)((x, w), state, c)

    return step


def _dot(recipe: fp8.Recipe, kernels: fp8.Kernels | None, x: Any, w: Any, state: Any) -> Any:
    return fp8.dot(x, w, recipe=recipe, state=state, kernels=kernels)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def state_of(recipe: fp8.Recipe, *stacked: int, settled: bool = True) -> Any:
    """The types of a matmul's state, stacked along leading axes.

    Settled, as that of all steps but the first ones.
    """
    state = jax.eval_shape(lambda: fp8.init_state(recipe))
    types = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*stacked, *leaf.shape), leaf.dtype), state
    )
    return fp8.settle(types) if settled and recipe.rows else types
