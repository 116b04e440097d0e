"""Bytes that the kernels of a training step move, with SwiGLU or RMSNorm before a matmul.

The programs are compiled, not run. States are settled.

    python benchmarks/programs/prologue_bytes.py

The step is tests/deviceless/prologues.py. Tests assert the differences between its ways.

Needs: the wheels of jax[cuda13], jax 0.11 or later, no GPU.
"""

import os
import sys
from pathlib import Path

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))

import prologues

import jaxfp8 as fp8

SIZES = 8192, 4096, 2048
RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")


def main() -> None:
    columns = [(name, way) for name in prologues.PROLOGUES for way in prologues.WAYS]
    print("MiB, x [{}, {}] @ w [{}, {}], an H200".format(*SIZES[:2], *SIZES[1:]))
    print("| | " + " | ".join(f"{name}, {way}" for name, way in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for recipe in RECIPES:
        row = []
        for name, way in columns:
            casts, fused = prologues.WAYS[way]
            program = prologues.trained(
                fp8.recipes.get(recipe), name, casts, fused=fused, sizes=SIZES
            )
            row.append(f"{prologues.moved(program) / 2**20:.0f}")
        print(f"| `{recipe}()` | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
