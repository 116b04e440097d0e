"""public_models.py trains a model from a folder, and compares what it computed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from quick_flags import quick_flags

FOLDER = Path(__file__).parents[2] / "benchmarks" / "learning"
# It has the names of gpt-jax, and an `init` with other arguments.
MODEL = """
import dataclasses
from typing import Any
import flax.linen as nn
import jax, jax.numpy as jnp

@dataclasses.dataclass(frozen=True)
class GPTConfig:
    block_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_embeds: int
    dropout_rate: float
    dtype: Any

class GPT(nn.Module):
    config: GPTConfig

    @nn.compact
    def __call__(self, tokens, deterministic=None):
        embed = nn.Embed(self.config.vocab_size, 32, dtype=self.config.dtype)
        x = nn.Dense(32, dtype=self.config.dtype)(embed(tokens))
        return embed.attend(x)

    def init(self, key):
        return super().init(key, jnp.zeros((1, 4), jnp.int32), True)
"""


@pytest.fixture
def public_models(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import public_models

    yield public_models
    for name in ("public_models", "_public_models", "_public_training", "_public_tasks"):
        sys.modules.pop(name)


def test_a_row_compares_seeds(public_models):
    class Run:
        def __init__(self, loss):
            # The first steps do not count.
            self.losses, self.val_loss = np.array([9.0] * 10 + [loss] * public_models.LAST), loss
            self.seconds = 1.0

    bf16 = [Run(2.0), Run(3.0)]
    row = public_models.row("delayed", [Run(2.008), Run(3.0)], bf16)
    assert row["gap"] == [0.008, 0]
    assert row["mean_gap"] == 0.004
    assert row["meets_marks"]
    assert not public_models.row("delayed", [Run(2.008), Run(3.004)], bf16)["meets_marks"]
    assert not public_models.row("delayed", [Run(2.011), Run(2.989)], bf16)["meets_marks"]


@pytest.mark.slow
def test_a_model_from_a_folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    out = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, FOLDER / "public_models.py", f"gpt-jax={tmp_path}", "--steps", "2",
         "--json", out],
        check=True,
        env=os.environ | {"XLA_FLAGS": quick_flags()},
    )  # fmt: skip
    (model,) = json.loads(out.read_text())["models"]
    assert model["left_alone"] == {"Embed_0": "kept: lm_head"}
    assert model["fp8_share"] == round(32 / (32 + 256), 4)
    assert [row["recipe"] for row in model["rows"]] == [
        "unconverted", "unconverted, moved", "delayed", "current", "blockwise", "mxfp8"
    ]  # fmt: skip
