"""Bytes that a train step of Llama-3-70B's layers sends between 8, 64 and 512 H200, per recipe.

The programs are compiled, not run.

    python benchmarks/wire/llama_wire.py --json benchmarks/wire/results/llama_wire.json

The model is tests/deviceless/llama.py. Tests in that folder assert these figures.

Needs: the wheels of jax[cuda13], no GPU.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))

import llama
from program import Program

import jaxfp8 as fp8
from jaxfp8.programs import WireReport, wire_report

MESHES = {8: (2, 4), 64: (8, 8), 512: (64, 8)}  # fsdp x tensor
GIB = 2**30
# What the forward pass keeps for the backward pass: FP8 residuals, results of matmuls, or both.
KEPT = {
    "both": llama.KEEP_RESIDUALS,
    "residuals": fp8.save_fp8_residuals(),
    "products": llama.KEEP_PRODUCTS,
}


def by_dtype(report: WireReport) -> dict[str, int]:
    """Bytes that one device sends in a step, by dtype."""
    sums = collections.Counter()
    for transfer in report.transfers:
        sums[transfer.dtype] += round(transfer.wire_bytes)
    return dict(sums)


def figures(name: str, fsdp: int, tensor: int, layers: int, remat: str) -> dict[str, object]:
    """The figures of one compiled step."""
    start = time.perf_counter()
    step = llama.compile_step(llama.RECIPES[name], fsdp, tensor, layers, remat=KEPT[remat])
    seconds = time.perf_counter() - start
    report, program, memory = wire_report(step), Program(step.as_text()), step.memory_analysis()
    maxima = program.maxima(program.entry)  # in the steady state, where no scale is unset
    return {
        "gpus": fsdp * tensor,
        "recipe": name,
        "gathered_bytes": {
            kind: by_dtype(of) for kind, of in llama.gathers(report, fsdp, tensor).items()
        },
        "reduce_scatter_bytes": round(report.only(kind="reduce-scatter").wire_bytes),
        "wire_bytes": round(report.wire_bytes),
        "all_reduce_bytes": round(report.only(kind="all-reduce").wire_bytes),
        "max_all_reduces": sum(maximum.times for maximum in maxima),
        "max_all_reduce_instructions": len(maxima),
        "arguments_gib": round(memory.argument_size_in_bytes / GIB, 2),
        "temporary_gib": round(memory.temp_size_in_bytes / GIB, 2),
        "compile_seconds": round(seconds, 1),
    }


WEIGHTS, EVERYTHING = ("weights", "scales"), ("weights", "scales", "activations")


def gathered(row: dict, kinds: tuple[str, ...] = EVERYTHING) -> int:
    """Bytes of all-gathers. The scales of activations count as those of weights."""
    return sum(sum(row["gathered_bytes"][kind].values()) for kind in kinds)


def table(rows: list[dict]) -> str:
    """A Markdown table with a line for each recipe. Each cell has a figure for each mesh."""
    meshes = list(dict.fromkeys(row["gpus"] for row in rows))
    bf16 = {row["gpus"]: row for row in rows if row["recipe"] == "bf16"}
    columns = {
        "weights": lambda r: f"{gathered(r, WEIGHTS) / GIB:.1f}",
        "to bf16": lambda r: f"{gathered(r, WEIGHTS) / gathered(bf16[r['gpus']], WEIGHTS):.2f}",
        "all gathers": lambda r: f"{gathered(r) / GIB:.1f}",
        "all gathers to bf16": lambda r: f"{r['gathers_to_bf16']:.3f}",
        "scattered": lambda r: f"{r['reduce_scatter_bytes'] / GIB:.1f}",
        "total wire": lambda r: f"{r['wire_bytes'] / GIB:.1f}",
        "total to bf16": lambda r: f"{r['wire_bytes'] / bf16[r['gpus']]['wire_bytes']:.2f}",
        "all-reduced, MiB": lambda r: f"{r['all_reduce_bytes'] * 1024 / GIB:.2f}",
        "max all-reduces": lambda r: f"{r['max_all_reduces']}",
        "arguments": lambda r: f"{r['arguments_gib']:.1f}",
        "temporaries": lambda r: f"{r['temporary_gib']:.1f}",
    }
    lines = [["recipe", *columns], ["---"] * (1 + len(columns))]
    for name in dict.fromkeys(row["recipe"] for row in rows):
        of = {row["gpus"]: row for row in rows if row["recipe"] == name}
        cells = [[cell(of[gpus]) for gpus in meshes] for cell in columns.values()]
        lines.append(
            [name, *(same[0] if len(set(same)) == 1 else " / ".join(same) for same in cells)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        choices=MESHES,
        default=list(MESHES),
        help="(default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, default=llama.LAYERS, help="(default: %(default)s)")
    parser.add_argument(
        "--remat", choices=KEPT, default="both", help="what it keeps (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    rows, bf16 = [], {}
    for gpus in given.gpus:
        for name in llama.RECIPES:
            row = figures(name, *MESHES[gpus], given.layers, given.remat)
            bf16 = row if name == "bf16" else bf16  # the first of llama.RECIPES
            rows.append(row | {"gathers_to_bf16": round(gathered(row) / gathered(bf16), 4)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))

    packages = ("jax", "jaxlib", "jax-cuda13-plugin")
    result = {
        "command": " ".join(["python benchmarks/wire/llama_wire.py", *sys.argv[1:]]),
        "chip": "h200",
        "meshes": {
            gpus: dict(zip(("fsdp", "tensor"), MESHES[gpus], strict=True)) for gpus in given.gpus
        },
        "layers": given.layers,
        "remat": given.remat,
        "tokens_per_fsdp_shard": llama.TOKENS,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "unit": "bytes that one device sends in a step",
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
