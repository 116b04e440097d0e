"""Figures of one traced forward and backward pass of a layer, for each recipe.

A pass is one trace of the loss and gradients of one `FP8Dense` with bias. A recipe with state uses
`fp8.value_and_grad`, and a recipe without state uses `jax.value_and_grad`. Before each pass JAX's
caches are emptied, and then the layer is initialized. So the caches always hold the same traces,
those of `init`.

An example, with Python 3.11 and jax 0.10.2: commit 58c20b5 has 386 calls, 35 files and 238 moves
with current scaling. With delayed scaling it has 926 calls, 38 files and 508 moves.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from _trace import Call, frames, record, traffic

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense

RECIPES = ("current", "delayed", "blockwise", "mxfp8", "rowwise")
BATCH, IN, OUT = 16, 64, 32

# Names inside jaxfp8 that a pass is searched for. If one is renamed, change it here too.
LAYERS = "linen"
CAST = "saturating_cast"
MATMULS = "kernels/scaled_matmul"
DISPATCH = "dispatch"
DOT = "dot_general"  # jax's own


def is_cast(call: Call) -> bool:
    return call.outside is None and call.stack[-1][1] == CAST


def is_backend(call: Call) -> bool:
    """Whether `dispatch` calls a backend of the scaled matmul: a `Backend`, which is called."""
    names = [name for _, name in call.stack[-3:]]
    inside = call.outside is None and call.stack[-1][0].startswith(f"{MATMULS}/")
    return inside and names[:-1] == [DISPATCH, "__call__"]


def is_dot(call: Call) -> bool:
    """Whether the scaled matmul, and nothing else, calls JAX's dot_general."""
    return call.outside == DOT and bool(call.stack) and call.stack[-1][0].startswith(f"{MATMULS}/")


def one_pass(root: Path, recipe: fp8.Recipe) -> list[Call]:
    """The calls of one traced forward and backward pass."""
    layer = FP8Dense(OUT, recipe=recipe)
    x = jax.ShapeDtypeStruct((BATCH, IN), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    params, state = variables["params"], variables.get(COLLECTION, {})

    def loss(params, state, x):
        collections = {"params": params} | ({COLLECTION: state} if state else {})
        return layer.apply(collections, x).sum()

    def step(*arguments):
        return (fp8 if state else jax).value_and_grad(loss)(*arguments)

    jax.clear_caches()  # of what is traced once for each shape, by `init` for instance
    return record(root, lambda: jax.make_jaxpr(step)(params, state, x), outside=(DOT,))


def trace_figures(root: Path) -> dict[str, int]:
    """Figures of one pass for each recipe.

    Raises:
      RuntimeError: if two passes differ.
    """
    figures = {}
    for name in RECIPES:
        _, calls, again = (one_pass(root, fp8.recipes.get(name)) for _ in range(3))
        if traffic(calls) != traffic(again):
            raise RuntimeError(
                f"two passes of recipe {name!r} have {traffic(calls)} and {traffic(again)}. A pass "
                "must not depend on earlier passes. Look for a cache that outlives "
                "jax.clear_caches()."
            )
        cast = frames(calls, LAYERS, is_cast, f"`{CAST}`")
        backend = frames(calls, LAYERS, is_backend, f"a function in {MATMULS}/ by `{DISPATCH}`")
        dot = frames(calls, LAYERS, is_dot, f"jax's `{DOT}` from {MATMULS}/")
        row = traffic(calls) | {
            "frames to the cast": cast[-1],
            "frames to the matmul backend": backend[-1],
            f"frames to jax's {DOT}, fewest": dot[0],
            f"frames to jax's {DOT}, most": dot[-1],
        }
        figures |= {f"{name}: {what}": value for what, value in row.items()}
    return figures
