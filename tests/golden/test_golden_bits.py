"""Quantized operands, quantizer state and `fp8.quantize` have the bits of bits.json."""

import json

import numpy as np
import pytest
from bits import FILE, TABLE, differences
from inputs import MATMULS, RECIPES, array

GOLDEN = json.loads(FILE.read_text())
# Each recipe with ordinary numbers; each kind of scale with hard numbers, and in a matmul with
# batch axes. The other cells are in the file as well.
_HARD = ("current", "rowwise", "blockwise, float32 scales", "mxfp8", "mxfp8, floor", "static")
_BATCHED = ("rowwise", "blockwise, float32 scales", "mxfp8, w in 2D tiles")
DEFAULT = {
    *(f"{recipe} / 2D bfloat16" for recipe in RECIPES),
    *(f"{recipe} / 2D float32, hard at step 1" for recipe in _HARD),
    *(f"{recipe} / bqhd,bkhd->bhqk" for recipe in _BATCHED),
    "delayed / 2D float32, hard at step 2",
    "fp8.quantize / [3, 40, 72] bfloat16 hard",
}
ROWS = [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in TABLE]


@pytest.mark.quick
@pytest.mark.parametrize("name", ROWS)
def test_bits(name):
    lines = differences(name, GOLDEN.get(name, {}), TABLE[name]())
    if lines:
        shown = "\n".join(lines[:12] + [f"and {len(lines) - 12} more"] * (len(lines) > 12))
        pytest.fail(
            f"{len(lines)} arrays of {name!r} do not have the bits of {FILE.name}:\n{shown}\n"
            "Numerics must not change by accident; find the cause. If they are meant to change, "
            "say so in CHANGELOG.md and remake the file: python tests/golden/bits.py --write",
            pytrace=False,
        )


def test_every_group_is_compared():
    assert set(GOLDEN) == set(TABLE)
    assert set(TABLE) >= DEFAULT


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_hard_inputs_are_hard(dtype):
    values = array("x", (150, 200), dtype, hard=True).astype(np.float64)
    tiny = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}[dtype]
    assert np.isposinf(values).sum() == 1
    assert np.isnan(values).sum() == 1
    assert np.any((values != 0) & (np.abs(values) < tiny))
    assert np.any(values[~np.isinf(values)] > (2.0**15 if dtype == "float16" else 2.0**127))
    assert np.any(np.all(values == 0, axis=1))
    assert np.any((values == 0) & np.signbit(values))


def test_states_see_steps_of_unequal_size():
    sizes = [
        float(np.abs(MATMULS["2D bfloat16"].arrays(step)["x"].astype(np.float64)).max())
        for step in range(3)
    ]
    assert sizes[1] > sizes[0] > sizes[2]
