"""Memory of a train step in FP8, beside the best bfloat16 step that saves the same.

The programs are compiled for H200s, not run.

    python benchmarks/programs/step_memory.py --json benchmarks/programs/results/step_memory.json

It prints Markdown tables. Each policy says what the forward pass saves for the backward pass:

- none: nothing, and of FP8 the amaxes of tensors and rows.
- products: the results of matmuls; FP8 casts x and w again.
- inputs: the inputs of matmuls, as FP8 copies or in bfloat16.
- no remat: no `jax.checkpoint`.

The models are tests/deviceless/llama.py and transformer.py. Tests in that folder assert the ratios.
A row that the file of `--json` has already is not compiled again.

Needs: the wheels of jax[cuda13], no GPU and no driver.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from pathlib import Path

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))

from memory_policies import (
    GIB,
    MODELS,
    POLICIES,
    STORED,
    baseline,
    check_gathers,
    gathered,
)

KEY = ("model", "gpus", "policy", "recipe")


def figures(model: str, gpus: int, policy: str, name: str) -> dict[str, object]:
    """The figures of one compiled step. Raises AssertionError if a gather is not in FP8."""
    start = time.perf_counter()
    step = MODELS[model].compile(name, gpus, policy)
    seconds = time.perf_counter() - start
    memory, sent = step.memory_analysis(), gathered(model, step, gpus)
    check_gathers(model, name, gpus, sent)
    return {
        **dict(zip(KEY, (model, gpus, policy, name), strict=True)),
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "gathered_bytes": sent,
        "compile_seconds": round(seconds, 1),
    }


def table(rows: list[dict], model: str, *, ratios: bool) -> str:
    """Temporaries in GiB, or their ratios to bf16's, with one line for each recipe.

    Each cell has a figure for each number of GPUs.
    """
    rows = [row for row in rows if row["model"] == model]
    found = {tuple(row[key] for key in KEY[1:]): row["temporary_bytes"] for row in rows}
    policies = [each for each in POLICIES if any(row["policy"] == each for row in rows)]
    lines = [["recipe", *policies], ["---"] * (1 + len(policies))]
    for name in MODELS[model].rows:
        cells = []
        for policy in policies:
            keys = [(gpus, policy) for gpus in MODELS[model].gpus]
            own = [(found.get((*key, name)), found.get((*key, baseline(name)))) for key in keys]
            cells.append(
                " / ".join(
                    f"{x / (of if ratios else GIB):.2f}" if x and of else "–" for x, of in own
                )
            )
        if any(set(cell) - set("– /") for cell in cells) and not (
            ratios and name == baseline(name)
        ):
            lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", type=int, nargs="+", help="(default: all of a model)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rows", nargs="+", help="(default: all of a model)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    rows = []
    if given.json and given.json.exists():
        rows = json.loads(given.json.read_text())["rows"]
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "optax")
    result = {
        "command": " ".join(["python benchmarks/programs/step_memory.py", *sys.argv[1:]]),
        "chip": "h200",
        "layers": {model: MODELS[model].layers for model in MODELS},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "unit": "bytes on one device; gathered: bytes that one device sends in a step",
        "rows": rows,
    }
    for model in given.models:
        own = MODELS[model]
        cells = itertools.product(given.gpus or own.gpus, given.policies, given.rows or own.rows)
        for cell in cells:
            if any(tuple(row[key] for key in KEY) == (model, *cell) for row in rows):
                continue
            if cell[-1] == STORED and model == "transformer" and cell[0] == 1:
                continue  # nothing is gathered, so nothing is copied for a gather
            rows.append(figures(model, *cell))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    for model in given.models:
        gpus = " / ".join(map(str, MODELS[model].gpus))
        for ratios, unit in ((False, "GiB"), (True, "ratio to bf16")):
            print(f"{model}, {gpus} GPUs, {unit}:\n\n{table(rows, model, ratios=ratios)}\n")


if __name__ == "__main__":
    main()
