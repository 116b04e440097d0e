"""Times every way to do the matmuls of dense layers on this GPU, and writes a table of timings.

    python benchmarks/gpu/autotune.py h200 --json benchmarks/gpu/results/timings_h200.json

`fp8.Kernels("h200", timings=fp8.plan.Timings.load(path))` uses the table. A layer is
[M, K] @ [K, N], forward and backward. `--dry-run` times one tiny layer on a CPU. The exit status is
1 if a layer failed, for instance because a way gave a wrong result.

Needs: a GPU; with `--dry-run` nothing.
"""

import argparse
import contextlib
import functools
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import matmuls
import report
import target as targets

import jaxfp8 as fp8

RECIPES = ("blockwise", "mxfp8", "rowwise", "current")
TINY_SHAPES = ("128,64,32",)


def forward(recipe: fp8.Recipe, kernels: fp8.Kernels, x: jax.Array, w: jax.Array) -> object:
    return fp8.dot(x, w, recipe=recipe, kernels=kernels)


def step(recipe: fp8.Recipe, kernels: fp8.Kernels, x: jax.Array, w: jax.Array) -> object:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = fp8.dot(x, w, recipe=recipe, kernels=kernels)
        return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss, (0, 1))(x, w)


# The table is saved after each of them. One matmul may take a minute, and a run may be ended. The
# whole step does not time the matmul of its forward pass again.
STEPS = {"forward": forward, "forward and backward": step}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chip", nargs="?", help="chip of this GPU (default: by the GPU's name)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        required=True,
        help="write the table there, or add to a table that exists",
    )
    parser.add_argument(
        "--recipes", nargs="+", default=RECIPES, metavar="NAME", help="default: %(default)s"
    )
    shapes = [f"{m},{k},{n}" for m, n, k in matmuls.SHAPES]
    parser.add_argument(
        "--shapes", nargs="+", metavar="M,K,N", default=shapes, help="default: %(default)s"
    )
    parser.add_argument(
        "--minutes", type=float, help="layers that cannot start in this time are skipped"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was done, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="one tiny layer on a CPU")
    return parser.parse_args()


def on_a_cpu() -> contextlib.AbstractContextManager[Any]:
    """`fp8.plan.autotune` refuses a CPU, because its times mean nothing. A dry run wants none."""
    return mock.patch("jax.default_backend", return_value="gpu")


def save(timings: fp8.plan.Timings, path: Path) -> None:
    """The run may be ended while it writes, so the file is renamed at the end."""
    unfinished = path.with_suffix(".partial")
    timings.save(unfinished)
    unfinished.replace(path)


def main() -> int:
    arguments, start = parse(), time.perf_counter()
    if arguments.dry_run:
        jax.config.update("jax_platforms", "cpu")
        arguments.shapes = TINY_SHAPES
    target = targets.cpu() if arguments.dry_run else targets.here(arguments.chip)
    timings = fp8.plan.Timings.load(arguments.json) if arguments.json.exists() else None
    kernels = fp8.Kernels(target.chip, timings=timings)
    rows: list[dict[str, Any]] = []
    result = {"machine": report.machine(target, None), "dry_run": arguments.dry_run}
    result |= {"finished": "Not finished", "rows": rows}

    def add(*case: str, **fields: Any) -> None:
        rows.append(dict(zip(("shape", "recipe", "step", "status"), case, strict=True)) | fields)
        print(*rows[-1].values(), flush=True)
        if arguments.report:
            report.write(arguments.report, result)

    for shape in arguments.shapes:
        m, k, n = map(int, shape.split(","))
        x, w = (jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in ((m, k), (k, n)))
        for name in arguments.recipes:
            for what, traced in STEPS.items():
                began = time.perf_counter()
                if arguments.minutes and began - start > 60 * arguments.minutes:
                    add(shape, name, what, "skipped", reason="no time left")
                    continue
                try:
                    with on_a_cpu() if arguments.dry_run else contextlib.nullcontext():
                        of_recipe = functools.partial(traced, fp8.recipes.get(name))
                        kernels = fp8.plan.autotune(of_recipe, x, w, kernels=kernels)
                except Exception as error:  # the other layers go on
                    add(shape, name, what, "failed", reason=report.one_line(error))
                    continue
                save(kernels.timings, arguments.json)  # now, because a later matmul may fail
                add(shape, name, what, "ok", seconds=round(time.perf_counter() - began, 1))
    result["finished"] = "Finished"
    if arguments.report:
        report.write(arguments.report, result)
    print(kernels.timings)
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
