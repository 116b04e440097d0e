"""Bytes that a layer of experts sends between 8 and 64 H200, its casts, and its memory.

The programs are compiled, not run.

    python benchmarks/wire/moe_wire.py --json benchmarks/wire/results/moe_wire.json

The script compiles `fp8.moe.swiglu_experts` forward alone, and with its backward pass. The layer is
tests/deviceless/moe_layer.py. Tests in that folder assert these figures. A row that the JSON file
has already is not compiled again.

Needs: the wheels of jax[cuda13], no GPU.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))

import moe_layer
from moe_layer import BY_XLA, KERNELS, Layer
from program import Program
from work import host_transfers

import jaxfp8 as fp8
from jaxfp8.programs import wire_report
from jaxfp8.programs._fp8_gemms import _find_gemms

MIB = 2**20
LAYERS = {
    "8": Layer(),
    "64": Layer(expert=64, experts=256),
    "8 x 8": Layer(expert=8, data=8),
}
BY = {"pallas": KERNELS, "xla": BY_XLA}
RECIPES = ("blockwise", "mxfp8", "delayed")
# The recipe, what multiplies and casts, and whether the gradient of the result is sent in FP8.
BF16 = [("identity", "xla", False)]
IN_PALLAS = [(name, "pallas", gradient) for gradient in (False, True) for name in RECIPES]
IN_XLA = [(name, "xla", False) for name in RECIPES]
MESHES = {
    "8": BF16 + IN_PALLAS + IN_XLA,
    "64": BF16 + IN_PALLAS[:3],
    "8 x 8": BF16 + IN_PALLAS[:1],
}


def figures(mesh: str, name: str, by: str, gradient: bool) -> dict[str, object]:
    """The figures of one layer."""
    layer, recipe = LAYERS[mesh], fp8.recipes.get(name)
    step = moe_layer.compiled(recipe, layer, kernels=BY[by], gradient_sent_in_fp8=gradient)
    found, program = moe_layer.casts(step, layer), Program(step.as_text())
    report, gemms = wire_report(step), _find_gemms(step)
    row = {
        "mesh": mesh,
        "recipe": name,
        "by": by,
        "gradient_sent_in_fp8": gradient,
        "all_to_all_bytes": {
            role: {str(t.dtype) + str(list(t.shape)): round(t.wire_bytes) for t in transfers}
            for role, transfers in moe_layer.exchanges(step).items()
        },
        "all_gather_bytes": round(report.only(kind="all-gather").wire_bytes),
        "all_reduce_bytes": round(report.only(kind="all-reduce").wire_bytes),
        "casts_in_forward_pass": sum(not cast.is_backward for cast in found),
        "casts_in_backward_pass": sum(cast.is_backward for cast in found),
        "host_transfers": len(host_transfers(program)),
        "fp8_matmuls": len(gemms.fp8),
        "temporary_mib": round(step.memory_analysis().temp_size_in_bytes / MIB, 1),
    }
    if mesh == "8" and by == "pallas" and not gradient:  # others have the same forward pass
        alone = moe_layer.compiled(recipe, layer, kernels=BY[by], backward=False)
        row |= {
            "casts_forward_alone": len(moe_layer.casts(alone, layer)),
            "temporary_mib_forward_alone": round(
                alone.memory_analysis().temp_size_in_bytes / MIB, 1
            ),
        }
    return row


def sent(row: dict, role: str) -> int:
    """Bytes that one device sends in an exchange, scales included."""
    return sum(row["all_to_all_bytes"][role].values())


def table(rows: list[dict]) -> str:
    """A Markdown table with a line for each layer."""
    bf16 = {row["mesh"]: row for row in rows if row["recipe"] == "identity"}
    columns = {
        "devices": lambda r: r["mesh"],
        "recipe": lambda r: r["recipe"],
        "by": lambda r: r["by"],
        "dispatch": lambda r: f"{sent(r, 'dispatch') / MIB:.1f}",
        "to bf16": lambda r: f"{sent(r, 'dispatch') / sent(bf16[r['mesh']], 'dispatch'):.4f}",
        "combine": lambda r: f"{sent(r, 'combine') / MIB:.1f}",
        "gradient of combine": lambda r: f"{sent(r, 'gradient of combine') / MIB:.1f}",
        "gradient of dispatch": lambda r: f"{sent(r, 'gradient of dispatch') / MIB:.1f}",
        "all, to bf16": lambda r: f"{_all(r) / _all(bf16[r['mesh']]):.3f}",
        "casts forward": lambda r: f"{r['casts_in_forward_pass']}",
        "temporaries": lambda r: f"{r['temporary_mib']:.0f}",
        "temporaries to bf16": lambda r: (
            f"{r['temporary_mib'] / bf16[r['mesh']]['temporary_mib']:.3f}"
        ),
    }
    lines = [[*columns], ["---"] * len(columns)]
    lines += [[cell(row) for cell in columns.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _all(row: dict) -> int:
    return sum(sent(row, role) for role in moe_layer.ROLES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--meshes", nargs="+", choices=[*MESHES], default=[*MESHES])
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    known = []
    if given.json and given.json.exists():
        known = json.loads(given.json.read_text())["rows"]
    rows = []
    packages = ("jax", "jaxlib", "jax-cuda13-plugin")
    for mesh in given.meshes:
        for case in MESHES[mesh]:
            key = dict(
                zip(("mesh", "recipe", "by", "gradient_sent_in_fp8"), (mesh, *case), strict=True)
            )
            row = next((row for row in known if row.items() >= key.items()), None)
            rows.append(row or figures(mesh, *case))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            result = {
                "command": " ".join(["python benchmarks/wire/moe_wire.py", *sys.argv[1:]]),
                "chip": "h200",
                "layers": {mesh: dataclasses.asdict(LAYERS[mesh]) for mesh in given.meshes},
                "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
                "python": platform.python_version(),
                "versions": {package: importlib.metadata.version(package) for package in packages},
                "unit": "bytes that one device sends in a step",
                "rows": rows + [row for row in known if row not in rows],
            }
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
