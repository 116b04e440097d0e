"""The layers of a Llama-3-70B on 8, 64 and 512 H200: what a train step sends.

The figures: benchmarks/wire/llama_wire.py.
"""

import collections
import functools
import math

import jax.numpy as jnp
import llama
import pytest
from program import Program

from jaxfp8.programs import assert_wire_dtype, wire_report

pytestmark = pytest.mark.deviceless

# fsdp x tensor devices, and layers: the loop over them has one body, whatever its length.
meshes = pytest.mark.parametrize(
    ("mesh", "layers"),
    [
        pytest.param((2, 4), 4, id="8"),
        pytest.param((8, 8), llama.LAYERS, id="64", marks=pytest.mark.slow),
        pytest.param((64, 8), llama.LAYERS, id="512", marks=pytest.mark.slow),
    ],
)
# The bytes of all all-gathers, over those in bf16. Gradients of split tokens are gathered as one
# FP8 copy, or as two. Two copies are as large as bf16, without their scales. On 64 devices more of
# the bytes are tokens than on 8.
MOST = {"delayed": 0.505, "current": 0.505, "rowwise": 0.582, "blockwise": 0.60, "mxfp8": 0.61}
COPIES_OF_G = {"delayed": 1, "current": 1, "rowwise": 2, "blockwise": 2, "mxfp8": 2}
# Like others in how they compile; test_sharded_weights.py has them in one layer.
LARGE = {"rowwise", "blockwise"}


@functools.cache
def compiled(name, mesh, layers, **how):
    return llama.compile_step(llama.RECIPES[name], *mesh, layers, **how)


def maxima(step):
    """The max all-reduces of the steady state, in which no scale is unset."""
    program = Program(step.as_text())
    return program.maxima(program.entry)


def tokens_in_bf16(mesh):
    return 2 * llama.TOKENS // mesh[1] * llama.D


@meshes
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in llama.RECIPES],
)
def test_weights(name, mesh, layers):
    step = compiled(name, mesh, layers)
    report = wire_report(step)
    held = [math.prod(shape) for shape in llama.shards(*mesh)]

    # Each is gathered forward and backward: a byte a value, two in bf16.
    gathers = llama.gathers(report, *mesh)
    in_bf16 = 2 * 2 * layers * sum(held)
    assert gathers["weights"].count == 2 * layers * len(held), report
    assert gathers["weights"].operand_bytes == (in_bf16 if name == "bf16" else in_bf16 / 2), report
    if name != "bf16":
        assert {t.dtype for t in gathers["weights"].transfers} == {"uint8"}
        assert_wire_dtype(step, "all-gather", jnp.uint8, at_least=min(held))
        # Even if all the scales that travel were those of weights.
        assert gathers["weights"].wire_bytes + gathers["scales"].wire_bytes <= 0.55 * in_bf16 * (
            mesh[0] - 1
        )

    # Of the tokens that are split: x of the first of each pair, forward and backward, and the
    # gradient of the second.
    tokens = gathers["activations"]
    assert tokens.count == layers * 2 * (2 + COPIES_OF_G.get(name, 1)), report
    if name != "bf16":
        # No gather is missing here, and scales count.
        everything = report.only(kind="all-gather").wire_bytes
        in_bf16 = (mesh[0] - 1) * in_bf16 + (mesh[1] - 1) * layers * 6 * tokens_in_bf16(mesh)
        assert everything <= MOST[name] * in_bf16, report

    # The gradients of weights are scattered, and nothing of their size is reduced whole.
    products = llama.shards(1, mesh[1])
    shapes = {tuple(sorted(shape)) for shape in products}
    scattered = [
        t for t in report.only(kind="reduce-scatter").transfers if tuple(sorted(t.shape)) in shapes
    ]
    assert sum(t.operand_bytes for t in scattered) == 2 * layers * sum(map(math.prod, products)), (
        report
    )
    assert not report.only(kind="all-reduce", at_least=min(held)).transfers, report


@meshes
def test_amaxes_of_delayed_scaling_travel_together(mesh, layers):
    """One all-reduce in an iteration of the forward and one of the backward loop.

    That of 4 x and 4 w, and that of 4 g.
    """
    found = maxima(compiled("delayed", mesh, layers))
    assert [maximum.times for maximum in found] == [layers, layers], found
    assert len({maximum.computation for maximum in found}) == 2, found


REMAT = {
    "plain": (None, 1),
    "products": (llama.KEEP_PRODUCTS, 1),
    # The backward pass waits for all that `jax.checkpoint` kept, the amaxes of the forward pass
    # among it.
    "residuals": (llama.KEEP_RESIDUALS, 2),
}


@pytest.mark.parametrize(
    "remat",
    [
        "plain",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("products", "residuals")),
    ],
)
def test_amaxes_of_unrolled_layers_travel_together(remat):
    """One all-reduce in a step, or one in each direction."""
    policy, expected = REMAT[remat]
    found = maxima(compiled("delayed", (2, 4), 4, scanned=False, remat=policy, names=llama.MLP))
    assert [maximum.times for maximum in found] == [1] * expected, found


@meshes
def test_amaxes_of_current_scaling(mesh, layers):
    """Each activation waits for its own, and those of weights wait together, or ride along."""
    found = maxima(compiled("current", mesh, layers))
    forward, backward = collections.Counter(maximum.computation for maximum in found).values()
    assert forward <= len(llama.WEIGHTS) + 1, found
    assert backward <= len(llama.WEIGHTS), found
    assert {maximum.times for maximum in found} == {layers}, found


@meshes
@pytest.mark.parametrize("name", [pytest.param("blockwise", marks=pytest.mark.slow), "mxfp8"])
def test_tiles_need_no_amax_of_other_devices(name, mesh, layers):
    assert not maxima(compiled(name, mesh, layers))
