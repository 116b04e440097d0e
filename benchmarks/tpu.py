"""Cycles of a dense layer on a TPU, as the compiler for TPUs estimates them, per recipe.

The programs are compiled, not run. Each computes fprop, dgrad and wgrad of x [M, K] @ w [K, N] in
bfloat16, with all casts. The estimates are those of XLA's fusions (`estimated_cycles`).

    python benchmarks/programs/tpu_cycles.py --json benchmarks/programs/results/tpu_cycles.json

`unknown` counts the operations that have no estimate. A figure with unknown ones is a lower bound.
qwix is in the same run if it is installed.

Needs: libtpu (`pip install "jaxfp8[tpu]" qwix`), no TPU.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import topologies

import jaxfp8 as fp8

SLICES = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2"}
RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
UNKNOWN = 10**12  # XLA prints about 2^63 where it has no estimate


def step_of(name: str) -> Callable[..., Any]:
    """`step(x, w, g, state)`: y and the gradients of x and w."""
    if name == "bfloat16":
        return lambda x, w, g, state: _with_gradients(jnp.matmul, x, w, g)
    if name == "qwix":
        return lambda x, w, g, state: _with_gradients(_by_qwix(w.shape[1]), x, w, g)
    recipe = getattr(fp8.recipes, name)()

    def step(x: Any, w: Any, g: Any, state: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            y = fp8.dot(*params, recipe=recipe, state=state)
            return _inject(y, g), y

        return fp8.value_and_grad(loss, has_aux=True)((x, w), state)

    return step


def _with_gradients(multiply: Callable[..., Any], x: Any, w: Any, g: Any) -> Any:
    y, pull = jax.vjp(multiply, x, w)
    return y, pull(g)


@jax.custom_vjp
def _inject(y: Any, g: Any) -> Any:
    """A loss whose gradient of y is g, without an operation."""
    return jnp.float32(0)


_inject.defvjp(lambda y, g: (jnp.float32(0), g), lambda g, _: (g, jnp.zeros_like(g)))


def _by_qwix(features: int) -> Callable[..., Any]:
    import qwix

    e4m3, e5m2 = fp8.E4M3.dtype, fp8.E5M2.dtype
    rule = qwix.QtRule(module_path=".*", weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2)
    layer = nn.Dense(features, use_bias=False, dtype=jnp.bfloat16)

    class Model(nn.Module):  # qwix needs a module around its layers
        inner: nn.Module = layer

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return self.inner(x)

    model = qwix.quantize_model(Model(), qwix.QtProvider([rule]))
    return lambda x, w: model.apply({"params": {"inner": {"kernel": w}}}, x)


def figures(name: str, chip: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    devices = topologies.get_topology_desc(topology_name=SLICES[chip], platform="tpu").devices
    there = jax.sharding.SingleDeviceSharding(devices[0])
    of = functools.partial(jax.ShapeDtypeStruct, sharding=there)
    m, k, n = shape
    x, w, g = (of(size, jnp.bfloat16) for size in ((m, k), (k, n), (m, n)))
    state = None
    if name in RECIPES:
        recipe = getattr(fp8.recipes, name)()
        state = fp8.init_state(recipe)
        state = jax.tree.map(
            lambda a: of(a.shape, a.dtype), fp8.settle(state) if recipe.rows else state
        )
    compiled = jax.jit(step_of(name)).lower(x, w, g, state).compile()
    cycles = [int(each) for each in re.findall(r'estimated_cycles":"(\d+)"', compiled.as_text())]
    return {
        "contender": name,
        "chip": chip,
        "cycles": sum(each for each in cycles if each < UNKNOWN),
        "unknown": sum(each >= UNKNOWN for each in cycles),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| chip | contender | Mcycles | bfloat16's over these | unknown | temporaries, MiB |"]
    lines.append("|---|---|---|---|---|---|")
    base = {row["chip"]: row["cycles"] for row in rows if row["contender"] == "bfloat16"}
    for row in rows:
        ratio = f"{base[row['chip']] / row['cycles']:.2f}" if row["chip"] in base else "–"
        lines.append(
            f"| {row['chip']} | {row['contender']} | {row['cycles'] / 1e6:.2f} | {ratio} | "
            f"{row['unknown']} | {row['temporary_bytes'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    contenders = ("bfloat16", *RECIPES, *(["qwix"] if importlib.util.find_spec("qwix") else []))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", choices=SLICES, default=list(SLICES))
    parser.add_argument("--contenders", nargs="+", choices=contenders, default=list(contenders))
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 5120, 13824))
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    rows = []
    for chip in given.chips:
        for name in given.contenders:
            rows.append(figures(name, chip, tuple(given.shape)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    packages = ("jax", "jaxlib", "libtpu", "flax", *(["qwix"] if "qwix" in contenders else []))
    result = {
        "command": " ".join(["python benchmarks/programs/tpu_cycles.py", *sys.argv[1:]]),
        "shape": list(given.shape),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no TPU",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "unit": "cycles that XLA estimates for one forward and backward pass on one device",
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
