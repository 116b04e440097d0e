"""A layer of experts compiled for 8 and 64 H200: what it sends, its casts, and its memory.

benchmarks/wire/moe_wire.py has the figures of larger layers.
"""

import math

import moe_layer
import pytest
from interpreter import needs_mosaic
from moe_layer import BY_XLA, Layer, casts, exchanges, sent
from program import Program
from work import host_transfers

import jaxfp8 as fp8
from jaxfp8.programs import assert_fp8_gemms, wire_report

pytestmark = [pytest.mark.deviceless, needs_mosaic]

MIB = 2**20
SIZES = {"tokens": 2048, "features": 2048, "hidden": 640, "choices": 4}
LAYERS = {
    8: Layer(expert=8, experts=16, **SIZES),
    64: Layer(expert=64, experts=128, **SIZES),
}
SLOTS = 10240  # 1.25 * 2048 * 4
# A dispatch has at most this share of the bytes of bfloat16. The scales of MXFP8 are one byte for
# 32 values. Those of `blockwise` are four bytes for 128, and those of `delayed` four for a row.
MOST = {"blockwise": 0.52, "mxfp8": 33 / 64, "delayed": 0.502}
SCALES = {"blockwise": ("float32", (SLOTS, 16)), "mxfp8": ("uint8", (SLOTS, 64)),
          "delayed": ("float32", (SLOTS,))}  # fmt: skip
WORKSPACE = 32 * MIB  # of cuBLASLt, which bf16 multiplies with
layers = pytest.mark.parametrize(
    ("devices", "name"),
    [(8, "blockwise"), (8, "mxfp8"), (8, "delayed"), (64, "blockwise"), (64, "mxfp8")],
)


def compiled(name, devices, **how):
    return moe_layer.compiled(fp8.recipes.get(name), LAYERS[devices], **how)


def bf16(devices):
    return compiled("identity", devices, kernels=BY_XLA)


def shares(step, devices):
    """The bytes of each exchange, over those of bf16."""
    mine, whole = exchanges(step), exchanges(bf16(devices))
    return {role: sent(mine[role]) / sent(whole[role]) for role in moe_layer.ROLES}


def tensors(transfers):
    return sorted((t.dtype, t.shape) for t in transfers)


@layers
def test_a_dispatch_in_fp8_sends_half_of_the_bytes(devices, name):
    step = compiled(name, devices)
    found = shares(step, devices)
    assert 0.5 < found.pop("dispatch") <= MOST[name]
    assert set(found.values()) == {1}
    values = ("uint8", (SLOTS, 2048))
    assert tensors(exchanges(step)["dispatch"]) == sorted([values, SCALES[name]])


def test_exchanges_in_bfloat16():
    found = exchanges(bf16(8))
    for role in moe_layer.ROLES[:4]:
        assert tensors(found[role]) == [("bfloat16", (SLOTS, 2048))]


@pytest.mark.parametrize("name", ["blockwise", "delayed"])
def test_a_gradient_in_fp8_sends_half_of_the_bytes(name):
    step = compiled(name, 8, gradient_sent_in_fp8=True)
    found = shares(step, 8)
    assert 0.5 < found["gradient of combine"] <= MOST[name]
    assert 0.5 < found["dispatch"] <= MOST[name]
    assert found["combine"] == found["gradient of dispatch"] == 1


@layers
def test_nothing_else_is_sent_but_amaxes(devices, name):
    """So nobody gathers or reduces weights or rows."""
    report = wire_report(compiled(name, devices))
    others = [each for each in report.transfers if each.kind != "all-to-all"]
    assert max(each.bytes for each in others) <= 4 * LAYERS[devices].experts
    gathers = report.only(kind="all-gather").transfers
    assert len(gathers) == (2 if name == "delayed" else 0)  # amaxes of x, and its scales


@layers
def test_a_forward_pass_has_two_casts_of_activations(devices, name):
    """x on the device of its tokens, and the result of SwiGLU."""
    layer = LAYERS[devices]
    steps = [compiled(name, devices)]
    if devices == 8:
        steps.append(compiled(name, devices, backward=False))
    for step in steps:
        x, hidden = [cast.copies for cast in casts(step, layer) if not cast.is_backward]
        # A token that has a scale for each expert is cast once for each.
        rows = SLOTS if name == "delayed" else layer.tokens
        assert [math.prod(copy) for copy in x] == [rows * layer.features]
        # Its rows are in tiles, in both directions at once where wgrad needs another one.
        assert len(hidden) == (1 if name == "delayed" else 2)
        for copy in hidden:
            assert SLOTS <= math.prod(copy) / layer.hidden <= SLOTS + 128 * 3


@layers
def test_matmuls_are_in_fp8_and_the_host_waits(devices, name):
    step = compiled(name, devices)
    assert_fp8_gemms(step)
    assert_fp8_gemms(step, 6)
    assert not host_transfers(Program(step.as_text()))


def assert_small_temporaries(step, devices):
    mine, whole = (each.memory_analysis().temp_size_in_bytes for each in (step, bf16(devices)))
    # On 64 devices XLA keeps the input of SwiGLU longer.
    assert mine <= (0.8 if devices == 8 else 0.95) * (whole - WORKSPACE)


@layers
def test_temporaries_are_below_those_of_bfloat16(devices, name):
    assert_small_temporaries(compiled(name, devices), devices)


def test_temporaries_with_a_gradient_in_fp8():
    assert_small_temporaries(compiled("blockwise", 8, gradient_sent_in_fp8=True), 8)


def test_the_counters_see_a_dispatch_in_bfloat16():
    """Rows that arrive in bfloat16 are cast in both directions, and as many as there are slots."""
    step = compiled("blockwise", 8, sent_in_fp8=False)
    assert shares(step, 8)["dispatch"] == 1
    first, _ = [cast.copies for cast in casts(step, LAYERS[8]) if not cast.is_backward]
    assert len(first) == 2
    assert min(map(math.prod, first)) >= SLOTS * 2048
