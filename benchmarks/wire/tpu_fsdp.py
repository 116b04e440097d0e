"""Bytes that an FSDP train step sends between 8 and 64 cores of TPU 7x, per recipe.

The programs are compiled, not run.

    python benchmarks/wire/tpu_fsdp.py --json benchmarks/wire/results/tpu_fsdp.json

The model is a scan of layers, each with two weights that all cores split. The results of matmuls
are saved for the backward pass, and weights are gathered once more there, with and without FP8.

Needs: libtpu (`pip install "jaxfp8[tpu]"`), no TPU.
"""

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

LAYERS, D, F, TOKENS = 4, 8192, 16384, 1024  # tokens on one core
SLICES = {8: "tpu7x:2x2x1", 64: "tpu7x:2x4x4"}
RECIPES = {
    "bfloat16": fp8.recipes.identity(),
    **{
        name: getattr(fp8.recipes, name)()
        for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8")
    },
}
KEEP = jax.checkpoint_policies.save_only_these_names("product")
MIB = 2**20


def compiled(recipe: fp8.Recipe, cores: int) -> jax.stages.Compiled:
    devices = topologies.get_topology_desc(topology_name=SLICES[cores], platform="tpu").devices
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    dot = functools.partial(fp8.dot, recipe=recipe, w_shard=Shard(0, "fsdp"))

    def layer(h: Any, given: Any) -> tuple[Any, None]:
        (up, down), (of_up, of_down) = given
        # Otherwise XLA may split the features of activations, and sum results over cores.
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("fsdp")))
        hidden = checkpoint_name(dot(h, up, state=of_up), "product")
        y = checkpoint_name(dot(jax.nn.gelu(hidden), down, state=of_down), "product")
        return h + y, None

    def step(params: Any, states: Any, x: Any) -> Any:
        def loss(params: Any, states: Any) -> Any:
            y, _ = jax.lax.scan(jax.checkpoint(layer, policy=KEEP), x, (params, states))
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        return fp8.value_and_grad(loss)(params, states)

    def on(spec: P, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = on(P(None, "fsdp"), LAYERS, D, F), on(P(None, "fsdp"), LAYERS, F, D)
    state = fp8.settle(fp8.init_state(recipe)) if recipe.rows else fp8.init_state(recipe)
    states = jax.tree.map(lambda a: on(P(), LAYERS, *a.shape, dtype=a.dtype), (state, state))
    gradients = NamedSharding(mesh, P(None, "fsdp"))
    shardings = (None, (gradients, gradients), None)  # as the weights
    x = on(P("fsdp"), cores, TOKENS, D)
    return jax.jit(step, out_shardings=shardings).lower(params, states, x).compile()


def figures(name: str, cores: int) -> dict[str, Any]:
    """The bytes that one core sends in a step, by collective and dtype."""
    recipe, sent = RECIPES[name], {}
    program = compiled(recipe, cores)
    for transfer in fp8.programs.wire_report(program).transfers:
        key = f"{transfer.kind} {transfer.dtype}"
        sent[key] = sent.get(key, 0) + round(transfer.wire_bytes)
    return {"recipe": name, "cores": cores, "sent": dict(sorted(sent.items()))}


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| cores | recipe | {' | '.join(KINDS)} | sum | of bfloat16's |"]
    lines.append("|---" * (len(KINDS) + 4) + "|")
    of_bfloat16 = {}
    for row in rows:
        kinds = [
            sum(n for key, n in row["sent"].items() if key.startswith(f"{kind} ")) for kind in KINDS
        ]
        total = sum(row["sent"].values())
        base = of_bfloat16.setdefault(row["cores"], total)
        numbers = " | ".join(f"{each / MIB:.0f}" for each in (*kinds, total))
        lines.append(f"| {row['cores']} | {row['recipe']} | {numbers} | {total / base:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cores", type=int, nargs="+", choices=SLICES, default=list(SLICES))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    rows = []
    for cores in given.cores:
        for name in given.recipes:
            rows.append(figures(name, cores))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    packages = ("jax", "jaxlib", "libtpu")
    result = {
        "command": " ".join(["python benchmarks/wire/tpu_fsdp.py", *sys.argv[1:]]),
        "layers": LAYERS, "shape": [D, F], "tokens": TOKENS, "slices": SLICES,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no TPU",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "unit": "bytes that one core sends in a step",
        "rows": rows,
    }  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"MiB that one core sends in a step:\n\n{table(rows)}")


if __name__ == "__main__":
    main()
