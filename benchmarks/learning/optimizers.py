"""Do optimizers with short moments train like float32 AdamW? Validation losses and bytes.

The model is the GPT of examples/train_gpt.py with the layers of a recipe, by default delayed
scaling, and float32 parameters.

    python benchmarks/learning/optimizers.py --json benchmarks/learning/results/optimizers.json

All runs of a seed start from the same weights and see the same batches. Each optimizer is compared
with the float32 optimizer of optax of its family. The marks for the difference of losses, in nats
per byte, are 0.005 for the mean over the seeds, and 0.01 for each seed.

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
import optax.contrib
from gpt_recipes import MEAN_MARK, SEED_MARK, load_example

import jaxfp8 as fp8
from jaxfp8.optim import (
    FP8,
    BFloat16,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    Int8,
    init_master_weights,
    with_master_weights,
    with_moment_formats,
)

# Moments and master weights of each optimizer; None keeps what optax stores.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "float32 AdamW": ("adamw", {}, None),
    "FP8-LM": ("adamw", {"mu": FP8(), "nu": Float16()}, Float16()),
    "COAT": ("adamw", {"mu": ExpandedFP8(), "nu": ExpandedFP8()}, None),
    "Int8": ("adamw", {"mu": Int8(), "nu": Int8()}, None),
    "Int8, BFloat16Plus(bits=8)": ("adamw", {"mu": Int8(), "nu": Int8()}, BFloat16Plus(bits=8)),
    "BFloat16": ("adamw", {"mu": BFloat16(), "nu": BFloat16()}, None),
    "float32 Muon": ("muon", {}, None),
    "8-bit Muon": ("muon", {"mu": Int8(companding=False), "nu": Int8()}, None),
}


def with_formats(tx: Any, formats: dict[str, Any]) -> Any:
    """An optimizer of optax with stored moments. Small arrays are stored, too."""
    small = {
        field: dataclasses.replace(format, min_size=0) if hasattr(format, "force") else format
        for field, format in formats.items()
    }
    return with_moment_formats(tx, small) if small else tx


def settings_with(example: Any, name: str) -> Any:
    """The settings of the example with an optimizer of the table."""
    family, formats, master = OPTIMIZERS[name]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(example.Settings):
        def optimizer(self, params: Any, steps: int) -> optax.GradientTransformation:
            if family == "adamw":
                tx = super().optimizer(params, steps)
            else:
                tx = optax.contrib.muon(0.01, adam_learning_rate=3e-3)
            tx = with_formats(tx, formats)
            return with_master_weights(tx, master=master) if master else tx

    return Settings()


def run_of(example: Any, name: str, recipe: Any, text: Any, steps: int, seed: int) -> Any:
    """One training run: the figures of `examples/gpt_training.py`."""
    model = example.FRAMEWORKS["linen"](recipe, seed)
    if master := OPTIMIZERS[name][2]:
        tx = with_master_weights(optax.sgd(0.0), master=master)
        model = model._replace(params=init_master_weights(tx, model.params)[0])
    settings = settings_with(example, name)
    return example.train(f"{name}, {seed}", model, text, steps, seed, {}, settings=settings)


def bytes_a_parameter(name: str) -> float:
    """Bytes of optimizer state, and of the weight, for each value of a [1024, 1024] weight."""
    family, formats, master = OPTIMIZERS[name]
    tx = optax.adamw(1e-3) if family == "adamw" else optax.contrib.muon(1e-3)
    tx = with_formats(tx, formats)
    weight = jax.ShapeDtypeStruct((1024, 1024), "bfloat16" if master else "float32")
    tx = with_master_weights(tx, master=master) if master else tx
    arrays = jax.tree.leaves(({"w": weight}, jax.eval_shape(tx.init, {"w": weight})))
    return round(sum(x.size * x.dtype.itemsize for x in arrays) / 2**20, 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--recipe", default="delayed", help="(default: %(default)s)")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, help="(default: all)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    example, recipe = load_example(), fp8.recipes.get(given.recipe)
    text = example.load_text(None)
    rows: list[dict[str, object]] = []
    baselines: dict[str, list[float]] = {}
    names = [name for name in OPTIMIZERS if name in (given.optimizers or OPTIMIZERS)]
    needed = [f"float32 {'Muon' if 'Muon' in name else 'AdamW'}" for name in names]
    result = {
        "command": " ".join(["python benchmarks/learning/optimizers.py", *sys.argv[1:]]),
        "steps": given.steps,
        "recipe": given.recipe,
        "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
        "sha256": text.sha256,
        "marks": {"mean_gap": MEAN_MARK, "gap": SEED_MARK},
        "unit": "nats per byte; bytes a parameter: weight and optimizer state",
        "rows": rows,
    }
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        for name in sorted({*names, *needed}, key=list(OPTIMIZERS).index):
            runs = [
                run_of(example, name, recipe, text, given.steps, seed)
                for seed in range(given.seeds)
            ]
            losses = [run.val_loss for run in runs]
            family = OPTIMIZERS[name][0]
            baseline = baselines.setdefault(family, losses)
            gaps = [mine - theirs for mine, theirs in zip(losses, baseline, strict=True)]
            mean = sum(gaps) / len(gaps)
            rows.append({
                "optimizer": name,
                "bytes_a_parameter": bytes_a_parameter(name),
                "val_loss": [round(loss, 4) for loss in losses],
                "gap": [round(gap, 4) for gap in gaps],
                "mean_gap": round(mean, 4),
                "meets_marks": abs(mean) <= MEAN_MARK and max(map(abs, gaps)) <= SEED_MARK,
                "seconds": [round(run.seconds, 1) for run in runs],
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
