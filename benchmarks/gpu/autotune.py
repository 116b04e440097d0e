"""Times every way to do the matmuls of dense layers on this GPU, and writes a table of timings.

    python benchmarks/gpu/autotune.py h200 --json benchmarks/gpu/results/timings_h200.json

`fp8.Kernels("h200", timings=fp8.plan.Timings.load(path))` uses the table. A layer is
[M, K] @ [K, N], forward and backward.

Needs: a GPU.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matmuls

import jaxfp8 as fp8

RECIPES = ("blockwise", "mxfp8", "rowwise", "current")


def step(recipe: fp8.Recipe, kernels: fp8.Kernels, x: jax.Array, w: jax.Array) -> object:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = fp8.dot(x, w, recipe=recipe, kernels=kernels)
        return jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss, (0, 1))(x, w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chip", help="chip of this GPU, for instance h200")
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
    arguments = parser.parse_args()
    timings = fp8.plan.Timings.load(arguments.json) if arguments.json.exists() else None
    kernels = fp8.Kernels(arguments.chip, timings=timings)
    for shape in arguments.shapes:
        m, k, n = map(int, shape.split(","))
        x, w = (jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in ((m, k), (k, n)))
        for name in arguments.recipes:
            of_recipe = functools.partial(step, fp8.recipes.get(name))
            kernels = fp8.plan.autotune(of_recipe, x, w, kernels=kernels)
            kernels.timings.save(arguments.json)  # now, because a later matmul may fail
    print(kernels.timings)


if __name__ == "__main__":
    main()
