"""Time a layer of experts on a CPU, forward and backward with casts, beside bf16's ragged_dot.

All contenders run in one process. In each round every contender runs once, in a new random order. A
ratio is the time of `jax.lax.ragged_dot` in bfloat16 over that of a recipe in the same round.

    python benchmarks/cpu/experts_on_cpu.py --repeats 20
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8 as fp8

BASELINE = "jax.lax.ragged_dot, bf16"
RECIPES = ("current", "rowwise", "blockwise", "mxfp8")


def steps(experts: int, tokens: int, features: int) -> dict[str, Callable[[], Any]]:
    """For each contender a call that computes the gradients of x and w."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    w = jax.random.normal(keys[1], (experts, features, features), jnp.bfloat16)
    ends = np.sort(np.random.default_rng(0).integers(0, tokens + 1, experts - 1))
    sizes = jnp.asarray(np.diff([0, *ends, tokens]), jnp.int32)  # uneven, and all rows are used
    dots: dict[str, Callable[..., Any]] = {BASELINE: jax.lax.ragged_dot}
    for name in RECIPES:
        dots[name] = functools.partial(fp8.ragged_dot, recipe=getattr(fp8.recipes, name)())
    return {name: functools.partial(_gradients(dot), x, w, sizes) for name, dot in dots.items()}


def _gradients(dot: Callable[..., Any]) -> Callable[..., Any]:
    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(dot(x, w, sizes).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, (0, 1)))


def measure(run: dict[str, Callable[[], Any]], repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each call, by contender."""
    for step in run.values():
        jax.block_until_ready(step())
    seconds: dict[str, list[float]] = {name: [] for name in run}
    order = np.random.default_rng(0)
    for _ in range(repeats):
        for name in order.permutation(list(run)):
            begin = time.perf_counter()
            jax.block_until_ready(run[name]())
            seconds[name].append(time.perf_counter() - begin)
    return {name: np.array(times) for name, times in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="of all experts")
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args(arguments)
    seconds = measure(steps(given.experts, given.tokens, given.features), given.repeats)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {vars(given)}")
    print(f"{'':26} {'ms':>8} {'ratio':>7}   quartiles")
    for name, times in seconds.items():
        low, ratio, high = np.percentile(seconds[BASELINE] / times, (25, 50, 75))
        print(f"{name:26} {np.median(times) * 1e3:8.1f} {ratio:7.2f}   {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
