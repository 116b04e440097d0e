"""Does a parameter come to rest when its gradient becomes exactly 0, as with float32 moments?

    python benchmarks/optimizers/stopped_gradients.py --json FILE

Two weights have normal gradients for 100 steps. Then some columns of the first (dead units) and
some rows of the second (unseen tokens) get the gradient 0, while the rest goes on. The figure is
how far they move between the 200th and the last step after that: `|sum of updates|` in learning
rates, its mean and its maximum. The mark is 3 more than with float32 moments, in the mean.

A second table has gradients that become 1e-9 of what they were. There float32 moves, too.

Needs: torch and torchao for `--torchao`.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from _stopping import BEFORE, RATE, REST, Optimizer, movement, of_optax, of_release, stopped
from _torchao_adamw import is_installed, movements

import jaxfp8 as fp8
from jaxfp8.optim import (
    FP8,
    BFloat16,
    ExpandedFP8,
    Float16,
    Float32,
    Int8,
    adamw,
    scale_by_adam,
    scale_by_muon,
    with_moment_formats,
)

MARK = 3.0  # learning rates
B2 = (0.95, 0.999)

FIRST: dict[str, Any] = {
    "FP8": FP8(min_size=0),
    "FP8 E5M2": FP8(fp8.E5M2, min_size=0),
    "FP8 stochastic": FP8(rounding="stochastic", min_size=0),
    "Int8": Int8(min_size=0),
    "Int8 linear": Int8(companding=False, min_size=0),
    "ExpandedFP8": ExpandedFP8(min_size=0),
    "Float16": Float16(),
    "BFloat16": BFloat16(),
    "BFloat16 stochastic": BFloat16("stochastic"),
    "Float32": Float32(),
}
SECOND = {name: x for name, x in FIRST.items() if "FP8" not in name and name != "Int8 linear"}
SECOND["ExpandedFP8"] = FIRST["ExpandedFP8"]
DIAGONAL = [*((name, name) for name in SECOND), ("FP8", "Float16")]


class Row(NamedTuple):
    """One optimizer with its formats."""

    name: str
    mu: str
    nu: str
    make: Callable[[Any], Optimizer]  # of b2
    b2s: tuple[float, ...]  # 0 if it has none, or that of optax


def adam_rows() -> Iterator[Row]:
    """AdamW with all pairs of formats; `scale_by_adam`, AMSGrad and gradient release with some."""

    def make(of: str, mu: str, nu: str, b2: Any) -> Optimizer:
        formats = {"mu": FIRST[mu], "nu": SECOND[nu]}
        match of:
            case "scale_by_adam":
                return of_optax(scale_by_adam(b2=b2, **formats), 1.0)
            case "amsgrad":
                tx = optax.amsgrad(RATE, b2=b2)
                return of_optax(with_moment_formats(tx, formats | {"nu_max": SECOND[nu]}))
        tx = adamw(RATE, b2=b2, weight_decay=0.0, **formats)
        return of_release(tx) if of == "release(adamw)" else of_optax(tx)

    pairs = [(mu, nu) for nu in SECOND for mu in FIRST]
    for of in ("adamw", "scale_by_adam", "amsgrad", "release(adamw)"):
        for mu, nu in pairs if of == "adamw" else DIAGONAL:
            yield Row(of, mu, nu, functools.partial(make, of, mu, nu), B2)


def first_rows() -> Iterator[Row]:
    """Optimizers that have one moment, which can be negative."""

    def make(of: str, name: str, b2: Any) -> Optimizer:
        format = FIRST[name]
        match of:
            case "scale_by_muon":
                return of_optax(scale_by_muon(mu=format), 1.0)
            case "contrib.muon":
                return of_optax(with_moment_formats(optax.contrib.muon(RATE), {"mu": format}))
            case "lion":
                tx = optax.lion(RATE, weight_decay=0.0)
                return of_optax(with_moment_formats(tx, {"mu": format}))
        return of_optax(with_moment_formats(optax.sgd(RATE, momentum=0.9), {"trace": format}))

    for of in ("scale_by_muon", "contrib.muon", "lion", "sgd(momentum=0.9)"):
        for name in FIRST:
            yield Row(of, name, "", functools.partial(make, of, name), (0.0,))


def second_rows() -> Iterator[Row]:
    """Optimizers that have a second moment only."""

    def make(of: str, name: str, b2: Any) -> Optimizer:
        if of == "adagrad":
            tx, field = optax.adagrad(RATE), "sum_of_squares"
        else:
            tx, field = optax.rmsprop(RATE, decay=b2), "nu"
        return of_optax(with_moment_formats(tx, {field: SECOND[name]}))

    for of in ("adagrad", "rmsprop"):
        for name in SECOND:
            b2s = B2 if of == "rmsprop" else (0.0,)
            yield Row(of, "", name, functools.partial(make, of, name), b2s)


def result_of(
    name: str, mu: str, nu: str, b2: float, moved: Any, masks: Any, left: float = 0.0
) -> dict[str, Any]:
    """The mean and the largest movement of the stopped entries, with what was measured."""
    result: dict[str, Any] = {"optimizer": name, "mu": mu, "nu": nu, "b2": b2, "left": left}
    for kind, mask in masks.items():
        x = np.asarray(moved[kind])[mask]
        result[kind] = {"mean": float(x.mean()), "max": float(x.max())}
    return result


def results_of(row: Row, masks: Any, gradients: Any, lefts: list[float]) -> Iterator[Any]:
    """The results of one row, for each b2 and for what is left of the gradients."""
    run = jax.jit(lambda b2, left: movement(row.make(b2), masks, gradients, left))
    for left in lefts:
        for b2 in row.b2s:
            moved = run(jnp.float32(b2), jnp.float32(left))
            yield result_of(row.name, row.mu, row.nu, b2, moved, masks, left)


def torchao_results(masks: Any, gradients: Any) -> list[dict[str, Any]]:
    if not is_installed():
        return []
    run = functools.partial(movements, masks, gradients, RATE, stop=BEFORE, counted=BEFORE + REST)
    return [result_of("torchao AdamW8bit", "", "", b2, run(b2=b2), masks) for b2 in B2]


def mark(results: list[dict[str, Any]]) -> None:
    """Add whether each result is at most `MARK` above float32's of the same optimizer."""

    def case(x: Any) -> tuple[Any, ...]:
        return x["optimizer"], x["b2"], x["left"]

    exact = {case(x): x for x in results if {"Float32"} <= {x["mu"], x["nu"]} <= {"Float32", ""}}
    for x in results:
        for kind in ("columns", "rows"):
            base = exact[case(x)][kind]["mean"] if case(x) in exact else 0.0
            x[kind]["ok"] = bool(x[kind]["mean"] <= MARK + base)  # False for NaN


def show(results: list[dict[str, Any]], left: float) -> None:
    print(f"\ngradients become {left:g} of what they were; mean (max) in learning rates")
    for x in results:
        if x["left"] == left:
            formats = ", ".join(name for name in (x["mu"], x["nu"]) if name)
            cells = "  ".join(
                f"{kind} {y['mean']:9.3g} ({y['max']:9.3g}) {'OK ' if y['ok'] else 'BAD'}"
                for kind, y in (("columns", x["columns"]), ("rows", x["rows"]))
            )
            print(f"{x['optimizer']:18} {formats:40} {x['b2'] or '':5}  {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--columns", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3000, help="after the stop (%(default)s)")
    parser.add_argument("--only", nargs="+", help="these optimizers, such as adamw")
    parser.add_argument("--quick", action="store_true", help="fewer pairs, 800 steps")
    parser.add_argument("--torchao", action="store_true", help="also torchao's 8-bit AdamW")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()

    steps = BEFORE + (min(given.steps, 800) if given.quick else given.steps)
    masks = stopped(given.rows, given.columns)
    gradients = jax.random.normal(jax.random.key(0), (steps, given.rows, given.columns))
    results = []
    for row in [*adam_rows(), *first_rows(), *second_rows()]:
        some = (row.mu, row.nu) in DIAGONAL or "" in (row.mu, row.nu)
        if row.name in (given.only or [row.name]) and (some or not given.quick):
            lefts = [0.0, 1e-9] if row.name == "adamw" and some else [0.0]
            results.extend(results_of(row, masks, gradients, lefts))
    results += torchao_results(masks, gradients) if given.torchao else []
    mark(results)
    for left in (0.0, 1e-9):
        show(results, left)
    good = [x["columns"]["ok"] and x["rows"]["ok"] for x in results if x["left"] == 0]
    print(f"\n{good.count(False)} of {len(good)} above the mark")
    if given.json:
        result = {
            "command": " ".join(
                ["python benchmarks/optimizers/stopped_gradients.py", *sys.argv[1:]]
            ),
            "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "optax")},
            "shape": [given.rows, given.columns],
            "steps": {"before": BEFORE, "after": steps - BEFORE, "not_counted": REST},
            "learning_rate": RATE,
            "mark": MARK,
            "unit": "learning rates, |sum of updates| of a stopped parameter",
            "results": results,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
