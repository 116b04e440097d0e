"""Operations and bytes of a layer of experts for an H200, over those of each expert alone.

The programs are compiled, not run.

    python benchmarks/programs/grouped_work.py --json benchmarks/programs/results/grouped_work.json

The script compiles y, dx and dw of `fp8.ragged_dot`, casts included, and the same of `fp8.dot` for
one expert of average size. Bytes are those that kernels read and write, multiplied by the trip
counts of loops. A slice reads what it takes, and an update in place writes what it changes.

Needs: the wheels of jax[cuda13], no GPU.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))

from experts import uneven_rows, work_of_experts, worst_rows

import jaxfp8 as fp8

EXPERTS, AVERAGES = (8, 64, 256), (512, 4096, 32768)
K, N = 4096, 2048
RECIPES = ("current", "rowwise", "blockwise", "mxfp8")
BY = {"pallas": fp8.Kernels("h200"), "xla": fp8.Kernels("h200", casts="xla", matmuls="xla")}


def rows(by, recipes):
    for experts in EXPERTS:
        for average in AVERAGES:
            for name in recipes:
                found = work_of_experts(name, experts, average, K, N, BY[by])
                worst, uneven = (
                    (worst_rows(experts, average), uneven_rows(experts, average))
                    if by == "pallas"
                    else (found.flops, found.flops)  # XLA's loop is as long for all sizes
                )
                yield {
                    "by": by,
                    "experts": experts,
                    "average": average,
                    "recipe": name,
                    "flops": round(found.flops, 3),
                    "worst_flops": round(worst, 3),
                    "uneven_flops": round(uneven, 3),
                    "bytes": round(found.bytes, 3),
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", nargs="+", choices=[*BY], default=[*BY])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for by in arguments.by:
        for row in rows(by, arguments.recipes):
            found.append(row)
            print(
                "{by:6} {experts:4} experts of {average:6} {recipe:10} operations {flops:5} "
                "(worst {worst_flops}, uneven {uneven_flops}) bytes {bytes:6}".format(**row),
                flush=True,
            )
    if arguments.json:
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
        result = {"shape": {"k": K, "n": N}, "versions": versions, "rows": found}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
