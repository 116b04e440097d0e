"""Do models that others wrote train in FP8 as they do unconverted, after `fp8.convert`?

Each model is converted with every recipe, and trained beside the unconverted one: the same
parameters, the same batches, AdamW. `_public_tasks.py` has what they learn.

    python benchmarks/learning/public_models.py gpt-jax=PATH --seeds 3 --json FILE

PATH is the folder of the model's source. benchmarks/README.md says where each comes from. The
figure is the mean training loss of the last 50 steps, FP8 minus unconverted. Its mean over the
seeds may be at most 0.005, and each seed at most 0.01. Models that FILE already has stay in it,
also the same model with another learning rate.

A control shows how much of a difference is chance: the unconverted model with initial parameters
that are moved by less than the rounding of bfloat16.

`--chip h200` trains with the kernels of that GPU, on it. Each row has the number of matmuls of the
step that are in FP8 there.

Needs: the extra `examples`, the source of the models and what it imports; scikit-learn for images.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import jax

import jaxfp8 as fp8

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from _public_models import MODELS, load
from _public_training import compiled, converted, moved, train
from gpt_text import load_text
from gpt_training import Settings

MEAN_MARK, SEED_MARK = 0.005, 0.01  # as in gpt_recipes.py
LAST = 50  # steps whose losses are averaged
TWIN, MOVED = "unconverted", "unconverted, moved"
RECIPES = {
    TWIN: None,
    MOVED: None,
    **{name: fp8.recipes.get(name) for name in ("delayed", "current", "blockwise", "mxfp8")},
}


def row(name: str, runs: list, baseline: list) -> dict[str, object]:
    """The figures of one recipe, seed by seed."""
    last = [float(run.losses[-LAST:].mean()) for run in runs]
    row = {
        "recipe": name,
        "loss": [round(loss, 4) for loss in last],
        "val_loss": [round(run.val_loss, 4) for run in runs],
        "seconds": [round(run.seconds, 1) for run in runs],
    }
    if name == TWIN:
        return row
    gaps = [
        loss - float(twin.losses[-LAST:].mean()) for loss, twin in zip(last, baseline, strict=True)
    ]
    val_gaps = [run.val_loss - twin.val_loss for run, twin in zip(runs, baseline, strict=True)]
    mean = sum(gaps) / len(gaps)
    meets = max(map(abs, gaps)) <= SEED_MARK and (len(gaps) == 1 or abs(mean) <= MEAN_MARK)
    return row | {
        "gap": [round(gap, 4) for gap in gaps],
        "mean_gap": round(mean, 4),
        "val_gap": [round(gap, 4) for gap in val_gaps],
        "meets_marks": meets,
    }


def measure(
    name: str, path: str, given: argparse.Namespace, settings: Settings
) -> dict[str, object]:
    """Coverage and losses of one model."""
    public, rows, baseline, coverage = load(name, path), [], [], None
    kernels = fp8.Kernels(given.chip)
    for recipe_name in (TWIN, *[recipe for recipe in given.recipes if recipe != TWIN]):
        recipe, runs, programs = RECIPES[recipe_name], [], None
        for seed in range(given.seeds):
            model = converted(public, recipe, seed, kernels)
            if recipe_name == MOVED:
                model = model._replace(params=moved(model.params))
            if not programs:
                tx = settings.optimizer(model.params, given.steps)
                options = kernels.compiler_options(recipe) if recipe else {}
                programs = compiled(public, model, tx, options)
            runs.append(train(public, model, programs, tx, given.steps, seed))
        if model.coverage and not coverage:
            coverage = model.coverage
            print(coverage.table(all=given.all), flush=True)
        baseline = baseline or runs
        rows.append(row(recipe_name, runs, baseline) | {"fp8_matmuls": programs.fp8_matmuls})
        print(name, json.dumps(rows[-1]), flush=True)
    result = {
        "model": name,
        "learning_rate": settings.learning_rate,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
    }
    if coverage:
        result |= {
            "fp8_share": round(coverage.share, 4),
            "fp8_layers": sum(bool(r.recipe) for r in coverage.rows),
            "left_alone": {r.path: r.reason for r in coverage.rows if not r.recipe},
            "share_without_kernel": round(coverage.other_flops / coverage.flops, 4),
        }
    return result | {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(MODELS)
    parser.add_argument("models", nargs="+", metavar="MODEL=PATH", help=f"of {names}")
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=Settings().learning_rate,
        help="the largest one (default: %(default)s)",
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="RECIPE")
    parser.add_argument("--chip", default="cpu", help="of this machine (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="a line of the table for each layer")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    measured = {(one["model"], one["learning_rate"]): one for one in known.get("models", [])}
    settings = Settings(learning_rate=given.learning_rate)
    for model in given.models:
        name, _, path = model.partition("=")
        if name not in MODELS:
            parser.error(f"{model!r} is not of the form MODEL=PATH with a model of {names}")
        measured[name, given.learning_rate] = measure(name, path, given, settings)
        if given.json:
            result = {
                "command": "python benchmarks/learning/public_models.py MODEL=PATH --json FILE",
                "steps": given.steps,
                "last": LAST,
                "hardware": f"{platform.machine()} {jax.devices()[0].device_kind}, "
                f"{os.cpu_count()} cores",
                "python": platform.python_version(),
                "versions": {
                    package: importlib.metadata.version(package)
                    for package in ("jax", "flax", "optax")
                },
                "sha256": load_text(None).sha256,
                "marks": {"mean_gap": MEAN_MARK, "gap": SEED_MARK},
                "unit": "nats per byte, class or character; dit: squared error",
                "models": list(measured.values()),
            }
            given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
