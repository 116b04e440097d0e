"""What tensor cores lose of sums, by the length of K and the signs of the operands.

    python benchmarks/gpu/accumulation.py --json benchmarks/gpu/results/accumulation.json

Nothing is measured: `predicted.py` computes the bits of the hardware. Operands are E4M3, random
normal values [64, K] with a standard deviation of 64, so each figure is over 4096 results. "mixed"
has mean 0, "shifted" has mean 64, "one sign" takes magnitudes, and "positive" takes those of
one operand. The error is relative, in Frobenius norm. "shift" in the JSON file is the mean of
(result - exact) over the mean of exact. Both leave out the casts.

Needs: nothing.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import predicted

import jaxfp8 as fp8

SIDE = 64
LENGTHS = (128, 512, 1024, 4096, 16384, 65536)
SIGNS = ("mixed", "positive", "shifted", "one sign")
LOSES = 0.01
"""Errors from here on are marked, as `fp8.diagnostics` marks them."""
SHOWN = ("Hopper, fast", "Hopper, promoted", "Hopper, tiles of 32")
"""The paths of the table. The others lose next to nothing."""


def float32(lhs: np.ndarray, rhs: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """A sum in float32, in order: each addition is rounded to the nearest."""
    for a, b in zip(lhs.T.astype(np.float32), rhs.T.astype(np.float32), strict=True):
        sums = sums + np.multiply.outer(a, b)  # products of FP8 values are exact
    return sums


PATHS = {
    "Hopper, fast": (predicted.FAST, predicted.hopper),
    "Hopper, promoted": (predicted.FULL, predicted.hopper),
    "Hopper, tiles of 32": (predicted.Rule(every=32, fused=False), predicted.hopper),
    "Blackwell": (predicted.FAST, predicted.tcgen05),
    "float32": (predicted.FAST, float32),
}
"""Rules and tensor cores. Tiles of 128 add like "Hopper, promoted", and no scales come in here."""


def operand(signs: str, k: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((SIDE, k))
    if signs == "one sign" or (signs, seed) == ("positive", 0):
        values = np.abs(values)
    elif signs == "shifted":
        values += 1
    return np.clip(64 * values, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def row(path: str, signs: str, k: int) -> dict[str, Any]:
    rule, cores = PATHS[path]
    values = operand(signs, k, 0), operand(signs, k, 1)
    ones = np.ones((SIDE, 1), np.float32)
    result = predicted.predicted(values, (ones, ones), rule, cores).astype(np.float64)
    exact = values[0].astype(np.float64) @ values[1].astype(np.float64).T
    found = {
        "path": path, "signs": signs, "k": k,
        "error": float(np.linalg.norm(result - exact) / np.linalg.norm(exact)),
    }  # fmt: skip
    if signs in ("shifted", "one sign"):  # other means are nearly 0
        found["shift"] = float((result - exact).mean() / exact.mean())
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of errors: a row for each path of `SHOWN` and signs, a column for each K."""
    lengths = sorted({each["k"] for each in rows})
    lines = [
        "| signs | sums | " + " | ".join(f"K = {k}" for k in lengths) + " |",
        "|" + "---|" * (2 + len(lengths)),
    ]
    for signs in SIGNS:
        for path in SHOWN:
            errors = {r["k"]: r["error"] for r in rows if (r["path"], r["signs"]) == (path, signs)}
            cells = [percent(errors[k]) for k in lengths if k in errors]
            lines.append(f"| {signs} | {path} | " + " | ".join(cells) + " |")
    for path in [path for path in PATHS if path not in SHOWN]:
        largest = max(each["error"] for each in rows if each["path"] == path)
        lines += ["", f"{path}: at most {percent(largest)}"]
    return "\n".join(lines) + "\n"


def percent(error: float) -> str:
    """Two digits, and a mark from `LOSES` on."""
    size = 100 * error
    if size < 1e-3:
        return "< 0.001 %"
    return (f"{size:.0f} %" if size >= 10 else f"{size:#.2g} %") + " !" * (error >= LOSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument(
        "--longest", type=int, default=LENGTHS[-1], help="the largest K (default %(default)s)"
    )
    arguments = parser.parse_args()
    rows = [
        row(path, signs, k)
        for k in LENGTHS
        if k <= arguments.longest
        for signs in SIGNS
        for path in PATHS
    ]
    print(markdown(rows))
    if arguments.json is not None:
        result = {
            "command": " ".join(["python", "benchmarks/gpu/accumulation.py", *_words()]),
            "versions": {
                "jaxfp8": fp8.__version__,
                "jax": jax.__version__,
                "numpy": np.__version__,
            },
            "outputs": SIDE * SIDE,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _words() -> list[str]:
    return [word for word in sys.argv[1:] if not word.endswith(".json") and word != "--json"]


if __name__ == "__main__":
    main()
