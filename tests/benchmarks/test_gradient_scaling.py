"""The simulated sums have the shape of FP8-LM's figure 7, and count what they should."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/wire/gradient_scaling.py"
SPEC = importlib.util.spec_from_file_location("gradient_scaling", SCRIPT)
scaling = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(scaling)
FEW, MANY = 8, 256


@pytest.fixture(scope="module")
def rows():
    """{(sum, scaling, ranks): row}"""
    return {
        (row["sum"], row.get("scaling"), ranks): row
        for ranks in (FEW, MANY)
        for row in scaling.rows_of("student t, 3 degrees", 1.0, 4096, ranks)
    }


@pytest.mark.parametrize("how", ["ring", "exchange"])
def test_figure_7(rows, how):
    pre, post, auto = (
        [rows[how, name, ranks] for ranks in (FEW, MANY)] for name in ("pre", "post", "auto")
    )
    # Division before the cast: more values become zero with more ranks. None is clipped.
    assert pre[1]["underflow"] > max(0.2, 10 * pre[0]["underflow"])
    assert pre[1]["overflow"] == 0
    # Division after the sum: more values are clipped with more ranks. Few become zero.
    assert post[1]["overflow"] > max(1e-3, post[0]["overflow"])
    assert post[1]["underflow"] < 0.05
    # mu: little of both.
    assert auto[1]["overflow"] <= 1e-5
    assert auto[1]["underflow"] < 0.1
    assert auto[1]["factor"] < 1
    assert auto[1]["snr_db"] >= max(pre[1]["snr_db"], post[1]["snr_db"]) - 0.5


def test_roundings_of_a_ring_add_up(rows):
    assert rows["ring", "auto", MANY]["snr_db"] < 10
    assert rows["exchange", "auto", MANY]["snr_db"] > 25
    assert rows["groups", None, MANY]["snr_db"] > 28
    assert rows["bfloat16", None, FEW]["snr_db"] > rows["bfloat16", None, MANY]["snr_db"] + 5


def test_the_parts_of_the_ranks_differ():
    parts = scaling.gradients_of("log-normal", 1.0, 512, 5)
    each = np.stack([scaling.gradient_of(parts, offset) for offset in parts["offsets"]])
    own = each / parts["size"] - scaling.AGREEMENT * parts["common"]
    together = np.corrcoef(np.sign(own))
    assert np.abs(together - np.eye(5)).max() < 0.2
    largest, mean = scaling.amax_and_mean(parts)
    assert float(largest) == np.abs(each).max()
    np.testing.assert_allclose(mean, each.mean(0), rtol=1e-4, atol=1e-9)


def test_lost_values_and_clipped_sums_are_counted():
    parts = {
        "size": np.ones(4, np.float32),
        "common": np.zeros(4, np.float32),
        "pool": np.tile(np.float32([300, 1, 2.0**-11, 0]), 2),
        "offsets": np.int32([0, 0, 0, 0]),
    }
    own = (1 - scaling.AGREEMENT**2) ** 0.5
    for how in ("ring", "exchange"):
        total, clipped, lost = scaling.fp8_sum(parts, np.float32(1 / own), how)
        np.testing.assert_array_equal(total, [448, 4, 0, 0])
        assert (float(clipped), float(lost)) == (0.25, 0.25)
