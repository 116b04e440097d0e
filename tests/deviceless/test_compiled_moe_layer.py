"""`linen.FP8MoE` with its router, compiled for H200s: what it sends, and its matmul of logits."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import compile_for, topology

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8MoE
from jaxfp8.programs import wire_report

pytestmark = pytest.mark.deviceless

E, K = 16, 1024
KERNELS = fp8.Kernels("h200")


def slow(row):
    return pytest.param(row, marks=pytest.mark.slow)


def variables_of(layer, x):
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    return shapes["params"], shapes.get(COLLECTION, {})


def compiled(recipe, kind):
    """A train step on 2 x 4 H200s. x has three axes, of which both mesh axes split the first."""
    devices = np.array(topology("h200", "1x1x8").devices).reshape(2, 4)
    mesh = Mesh(devices, ("data", "expert"), (kind,) * 2)
    parallel = fp8.moe.ExpertParallel(
        axis="expert", tokens=("data", "expert"), capacity_factor=1.25
    )
    layer = FP8MoE(E, 640, 4, dtype=jnp.bfloat16, recipe=recipe, parallel=parallel, kernels=KERNELS)

    def loss(params, state, x):
        y, stats = layer.apply({"params": params, COLLECTION: state}, x)
        losses = 0.01 * stats.load_balancing_loss + 0.001 * stats.z_loss
        return jnp.mean(y.astype(jnp.float32) ** 2) + losses, stats

    def array(shape, spec):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    x = jax.ShapeDtypeStruct((16, 1024, K), jnp.bfloat16)
    of_experts = lambda leaf: array(leaf, P("expert") if leaf.shape[0] == E else P())
    params, state = jax.tree.map(of_experts, variables_of(layer, x))
    step = jax.jit(fp8.value_and_grad(loss, has_aux=True))
    with jax.set_mesh(mesh):
        lowered = step.lower(params, state, array(x, P(("data", "expert"))))
        return lowered.compile(compiler_options=KERNELS.compiler_options(recipe))


@needs_mosaic
@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
@pytest.mark.parametrize("name", ["blockwise", "delayed"])
def test_a_layer_sends_tokens_and_sums_of_gradients_alone(name, kind):
    """No device gets the logits, tokens, experts or weights of others in another way."""
    transfers = wire_report(compiled(fp8.recipes.get(name), kind)).transfers
    rows = 1.25 * 2048 * 4  # slots of a device
    exchanged = [each for each in transfers if each.kind == "all-to-all"]
    wide = [each for each in exchanged if math.prod(each.shape) == rows * K]
    # Dispatch, combine and the gradient of combine: nobody asks for the gradient of x.
    assert sorted(each.dtype for each in wide) == ["bfloat16", "bfloat16", "uint8"]
    gathered = [each for each in transfers if each.kind == "all-gather"]
    assert sum(each.bytes for each in gathered) <= 3 * 4 * E  # scales of experts
    assert bool(gathered) == (name == "delayed")
    # The router is summed over all devices. The weights of a device are summed over `data`.
    sums = [each for each in transfers if each.kind == "all-reduce"]
    weights = sum(math.prod(each.shape) for each in sums if each.dtype == "bfloat16")
    others = sum(math.prod(each.shape) for each in sums if each.dtype != "bfloat16")
    assert weights == E // 4 * 3 * 640 * K
    assert K * E <= others <= K * E + 20 * E
    assert len(exchanged) + len(gathered) + len(sums) == len(transfers)


def test_a_router_is_in_float32_and_not_in_tf32():
    layer = FP8MoE(24, 64, 2, dtype=jnp.bfloat16, recipe=fp8.recipes.blockwise())
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)

    def loss(params, x):
        return layer.apply({"params": params}, x)[1].z_loss

    step = compile_for("h200", jax.grad(loss, (0, 1)), variables_of(layer, x)[0], x)
    matmuls = [line for line in step.as_text().splitlines() if re.search(r" dot\(|__cublas", line)]
    assert len(matmuls) == 3  # of logits, and their gradients
    assert all("operand_precision={highest,highest}" in line for line in matmuls)
