"""Time a train step on a CPU, in FP8, in bf16 and with other FP8 libraries.

The model is a two-layer MLP with mean squared error and AdamW. All contenders run in one process.
In each round every contender runs one step, in a new random order. So other work of the machine
slows all contenders alike. A ratio is the time of a step over that of the baseline in the same
round. The table has medians and quartiles of times and ratios.

    python benchmarks/cpu/cpu_train_step.py --repeats 40 --json result.json

Letters: B batch, D features, F hidden features.

Needs: qwix for its row, which is left out without it.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from _contenders import BASELINE, CONTENDERS, SEED

WARM_UP = 3  # the first step compiles, and delayed scaling has no scale in it yet


def available(name: str) -> bool:
    """Whether a contender can run here. If it cannot, a line is printed."""
    if name.startswith("qwix") and importlib.util.find_spec("qwix") is None:
        print("skipped: qwix fp8 rule (qwix is not installed)")
        return False
    return True


def measure(
    batch_size: int, features: int, hidden: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every step, and the loss of the last step, by contender."""
    keys = jax.random.split(jax.random.key(SEED), 2)
    batch = tuple(jax.random.normal(key, (batch_size, features)) for key in keys)
    steps = {name: make(batch, hidden) for name, make in CONTENDERS.items() if available(name)}
    for step in steps.values():
        for _ in range(WARM_UP):
            jax.block_until_ready(step())

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    order = np.random.default_rng(SEED)
    for _ in range(repeats):
        for name in order.permutation(list(steps)):
            begin = time.perf_counter()
            loss = jax.block_until_ready(steps[name]())
            seconds[name].append(time.perf_counter() - begin)
            losses[name] = float(loss)
    return seconds, losses


def summarize(seconds: dict[str, list[float]], losses: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each contender: medians and quartiles, in milliseconds and as ratios."""
    baseline = np.array(seconds[BASELINE])
    rows = []
    for name, times in seconds.items():
        paired = np.array(times) / baseline
        rows.append(
            {
                "contender": name,
                "median_ms": round(statistics.median(times) * 1e3, 2),
                "quartiles_ms": [round(q * 1e3, 2) for q in np.percentile(times, (25, 75))],
                "ratio": round(statistics.median(paired), 3),
                "quartiles_ratio": [round(q, 3) for q in np.percentile(paired, (25, 75))],
                "loss": round(losses[name], 4),
            }
        )
    return rows


def machine() -> dict[str, Any]:
    """The properties of the machine that the numbers depend on.

    The load averages of 1, 5 and 15 minutes are read before the run.
    """
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = fields.get("flags", "").split()
    packages = ("jax", "jaxlib", "flax", "optax", "qwix")
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "load_average": [round(load, 1) for load in os.getloadavg()]
        if hasattr(os, "getloadavg")
        else None,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "bf16_instructions": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags],
        "versions": {"python": platform.python_version()}
        | {
            name: importlib.metadata.version(name)
            for name in packages
            if importlib.util.find_spec(name)
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':40} {'median':>9}  {'quartiles':>15}  {'ratio':>6}  {'quartiles':>13}  {'loss':>7}"
    ]
    for row in rows:
        low, high = row["quartiles_ms"]
        low_ratio, high_ratio = row["quartiles_ratio"]
        lines.append(
            f"{row['contender']:40} {row['median_ms']:6.1f} ms  {low:6.1f} - {high:6.1f}  "
            f"{row['ratio']:6.3f}  {low_ratio:5.3f} - {high_ratio:5.3f}  {row['loss']:7.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="also write the numbers there"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, help="rounds, with one step of each (default 20)"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")

    sizes = {name: getattr(arguments, name) for name in ("batch", "features", "hidden", "repeats")}
    command = " ".join(
        [
            "python benchmarks/cpu/cpu_train_step.py",
            *(f"--{name} {value}" for name, value in sizes.items()),
        ]
    )
    where = machine()
    bf16_instructions = ", ".join(where["bf16_instructions"]) or "none"
    print(f"{where['cpu']}, {where['cores']} cores, bf16 instructions: {bf16_instructions}")
    print(", ".join(f"{name} {version}" for name, version in where["versions"].items()))
    print(
        "MLP {features}-{hidden}-{features}, batch {batch}, AdamW, {repeats} rounds".format(**sizes)
    )
    print(command, flush=True)
    rows = summarize(
        *measure(arguments.batch, arguments.features, arguments.hidden, arguments.repeats)
    )
    print(table(rows))
    print(
        f"ratio: to {BASELINE!r}. loss: after {WARM_UP + arguments.repeats} steps on one batch; "
        "nnx starts from other weights."
    )
    if arguments.json:
        result = {
            "command": command,
            **where,
            "sizes": sizes,
            "warm_up": WARM_UP,
            "baseline": BASELINE,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
