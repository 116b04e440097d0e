"""A scan over blocks on a TPU reads the FP8 activations that it saved, and copies none of them."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "programs"))

import _tpu_models as models
import jax

import jaxfp8 as fp8

pytestmark = pytest.mark.tpu

TOKENS, WIDTH, BATCH = 512, 512, 4
SMALL = models.Model(2, WIDTH, 1024, heads=4, kv_heads=2, batch=BATCH, tokens=TOKENS)


def test_no_saved_activation_is_copied(monkeypatch):
    """XLA would choose transposed copies, and transpose them for the scan in both passes.

    As bytes, they would be copied to be read as FP8.
    """
    monkeypatch.setitem(models.MODELS, "small", SMALL)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step, arguments = models.lowering("small", "scan", "inputs", "delayed")
        compiled = step.lower(*arguments).compile()
    text, shape = compiled.as_text(), f"{BATCH},{TOKENS},{WIDTH}"
    assert re.search(rf"= f8e4m3fn\[{SMALL.blocks},{shape}\]\S* fusion", text)  # they are saved
    copied = rf"= \(?(?:f8\w+|u8)\[(?:1,)?{shape}\]\S* copy\("
    for row in fp8.programs.tpu_cycles(compiled).rows:
        assert not re.search(f"%{re.escape(row.name)} {copied}", text)
