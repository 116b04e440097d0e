"""Memory of train steps on TPUs, FP8 beside bfloat16. Nothing runs.

    python benchmarks/programs/tpu_memory.py --json benchmarks/programs/results/tpu_memory.json

A step has blocks of RMSNorm and SwiGLU, and AdamW. The blocks are a `lax.scan` or an unrolled loop.
Without `jax.checkpoint` jax decides what the backward pass keeps. With it each matmul keeps its
input, in FP8 or in bfloat16. `--json` keeps the rows that the file has already.

Needs: libtpu of jax[tpu], no TPU.
"""

import argparse
import importlib.metadata
import itertools
import os
import platform
import sys
from pathlib import Path
from typing import Any

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "tpu"))

import jax
import jax.numpy as jnp
import optax
from _results import continued
from jax.ad_checkpoint import checkpoint_name
from tpu_targets import TOPOLOGIES, topology

import jaxfp8 as fp8

BLOCKS, D, F, TOKENS = 8, 2048, 5632, 8192
RECIPES = {
    "bfloat16": fp8.recipes.identity(),
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
}
LOOPS = ("scan", "unrolled")
KEPT = ("by jax", "inputs")  # what the backward pass keeps
GIB = 2**30
PACKAGES = ("jax", "jaxlib", "libtpu", "optax")
KEY = ("chip", "loop", "kept", "recipe")


def block(recipe: fp8.Recipe, kept: str) -> Any:
    """A block as the body of a scan: x[TOKENS, D] in bfloat16."""

    def body(x: jax.Array, of_block: Any) -> tuple[jax.Array, None]:
        w, states = of_block

        def dot(x: jax.Array, name: str) -> jax.Array:
            return fp8.dot(x, w[name], recipe=recipe, state=states[name])

        squares = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
        normed = checkpoint_name(x * jax.lax.rsqrt(squares + 1e-6).astype(x.dtype), "input")
        hidden = jax.nn.silu(dot(normed, "gate")) * dot(normed, "up")
        return x + dot(checkpoint_name(hidden, "input"), "down"), None

    if kept == "by jax":
        return body
    if recipe == RECIPES["bfloat16"]:
        policy = jax.checkpoint_policies.save_only_these_names("input")
    else:
        policy = fp8.save_fp8_residuals()
    return jax.checkpoint(body, policy=policy)


def figures(chip: str, loop: str, kept: str, name: str) -> dict[str, Any]:
    """Bytes of one device: of arguments, of temporaries, and of all."""
    recipe, tx = RECIPES[name], optax.adamw(1e-4)
    body = block(recipe, kept)

    def loss(params: Any, states: Any, x: jax.Array) -> jax.Array:
        if loop == "scan":
            x, _ = jax.lax.scan(body, x, (params, states))
        else:
            for i in range(BLOCKS):
                x, _ = body(x, jax.tree.map(lambda leaf, i=i: leaf[i], (params, states)))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(params: Any, moments: Any, states: Any, x: jax.Array) -> Any:
        value, grads, states = fp8.value_and_grad(loss)(params, states, x)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, states, value

    def start() -> Any:
        shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
        params = {key: jnp.zeros((BLOCKS, *each), jnp.bfloat16) for key, each in shapes.items()}
        one = fp8.init_state(recipe)
        states = {key: jax.tree.map(lambda leaf: jnp.stack([leaf] * BLOCKS), one) for key in params}
        return params, tx.init(params), states, jnp.zeros((TOKENS, D), jnp.bfloat16)

    here = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])
    types = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        jax.eval_shape(start),
    )
    memory = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*types).compile().memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        **dict(zip(KEY, (chip, loop, kept, name), strict=True)),
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "total": memory.argument_size_in_bytes + memory.temp_size_in_bytes + new,
    }


def table(rows: list[dict[str, Any]], chips: list[str]) -> str:
    """Markdown: GiB in bfloat16, and the ratios of the recipes to them."""
    found = {tuple(row[key] for key in KEY): row["total"] for row in rows}
    lines = [["recipe", "blocks", "kept", *chips]]
    lines.append(["---"] * len(lines[0]))
    for name, loop, kept in itertools.product(RECIPES, LOOPS, KEPT):
        totals = [(found[c, loop, kept, name], found[c, loop, kept, "bfloat16"]) for c in chips]
        if name == "bfloat16":
            cells = [f"{own / GIB:.2f} GiB" for own, _ in totals]
        else:
            cells = [f"{own / of:.2f}" for own, of in totals]
        lines.append([name if name == "bfloat16" else f"`{name}()`", loop, kept, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()
    about = {
        "command": " ".join(["python benchmarks/programs/tpu_memory.py", *sys.argv[1:]]),
        "blocks": BLOCKS, "shape": [D, F], "tokens": TOKENS,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no TPU",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "unit": "bytes of one device",
    }  # fmt: skip
    wanted = itertools.product(given.chips, LOOPS, KEPT, RECIPES)
    print(table(continued(given.json, KEY, wanted, figures, about), given.chips))


if __name__ == "__main__":
    main()
