"""Compiling for a TPU that is not there: its compiler is the wheel libtpu.

Nothing runs; the compiled program is read.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

# Several processes compile at once, as the workers of pytest-xdist do. Without it the second one
# stops at a lock file, because a TPU belongs to one process.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Of each chip the smallest slice that its compiler takes: one host.
TOPOLOGIES = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}


@functools.cache
def topology(chip: str, shape: str | None = None) -> Any:
    """Devices of a chip. `shape` counts chips, as in "4x4x2"; a chip of TPU7x has two devices."""
    name = TOPOLOGIES[chip] if shape is None else f"{chip}:{shape}"
    return topologies.get_topology_desc(topology_name=name, platform="tpu")


def compile_for(chip: str, function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """`function`, compiled for one device of that chip.

    `arguments`: trees of anything with a shape and a dtype.
    """
    sharding = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.jit(function).lower(*jax.tree.map(on_device, arguments)).compile()


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
