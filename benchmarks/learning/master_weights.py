r"""Do shorter master weights train like float32? Validation losses of examples/train_gpt.py.

The weights are bfloat16. The layers are those of a recipe, by default delayed scaling.

    python benchmarks/learning/master_weights.py \
        --json benchmarks/learning/results/master_weights.json

All runs of a seed start from the same bfloat16 weights and see the same batches. They differ in the
master weights that the optimizer holds. The control has none. It must miss the marks, which shows
that they detect lost updates. The marks for |loss - loss with Float32()|, in nats per byte, are
0.005 for the mean over the seeds, and 0.01 for each seed.

Needs: the extra `examples`.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import optax
from gpt_recipes import MEAN_MARK, SEED_MARK, load_example

import jaxfp8 as fp8
from jaxfp8.optim import (
    BFloat16Plus,
    Float16,
    Float32,
    init_master_weights,
    with_master_weights,
)

MASTERS: dict[str, Any] = {
    "Float32()": Float32(),
    "BFloat16Plus(bits=16)": BFloat16Plus(bits=16),
    "BFloat16Plus(bits=8)": BFloat16Plus(bits=8),
    "Float16()": Float16(),
    "control: no master weights": None,
}


def settings_with(example: Any, master: Any) -> Any:
    """The settings of the example, whose optimizer holds master weights."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(example.Settings):
        def optimizer(self, params: Any, steps: int) -> optax.GradientTransformation:
            tx = super().optimizer(params, steps)
            return with_master_weights(tx, master=master) if master else tx

    return Settings()


def run_of(example: Any, name: str, recipe: Any, text: Any, steps: int, seed: int) -> Any:
    """One training run: the figures of `examples/gpt_training.py`."""
    model = example.FRAMEWORKS["linen"](recipe, seed)
    # Every run starts from the same weights, so the masters start at bfloat16 values.
    tx = with_master_weights(optax.sgd(0.0), master=Float32())
    weights, _ = init_master_weights(tx, model.params)
    settings = settings_with(example, MASTERS[name])
    model = model._replace(params=weights)
    return example.train(f"{name}, {seed}", model, text, steps, seed, {}, settings=settings)


def summary(name: str, runs: list, baseline: list) -> dict[str, object]:
    """The figures of one kind of master weights, seed by seed."""
    gaps = [run.val_loss - twin.val_loss for run, twin in zip(runs, baseline, strict=True)]
    mean = sum(gaps) / len(gaps)
    row: dict[str, object] = {"master": name, "val_loss": [round(run.val_loss, 4) for run in runs]}
    if runs is not baseline:
        row |= {
            "gap": [round(gap, 4) for gap in gaps],
            "mean_gap": round(mean, 4),
            "meets_marks": abs(mean) <= MEAN_MARK and max(map(abs, gaps)) <= SEED_MARK,
        }
    return row | {"seconds": [round(run.seconds, 1) for run in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--recipe", default="delayed", help="(default: %(default)s)")
    parser.add_argument(
        "--masters", nargs="+", choices=MASTERS, help="beside Float32() (default: all)"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    example, recipe = load_example(), fp8.recipes.get(given.recipe)
    text = example.load_text(None)
    rows: list[dict[str, object]] = []
    baseline: list = []
    others = [name for name in MASTERS if name in (given.masters or MASTERS)]
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        for name in dict.fromkeys(["Float32()", *others]):
            runs = [
                run_of(example, name, recipe, text, given.steps, seed)
                for seed in range(given.seeds)
            ]
            baseline = baseline or runs
            rows.append(summary(name, runs, baseline))
            print(json.dumps(rows[-1]), flush=True)

    packages = ("jax", "flax", "optax")
    result = {
        "command": " ".join(["python benchmarks/learning/master_weights.py", *sys.argv[1:]]),
        "steps": given.steps,
        "recipe": given.recipe,
        "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "sha256": text.sha256,
        "marks": {"mean_gap": MEAN_MARK, "gap": SEED_MARK},
        "unit": "nats per byte",
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
