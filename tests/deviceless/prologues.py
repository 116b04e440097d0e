"""A training step of one layer behind SwiGLU or RMSNorm, compiled for an H200 in three ways.

What benchmarks and tests read.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from program import Program
from targets import array, state_of, topology

import jaxfp8 as fp8

PROLOGUES = {"swiglu": fp8.prologues.SwiGLU(), "rms_norm": fp8.prologues.RMSNorm()}
WAYS: dict[str, tuple[str, bool]] = {
    "XLA's casts": ("xla", False),
    'casts by "mosaic"': ("mosaic", False),
    "with `prologue=`": ("mosaic", True),
}
"""Who casts, and whether the prologue is given to the matmul or applied before."""


def shapes_of(name: str, m: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Of the arrays of a prologue that makes [M, K]."""
    return ((m, k), (m, k)) if name == "swiglu" else ((m, k), (k,))


def trained(
    recipe: fp8.Recipe, name: str, casts: str, *, fused: bool, sizes: tuple[int, int, int]
) -> Program:
    """The step for x [M, K] @ w [K, N]; its gradient depends on its result, as in a model."""
    (m, k, n), prologue = sizes, PROLOGUES[name]

    def step(params: Any, c: Any, state: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            lhs, w = params
            h, how = (lhs, {"prologue": prologue}) if fused else (prologue(*lhs), {})
            y = fp8.dot(
                h,
                w,
                recipe=recipe,
                state=state,
                kernels=fp8.Kernels(casts=casts),
                **how,
            )
            return jnp.sum((y * c).astype(jnp.float32) ** 2)

        return fp8.value_and_grad(loss)(params, state)

    mesh = Mesh(np.array(topology("h200").devices), ("a",), axis_types=(AxisType.Auto,))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    arguments = (
        (tuple(array(*s) for s in shapes_of(name, m, k)), array(k, n)),
        array(m, n),
        state_of(recipe),
    )
    with jax.set_mesh(mesh):
        run = jax.jit(step, compiler_options=fp8.Kernels("h200").compiler_options(recipe))
        return Program(run.lower(*jax.tree.map(place, arguments)).compile().as_text())


def moved(program: Program) -> int:
    """Bytes that its kernels read and write in the steady state."""
    return program.traffic(program.entry)
