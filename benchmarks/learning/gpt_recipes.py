"""Does FP8 train like bf16? Validation losses of examples/train_gpt.py.

The script trains with every recipe, and with a control that must fail, for three seeds each.

    python benchmarks/learning/gpt_recipes.py --json benchmarks/learning/results/gpt_recipes.json

Delayed scaling has two marks for |FP8 - bf16|, in nats per byte. The mean over the seeds may be at
most 0.005. Each seed may be at most 0.01. The control casts gradients with the constant scale 1. It
must miss the marks, which shows that they detect a broken recipe.

Needs: the extra `examples`.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import jax

import jaxfp8 as fp8
from jaxfp8.quantizers import Delayed, Static

MEAN_MARK, SEED_MARK = 0.005, 0.01  # nats per byte
SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"


def unscaled_gradients() -> fp8.Recipe:
    """Delayed scaling with gradients at scale 1.

    Gradients that are too small for E5M2 become 0.
    """
    x, g = Delayed(format=fp8.E4M3), Static(format=fp8.E5M2, scale=1.0)
    operands = {"fprop": (x, x), "dgrad": (g, x), "wgrad": (x, g)}
    return fp8.Recipe(
        name="control",
        **{name: fp8.recipes.Operands(lhs=lhs, rhs=rhs) for name, (lhs, rhs) in operands.items()},
    )


RECIPES = {
    "bf16": None,
    "delayed": fp8.recipes.delayed(),
    "control: delayed, gradients at scale 1": unscaled_gradients(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, high_precision_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 32x32 weights": fp8.recipes.mxfp8(w_tile_dim=2),
}


def load_example():
    """Import examples/train_gpt.py, which imports other modules of its folder."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gaps_of(name: str, runs: list, baseline: list) -> dict[str, object]:
    """The validation losses of one recipe, seed by seed, and whether it meets the marks."""
    gaps = [run.val_loss - twin.val_loss for run, twin in zip(runs, baseline, strict=True)]
    mean = sum(gaps) / len(gaps)
    row = {"recipe": name, "val_loss": [round(run.val_loss, 4) for run in runs]}
    if name != "bf16":
        meets = abs(mean) <= MEAN_MARK and max(map(abs, gaps)) <= SEED_MARK
        row |= {
            "gap": [round(gap, 4) for gap in gaps],
            "mean_gap": round(mean, 4),
            "meets_marks": meets,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument(
        "--framework", choices=("linen", "nnx"), default="linen", help="(default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    example = load_example()
    text = example.load_text(None)
    rows, baseline = [], []
    # The seeds of a recipe run the same programs, so with a cache only the first seed compiles.
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        for name, recipe in RECIPES.items():
            runs = []
            for seed in range(given.seeds):
                model = example.FRAMEWORKS[given.framework](recipe, seed)
                runs.append(
                    example.train(f"{name}, seed {seed}", model, text, given.steps, seed, {})
                )
            baseline = baseline or runs
            rows.append(
                gaps_of(name, runs, baseline)
                | {
                    "seconds": [round(run.seconds, 1) for run in runs],
                    "compile_seconds": round(runs[0].compile_seconds, 1),
                }
            )
            print(json.dumps(rows[-1]), flush=True)

    versions = {
        package: importlib.metadata.version(package) for package in ("jax", "flax", "optax")
    }
    result = {
        "command": " ".join(["python benchmarks/learning/gpt_recipes.py", *sys.argv[1:]]),
        "steps": given.steps,
        "framework": given.framework,
        "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        "sha256": text.sha256,
        "marks": {"mean_gap": MEAN_MARK, "gap": SEED_MARK},
        "unit": "nats per byte",
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
