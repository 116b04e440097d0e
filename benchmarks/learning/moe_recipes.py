"""Does FP8 train experts like bf16? Validation losses of examples/train_moe.py.

The script trains with each recipe on a mesh of eight CPU devices, for three seeds each. Weights and
batches are those of the bf16 twin.

    python benchmarks/learning/moe_recipes.py --json benchmarks/learning/results/moe_recipes.json

The marks are those of gpt_recipes.py: at most 0.005 nats per byte for the mean over the seeds, and
0.01 for each seed. The first control is bf16 on one device. It adds in another order, so its
difference is chance. It should meet the marks.

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
import time
from pathlib import Path

import jax
from gpt_recipes import MEAN_MARK, SEED_MARK, gaps_of

import jaxfp8 as fp8

EXAMPLES = Path(__file__).parents[2] / "examples"
CONTROL = "control: bf16, one device"
RECIPES = {
    "bf16": fp8.recipes.identity(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    CONTROL: fp8.recipes.identity(),
    "delayed": fp8.recipes.delayed(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="(default: %(default)s)")
    add("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    add("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    sys.path.insert(0, str(EXAMPLES))
    import train_moe as example

    example.force_cpu_devices(8)
    result = {
        "command": " ".join(["python benchmarks/learning/moe_recipes.py", *sys.argv[1:]]),
        "steps": given.steps,
        "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {
            package: importlib.metadata.version(package) for package in ("jax", "flax", "optax")
        },
        "marks": {"mean_gap": MEAN_MARK, "gap": SEED_MARK},
        "unit": "nats per byte",
        "rows": [],
    }
    baseline = []
    # The seeds of a recipe run the same programs, so with a cache only the first seed compiles.
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        for name in RECIPES:
            runs, seconds = [], []
            for seed in range(given.seeds):
                words = ["--steps", str(given.steps), "--seed", str(seed)]
                options, mesh, model, text = example.parse(words)
                result |= {"mesh": dict(mesh.shape), "sha256": text.sha256}
                devices = example.one_device(example.AXES) if name == CONTROL else mesh
                start = time.perf_counter()
                twin = dataclasses.replace(model, recipe=RECIPES[name])
                runs.append(example.train(devices, twin, text, options))
                seconds.append(round(time.perf_counter() - start, 1))
                print(f"{name}, seed {seed}: {runs[-1].val_loss:.4f}, {seconds[-1]} s", flush=True)
            baseline = baseline or runs
            row = gaps_of(name, runs, baseline) | {"seconds": seconds}
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            if given.json:  # after each recipe, so that a run that is stopped leaves its figures
                given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
