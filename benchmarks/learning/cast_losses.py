"""How many values do the casts of a healthy run lose, and from which share on does the loss suffer?

Trains the GPT of examples/train_gpt.py, and watches the casts of one step in 25 by
`fp8.diagnostics.collect`.

    python benchmarks/learning/cast_losses.py --json benchmarks/learning/results/cast_losses.json

The first rows are the recipes. In the others, delayed scaling stores x, w or g in another size. If
it is smaller, more values become 0, and if it is larger, more values saturate. `gap` is the
validation loss above that of bf16, in nats per byte.

Needs: the extra `examples`.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpt_recipes import load_example

import jaxfp8 as fp8
from jaxfp8.quantizers import Delayed

EVERY = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Delayed):
    """Delayed scaling whose stored values are 2^power as large."""

    power: int = 0

    def multiplier(self, amax: jax.Array) -> jax.Array:
        return super().multiplier(amax) * 2.0**self.power


def sized(tensor: str, power: int) -> fp8.Recipe:
    """Delayed scaling that stores one tensor 2^power as large."""
    x, w, g = (
        Sized(format=fp8.E5M2 if name == "g" else fp8.E4M3, power=power * (name == tensor))
        for name in "xwg"
    )
    operands = {"fprop": (x, w), "dgrad": (g, w), "wgrad": (x, g)}
    return fp8.Recipe(
        name=f"{tensor} 2^{power}",
        **{name: fp8.recipes.Operands(lhs=lhs, rhs=rhs) for name, (lhs, rhs) in operands.items()},
    )


POWERS = {"x": (-12, -14, 1), "w": (-14, 1), "g": (-19, -22, -25, 1, 2)}
RECIPES = {
    "bf16": None,
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    **{
        f"delayed, {tensor} 2^{power}": sized(tensor, power)
        for tensor, powers in POWERS.items()
        for power in powers
    },
}


class Run(NamedTuple):
    val_loss: float
    rows: list[Any]  # fp8.diagnostics.CastRow of all watched steps


def train(example: Any, recipe: fp8.Recipe | None, text: Any, steps: int, seed: int) -> Run:
    """The run of examples/gpt_training.py, with casts of some steps watched."""
    model = example.FRAMEWORKS["linen"](recipe, seed)
    tx = example.Settings().optimizer(model.params, steps)

    def loss_fn(params, state, windows):
        tokens = windows.astype(jnp.int32)
        logits = model.apply(params, state, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(params, state, opt, windows):
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, windows)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), state, opt, loss

    params, state, opt = model.params, model.state, tx.init(model.params)
    places = np.random.default_rng(seed).integers(
        0, len(text.train) - text.context, (steps, example.BATCH, 1)
    )
    rows = []
    for i, place in enumerate(places):
        windows = text.train[place + np.arange(text.context + 1)]
        if recipe is not None and i % EVERY == EVERY - 1:
            with fp8.diagnostics.collect() as records:
                params, state, opt, _ = step(params, state, opt, windows)
            rows += fp8.diagnostics.summary(records).rows
        else:
            params, state, opt, _ = step(params, state, opt, windows)
    evaluate = jax.jit(lambda *of: jax.lax.map(functools.partial(loss_fn, *of[:2]), of[2]).mean())
    batches = text.validation.reshape(-1, example.BATCH, text.context + 1)
    return Run(float(evaluate(params, state, batches)), rows)


def shares(rows: list[Any]) -> dict[str, dict[str, list[float]]]:
    """Median and maximum over layers, steps and copies, in percent, for each tensor."""
    figures = {}
    for tensor in "xwg":
        of = [row for row in rows if row.tensor == tensor]
        figures[tensor] = {
            field: [
                float(f"{100 * figure([getattr(row, field) for row in of]):.3g}")
                for figure in (np.median, max)
            ]
            for field in ("underflowed", "saturated")
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    example = load_example()
    text = example.load_text(None)
    rows, baseline = [], []
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        for name in given.only:
            runs = [
                train(example, RECIPES[name], text, given.steps, seed)
                for seed in range(given.seeds)
            ]
            baseline = baseline or runs
            row = {"recipe": name, "val_loss": [round(run.val_loss, 4) for run in runs]}
            if name != "bf16":
                gaps = [a.val_loss - b.val_loss for a, b in zip(runs, baseline, strict=True)]
                seen = [row for run in runs for row in run.rows]
                row |= {"gap": [round(gap, 4) for gap in gaps], "percent": shares(seen)}
            rows.append(row)
            print(json.dumps(row), flush=True)

    result = {
        "command": " ".join(["python benchmarks/learning/cast_losses.py", *sys.argv[1:]]),
        "steps": given.steps,
        "watched": f"one step in {EVERY}",
        "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
        "sha256": text.sha256,
        "unit": "percent: [median, maximum] over layers, steps and copies; gap in nats per byte",
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
