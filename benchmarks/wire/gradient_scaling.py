"""What do FP8 sums of gradients lose with pre-, post- and auto-scaling, on 8 to 1024 ranks?

Nothing is sent. The ranks are simulated one after the other on one CPU.

    python benchmarks/wire/gradient_scaling.py --json benchmarks/wire/results/gradient_scaling.json

The gradient of value j on rank i is `size_j * (agreement * common_j + rest * own_ij)`. Sizes are
log-normal, and `spread` is the deviation of their logarithms. Common and own parts are of a
heavy-tailed distribution. These sums are simulated:

- "ring" adds payloads in the order of the ranks, rounds each partial sum to FP8 and clips it. This
  is what an all-reduce of FP8 values may do.
- "exchange" adds in float32, rounds once and clips. This is what `fp8.comms.AutoScaledFP8` does.
- "groups" has a scale for each 128 values, and adds in float32, as `fp8.comms.TwoPhaseFP8` does.
- "bfloat16" is a ring that rounds each partial sum to bfloat16.

For "auto", mu is halved or doubled until it is the largest power of two at which at most
`max_saturated` of the values are clipped. mu of a training run moves between it and twice of it.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxfp8 as fp8

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
CASES = (("student t, 3 degrees", 1.0), ("log-normal", 1.0), ("student t, 3 degrees", 2.0))
AGREEMENT = 0.3
GROUP = 128


def gradients_of(
    distribution: str, spread: float, values: int, ranks: int, seed: int = 0
) -> dict[str, Any]:
    """The parts of the gradients of all ranks. `pool` holds the own parts at `offsets`."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        if distribution == "log-normal":
            sign = rng.choice(np.float32([-1, 1]), count)
            return sign * rng.lognormal(sigma=1, size=count).astype(np.float32)
        return rng.standard_t(3, count).astype(np.float32)

    pool = draw(16 * values)
    return {
        "size": (rng.lognormal(sigma=spread, size=values) * 1e-5).astype(np.float32),
        "common": draw(values),
        "pool": pool,
        "offsets": rng.choice(len(pool) - values, ranks, replace=False).astype(np.int32),
    }


def gradient_of(parts: dict[str, Any], offset: Any) -> Any:
    """The gradient of one rank, [values]."""
    own = lax.dynamic_slice_in_dim(parts["pool"], offset, len(parts["common"]))
    return parts["size"] * (AGREEMENT * parts["common"] + (1 - AGREEMENT**2) ** 0.5 * own)


@jax.jit
def amax_and_mean(parts: dict[str, Any]) -> tuple[Any, Any]:
    """The largest magnitude on all ranks, and the mean gradient."""

    def add(carry: Any, offset: Any) -> Any:
        g = gradient_of(parts, offset)
        return (jnp.maximum(carry[0], jnp.max(jnp.abs(g))), carry[1] + g), None

    start = jnp.float32(0), jnp.zeros_like(parts["common"])
    (largest, total), _ = lax.scan(add, start, parts["offsets"])
    return largest, total / len(parts["offsets"])


@functools.partial(jax.jit, static_argnames="how")
def fp8_sum(parts: dict[str, Any], multiplier: Any, how: str) -> tuple[Any, Any, Any]:
    """The sum of the payloads [values], and the shares of clipped values and of lost ones."""
    largest, one = fp8.E4M3.max, jnp.float32(1)

    def add(carry: Any, offset: Any) -> Any:
        total, clipped, lost = carry
        g = gradient_of(parts, offset)
        payload = fp8.numerics.saturating_cast(g, multiplier, fp8.E4M3).astype(jnp.float32)
        total = total + payload
        clipped = clipped | (jnp.abs(g * multiplier) > largest)
        if how == "ring":
            clipped = clipped | (jnp.abs(total) > largest)
            total = fp8.numerics.saturating_cast(total, one, fp8.E4M3).astype(jnp.float32)
        return (total, clipped, lost + jnp.mean((g != 0) & (payload == 0))), None

    zeros = jnp.zeros_like(parts["common"])
    start = zeros, zeros != 0, jnp.float32(0)
    (total, clipped, lost), _ = lax.scan(add, start, parts["offsets"])
    if how == "exchange":
        clipped = clipped | (jnp.abs(total) > largest)
        total = fp8.numerics.saturating_cast(total, one, fp8.E4M3).astype(jnp.float32)
    return total, jnp.mean(clipped), lost / len(parts["offsets"])


def in_groups(x: Any) -> tuple[Any, Any]:
    """x [values] after a cast with a scale for each group, and which values became zero."""
    groups = x.reshape(-1, GROUP)
    cells = fp8.PerAxis(0)
    q = fp8.quantize(groups, fp8.E4M3, cells, power_of_two=True)
    found = q.dequantize().reshape(-1)
    return found, (x != 0) & (found == 0)


@functools.partial(jax.jit, static_argnames="how")
def other_sum(parts: dict[str, Any], how: str) -> tuple[Any, Any]:
    """The mean gradient [values] in groups or in bfloat16, and the share of lost values."""

    def add(carry: Any, offset: Any) -> Any:
        total, lost = carry
        g = gradient_of(parts, offset)
        if how == "groups":
            g, zeros = in_groups(g)
            return (total + g, lost + jnp.mean(zeros)), None
        # reduce_precision stays, where XLA may remove a cast to bfloat16 and back.
        total = lax.reduce_precision(total + lax.reduce_precision(g, 8, 7), 8, 7)
        return (total, lost), None

    start = jnp.zeros_like(parts["common"]), jnp.float32(0)
    (total, lost), _ = lax.scan(add, start, parts["offsets"])
    mean = total / len(parts["offsets"])
    return (in_groups(mean)[0] if how == "groups" else mean), lost / len(parts["offsets"])


def rows_of(
    distribution: str, spread: float, values: int, ranks: int, max_saturated: float = 1e-5
) -> list[dict[str, Any]]:
    """What each sum and scaling loses, one row for each."""
    parts = gradients_of(distribution, spread, values, ranks)
    largest, mean = amax_and_mean(parts)
    common = fp8.numerics.encoding_multiplier(largest, fp8.E4M3, power_of_two=True)
    mean = np.asarray(mean, np.float64)

    def row(how: str, found: Any, lost: Any, clipped: Any = 0.0, **fields: Any) -> dict[str, Any]:
        noise = np.sum((np.asarray(found, np.float64) - mean) ** 2)
        return {
            "distribution": distribution,
            "spread": spread,
            "ranks": ranks,
            "sum": how,
            **fields,
            "underflow": float(f"{float(lost):.3g}"),
            "overflow": float(f"{float(clipped):.3g}"),
            "snr_db": round(float(10 * np.log10(np.sum(mean**2) / noise)), 1),
        }

    def scaled(how: str, scaling: str, factor: float) -> dict[str, Any]:
        multiplier = common * np.float32(factor)
        total, clipped, lost = fp8_sum(parts, multiplier, how)
        found = np.asarray(total, np.float64) / float(multiplier) / ranks
        return row(how, found, lost, clipped, scaling=scaling, factor=factor)

    rows = [row(how, *other_sum(parts, how)) for how in ("bfloat16", "groups")]
    for how in ("ring", "exchange"):
        post = scaled(how, "post", 1.0)
        auto = {**post, "scaling": "auto"}
        while auto["overflow"] > max_saturated:
            auto = scaled(how, "auto", auto["factor"] / 2)
        if auto["factor"] == 1:
            while (more := scaled(how, "auto", auto["factor"] * 2))["overflow"] <= max_saturated:
                auto = more
        rows += [scaled(how, "pre", 1 / ranks), post, auto]
    return rows


def main() -> None:
    """Runs all cases, prints a line for each and writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=int, default=1 << 16, help="(default: %(default)s)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=RANKS, help="(default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for distribution, spread in CASES:
        for ranks in given.ranks:
            for row in rows_of(distribution, spread, given.values, ranks):
                rows.append(row)
                print(json.dumps(row), flush=True)
    result = {
        "command": " ".join(["python benchmarks/wire/gradient_scaling.py", *sys.argv[1:]]),
        "values": given.values,
        "agreement": AGREEMENT,
        "group": GROUP,
        "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "ml_dtypes")},
        "seconds": round(time.perf_counter() - started),
        "unit": "shares of the values; underflow is a mean over ranks; factor is mu or 1 / ranks",
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
