"""What a layer on an H200 keeps for its backward pass and needs besides, in each pass.

Bytes of compiled programs.

Each pass is a program of its own, as it is where other layers stand between. What one keeps for the
other lies as the compiler likes it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.state._identity import known_scales
from jaxfp8.state._ledger import zero_ledgers
from jaxfp8.state._state import Probe, map_states

pytestmark = [pytest.mark.deviceless, needs_mosaic]

M, K, N = 4096, 4096, 16384
MIB = 2**20
CASTS, BOTH = (
    fp8.Kernels(casts="mosaic"),
    fp8.Kernels(casts="mosaic", matmuls="mosaic"),
)
# Hopper wants a copy of x and w for each matmul that reads them, so at the end of the forward pass
# there are two bytes a value, as in bfloat16; then one. cuBLASLt takes a workspace of 4 MiB
# besides. Scales of 1x32 become float32 before the kernel that multiplies them. docs/gpu.md has
# this table: kernels, MiB saved, and MiB at most.
RECIPES = {
    "bf16": (fp8.recipes.identity(), None, 160, 164),
    "delayed": (fp8.recipes.delayed(), BOTH, 80, 160),
    "delayed, by cuBLASLt": (fp8.recipes.delayed(), CASTS, 80, 164),
    "delayed, by XLA": (fp8.recipes.delayed(), None, 80, 164),
    "current": (fp8.recipes.current(), BOTH, 80, 160),
    "current, by XLA": (fp8.recipes.current(), None, 80, 164),
    "rowwise": (fp8.recipes.rowwise(), BOTH, 80, 160),
    "rowwise, by XLA": (fp8.recipes.rowwise(), None, 80, 164),
    "rowwise, wgrad in high precision": (
        fp8.recipes.rowwise(high_precision_wgrad=True),
        CASTS,
        96,
        100,
    ),
    "rowwise, wgrad in high precision, by XLA": (
        fp8.recipes.rowwise(high_precision_wgrad=True),
        None,
        96,
        164,
    ),
    "blockwise": (fp8.recipes.blockwise(), BOTH, 81, 161),
    "mxfp8": (fp8.recipes.mxfp8(), BOTH, 83, 171),
    "mxfp8, 2D weights": (fp8.recipes.mxfp8(w_tile_dim=2), BOTH, 81, 163),
}


def with_probe(state, ledger, known):
    return dataclasses.replace(state, probe=Probe(ledger, known, reduce_axes=None))


def peak(recipe, kernels=None):
    """Bytes that are saved, and those with what the hungrier pass needs for a while.

    Neither has arguments and results.
    """
    mesh = Mesh(np.array(topology("h200").devices), ("d",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, P())
    state = map_states(lambda s: dataclasses.replace(s, settled=True), fp8.init_state(recipe))
    scales = map_states(known_scales, state)

    def forward(x, w):
        def layer(x, w, ledgers):
            probed = map_states(with_probe, state, ledgers, scales)
            return fp8.dot(x, w, recipe=recipe, state=probed, kernels=kernels)

        return jax.vjp(layer, x, w, zero_ledgers(state))

    # bfloat16 by cuBLASLt, too.
    optimized = fp8.recipes.current() if recipe.is_identity else recipe
    options = fp8.Kernels("h200").compiler_options(optimized)
    x, w, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N), (M, N)))
    with jax.set_mesh(mesh):
        _, backward = jax.eval_shape(forward, x, w)
        kept = jax.tree.map(lambda _: Format(Layout.AUTO, here), backward)
        there = jax.jit(
            forward, in_shardings=here, out_shardings=(here, kept), compiler_options=options
        )
        there = there.lower(x, w).compile()
        back = jax.jit(
            lambda backward, g: backward(g),
            in_shardings=(there.output_formats[1], here),
            compiler_options=options,
        )
        back = back.lower(backward, g).compile()
    saved = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))
    return saved, saved + max(p.memory_analysis().temp_size_in_bytes for p in (there, back))


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_a_layer(name):
    recipe, kernels, *wanted = RECIPES[name]
    assert [each / MIB for each in peak(recipe, kernels)] == pytest.approx(wanted, abs=0.6)
