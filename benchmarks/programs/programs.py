"""What the compiled program of a train step costs, for each recipe beside bf16.

CPU seconds to trace, lower and compile it, instructions, kernels and bytes. Nothing runs.

    python benchmarks/programs/programs.py --blocks 4 12 48 --json result.json
    python benchmarks/programs/programs.py --target h200 --blocks 12 --json result.json
    python benchmarks/programs/programs.py --model blocks --json result.json
    python benchmarks/programs/programs.py --model llama --json result.json
    python benchmarks/programs/programs.py --model llama --keep residuals --json result.json
    python benchmarks/programs/programs.py --model llama --manual --json result.json

Each measurement has a process of its own. In each round every recipe is measured once, so that
other work of the machine slows all of them alike. `_steps.py` has the steps.

`mlp` are blocks of two dense layers, `blocks` four unrolled blocks of Llama 3 8B with attention,
and `llama` a Llama of 80 layers for 8 GPUs. The name of a recipe may end in "+kernels":
`blocks` then gets `kernels=fp8.Kernels("h200")`.

Needs: the wheels of jax[cuda13] for h200, blocks and llama, no GPU.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

# The states of "delayed" are settled, as in all steps but the first ones. Those of "unsettled" are
# not.
RECIPES = ("bf16", "delayed", "unsettled", "current", "rowwise", "blockwise", "mxfp8")
WITH_KERNELS = tuple(f"{name}+kernels" for name in RECIPES if name != "bf16")
BASELINE = "bf16"
STACKS = ("unrolled", "scanned")
SECONDS = ("trace_seconds", "lower_seconds", "compile_seconds", "total_seconds")
COUNTS = ("instructions", "kernels", "small", "temporary_bytes", "bytes")
# Of GPUs: kernels that write less than 64 KiB, and how many fusions differ (`fusions.py`).
DETAILS = ("small_kernels", "fusions", "different", "different_but_for_constants")
# Counts and seconds depend on how many blocks there are, not on their sizes. Bytes depend on sizes,
# and so does what XLA fuses for a GPU.
SIDE = {"cpu": 256, "h200": 4096}
DEFAULT_BLOCKS = {"mlp": [4, 12, 48], "blocks": [4], "llama": [80]}
DEFAULT_STACKS = {"mlp": [*STACKS], "blocks": ["unrolled"], "llama": ["scanned"]}
# What the forward pass of Llama keeps for the backward pass: results of matmuls, or FP8 residuals
# as well.
KEEP = ("products", "residuals")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin")


def in_a_process(recipe: str, sizes: list[Any]) -> dict[str, Any]:
    """One measurement in a fresh process, with XLA's defaults and without a cache of programs."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    }
    command = [sys.executable, __file__, "--measure", json.dumps([recipe, sizes])]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{recipe}, {sizes} failed:\n{finished.stderr}")
    return json.loads(finished.stdout.splitlines()[-1])


def row_of(recipe: str, blocks: int, stack: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, least and most seconds of the runs, and their counts."""
    row: dict[str, Any] = {"blocks": blocks, "stack": stack, "recipe": recipe}
    for name in SECONDS:
        seconds = [run[name] for run in runs]
        figures = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
        row[name] = {figure: round(value, 3) for figure, value in figures.items()}
    for name in COUNTS:
        found = sorted({run[name] for run in runs if run[name] is not None})
        if len(found) > 1:
            raise RuntimeError(f"programs of {recipe} are not the same: {name} of {found}")
        row[name] = found[0] if found else None
    return row | {name: runs[0][name] for name in DETAILS if name in runs[0]}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the figures of bf16, and of each recipe the ratio to bf16."""
    names = [name.removesuffix("_seconds") for name in (*SECONDS, *COUNTS)]
    lines = [["blocks", "recipe", *names, "total, s"], ["---"] * (len(names) + 3)]
    for row in rows:
        at = ("blocks", "stack")
        (base,) = (
            r for r in rows if r["recipe"] == BASELINE and all(r[key] == row[key] for key in at)
        )
        spread = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["total_seconds"])
        cells = [cell(row, base, name) for name in (*SECONDS, *COUNTS)]
        lines.append([f"{row['blocks']}, {row['stack']}", row["recipe"], *cells, spread])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: dict[str, Any], base: dict[str, Any], name: str) -> str:
    value, of_base = (
        each[name]["median"] if name in SECONDS else each[name] for each in (row, base)
    )
    if value is None:
        return "-"
    if row is not base and name != "small":
        return f"{value / of_base:.2f}" if of_base else "-"
    if name.endswith("bytes"):
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.2f} s" if name in SECONDS else f"{value}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument(
        "--model", choices=("mlp", "blocks", "llama"), default="mlp", help="(default: mlp)"
    )
    parser.add_argument(
        "--target", choices=SIDE, help="(default: cpu; blocks and llama: h200, nothing else)"
    )
    parser.add_argument(
        "--blocks", type=int, nargs="+", help="(default: 4 12 48; blocks: 4; llama: 80 layers)"
    )
    parser.add_argument(
        "--stacks",
        nargs="+",
        choices=STACKS,
        help="(default: both; blocks are unrolled, llama is scanned)",
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES + WITH_KERNELS, default=list(RECIPES)
    )
    parser.add_argument("--features", type=int, help="of mlp (default: 256; h200: 4096)")
    parser.add_argument("--tokens", type=int, help="of mlp (default: 256; h200: 4096)")
    parser.add_argument("--keep", choices=KEEP, default=KEEP[0], help="of llama (%(default)s)")
    parser.add_argument("--manual", action="store_true", help="llama inside of jax.shard_map")
    parser.add_argument(
        "--option", nargs="+", default=[], metavar="NAME=VALUE",
        help="more options of the compiler, for all recipes",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()

    llama, own = given.model == "llama", given.model != "mlp"
    if own and given.target == "cpu":
        parser.error(f"--model {given.model} compiles for --target h200 only")
    if own and (given.stacks or given.features or given.tokens):
        parser.error(f"--model {given.model} has its own --stacks, --features and --tokens")
    if given.model != "blocks" and {*given.recipes} & {*WITH_KERNELS}:
        parser.error("recipes with +kernels need --model blocks")
    if given.manual and not llama:
        parser.error("--manual needs --model llama")
    if given.repeats < 1 or BASELINE not in given.recipes:
        parser.error("needs --repeats of at least 1, and bf16 among --recipes")
    given.target = given.target or ("h200" if own else "cpu")
    given.blocks = given.blocks or DEFAULT_BLOCKS[given.model]
    given.stacks = given.stacks or DEFAULT_STACKS[given.model]
    given.features = given.features or SIDE[given.target]
    given.tokens = given.tokens or SIDE[given.target]
    return given


def main() -> None:
    given = parse()
    if given.measure:
        import _steps as steps

        recipe, sizes = json.loads(given.measure)
        print(json.dumps(steps.measure(recipe, steps.Sizes(*sizes))))
        return

    rows = []
    for blocks in given.blocks:
        for stack in given.stacks:
            sizes = [given.model, given.target, blocks, stack == "scanned"]
            sizes += [given.features, given.tokens, given.keep, given.manual, given.option]
            rounds = [
                {recipe: in_a_process(recipe, sizes) for recipe in given.recipes}
                for _ in range(given.repeats)
            ]
            for recipe in given.recipes:
                rows.append(row_of(recipe, blocks, stack, [of[recipe] for of in rounds]))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(about(given) | {"rows": rows}, indent=1) + "\n")


def about(given: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    names = ["model", "target", "blocks", "recipes", "repeats"]
    names += {"mlp": ["stacks", "features", "tokens"], "blocks": [], "llama": ["keep"]}[given.model]
    settings = {name: getattr(given, name) for name in names}
    settings |= {"option": given.option} if given.option else {}
    words = (
        f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in settings.items()
    )
    return {
        "command": " ".join(
            [
                "python benchmarks/programs/programs.py",
                *words,
                *(["--manual"] if given.manual else []),
            ]
        ),
        **settings,
        **about_this_machine(),
        "unit": "CPU seconds of all threads; kernels and bytes of one step",
    }


def about_this_machine() -> dict[str, Any]:
    packages = [name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))]
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


if __name__ == "__main__":
    main()
