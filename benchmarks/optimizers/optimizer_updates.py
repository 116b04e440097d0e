r"""What an update of each optimizer costs: bytes of its state, its time, and bytes that it moves.

    python benchmarks/optimizers/optimizer_updates.py \
        --json benchmarks/optimizers/results/optimizer_updates_cpu.json
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python benchmarks/optimizers/optimizer_updates.py --h200 \
        --json benchmarks/optimizers/results/optimizer_updates_h200.json

The update is that of one weight. It runs on the CPU, or on the GPU if jax has one: a round times
each optimizer once, and a time is a ratio to optax's float32 AdamW (or Muon) of the same round. On
a GPU one time is that of `CALLS` updates in a row, and optimizers with a kernel are timed, too.

With `--h200` the update is compiled for an H200, which need not be there. The bytes are what its
kernels read and write. Their floor is one read of the gradient, and one read and one write of each
state and of the weight.

Needs: the wheels of jax[cuda13] and triton for `--h200`, no GPU.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib

from jaxfp8.optim import (
    FP8,
    BFloat16,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    Int8,
    adamw,
    fused_adamw,
    with_master_weights,
    with_moment_formats,
)

CALLS = 20
"""How many updates are timed together on a GPU, so that the wait at the end is a small part."""
EIGHT = BFloat16Plus(bits=8)
FP8_LM = {"mu": FP8(), "nu": Float16()}
INT8_MUON = {"mu": Int8(companding=False), "nu": Int8()}

# name: optimizer, dtypes of weight and gradient.
OPTIMIZERS: dict[str, tuple[Any, str, str]] = {
    "optax AdamW": (optax.adamw(1e-3), "float32", "float32"),
    "BFloat16": (adamw(1e-3, mu=BFloat16(), nu=BFloat16()), "float32", "float32"),
    "FP8-LM": (
        with_master_weights(adamw(1e-3, **FP8_LM), master=Float16()),
        "bfloat16",
        "bfloat16",
    ),
    "COAT": (adamw(1e-3, mu=ExpandedFP8(), nu=ExpandedFP8()), "float32", "float32"),
    "Int8": (adamw(1e-3), "float32", "float32"),
    "Int8, master of 24 bits": (
        with_master_weights(adamw(1e-3), master=EIGHT),
        "bfloat16",
        "bfloat16",
    ),
    "optax Muon": (optax.contrib.muon(1e-3), "float32", "float32"),
    "8-bit Muon": (with_moment_formats(optax.contrib.muon(1e-3), INT8_MUON), "float32", "float32"),
}
# They need jax-triton, and their kernel runs on GPUs only.
FUSED: dict[str, tuple[Any, str, str]] = {
    "fused COAT": (fused_adamw(1e-3, moments=ExpandedFP8()), "float32", "float32"),
    "fused Int8": (fused_adamw(1e-3), "float32", "float32"),
    "fused Int8, master of 24 bits": (fused_adamw(1e-3, master=EIGHT), "bfloat16", "bfloat16"),
}


def step_of(tx: Any) -> Any:
    """A jitted update, which overwrites state and weight."""

    def step(grads: Any, state: Any, params: Any) -> Any:
        # Results in the order of the arguments: JAX pairs donated arrays with results of their
        # type. In another order XLA copies.
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    return jax.jit(step, donate_argnums=(1, 2))


def types_of(tx: Any, weight: str, gradient: str, side: int) -> tuple[Any, Any, Any]:
    """The types of gradient, state and weight."""
    params = {"w": jax.ShapeDtypeStruct((side, side), weight)}
    grads = {"w": jax.ShapeDtypeStruct((side, side), gradient)}
    return grads, jax.eval_shape(tx.init, params), params


def size_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def here(names: list[str], side: int, rounds: int, calls: int) -> list[dict[str, Any]]:
    """The times on the device of this process."""
    runs: dict[str, Any] = {}
    for name in names:
        tx, weight, gradient = (OPTIMIZERS | FUSED)[name]
        w = {"w": jax.random.normal(jax.random.key(0), (side, side)).astype(weight)}
        grads = {"w": jax.random.normal(jax.random.key(1), (side, side)).astype(gradient)}
        step = step_of(tx)
        state = jax.jit(tx.init)(w)
        compiled = step.lower(grads, state, w).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        runs[name] = [compiled, grads, state, w, temporary, []]
    for turn in range(rounds + 1):
        for run in runs.values():
            step, grads, _, _, _, seconds = run
            start = time.perf_counter()
            for _ in range(calls):
                run[2], run[3] = step(grads, run[2], run[3])
            jax.block_until_ready(run[3])
            if turn:  # the first one warms up
                seconds.append((time.perf_counter() - start) / calls)
    rows = []
    for name in names:
        *_, temporary, seconds = runs[name]
        base = runs["optax Muon" if "Muon" in name else "optax AdamW"][-1]
        ratios = sorted(mine / theirs for mine, theirs in zip(seconds, base, strict=True))
        grads, state, w = types_of(*(OPTIMIZERS | FUSED)[name], side)
        floor = size_of(grads) + 2 * size_of(state) + 2 * size_of(w)
        rows.append({
            "optimizer": name,
            "state_bytes": round(size_of(state) / side**2, 3),
            "weight_bytes": round(size_of(w) / side**2, 3),
            "temporary_bytes": round(temporary / side**2, 3),
            "floor_bytes": round(floor / side**2, 2),
            "milliseconds": round(1e3 * statistics.median(seconds), 3),
            "time_over_optax": round(statistics.median(ratios), 2),
            "spread": [round(ratios[len(ratios) // 4], 2), round(ratios[-1 - len(ratios) // 4], 2)],
        })  # fmt: skip
    return rows


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "u16": 2, "f32": 4}
_BYTES |= {"s32": 4, "u32": 4}
_SHAPE = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"}


def moved(text: str) -> int:
    """Bytes that the kernels of a program's entry read and write."""

    def size(type: str) -> int:
        return sum(
            _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in _SHAPE.findall(type)
        )

    types: dict[str, str] = {}
    total = 0
    for line in text[text.index("\nENTRY") :].splitlines():
        if not (found := _LINE.match(line)):
            continue
        name, type, op, operands = found.groups()
        types[name] = type
        if op not in _FREE:
            names = re.findall(r"%([\w.\-]+)", operands)
            total += size(type) + sum(size(types.get(each, "")) for each in names)
    return total


def for_h200(names: list[str], side: int) -> list[dict[str, Any]]:
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding

    description = Path(__file__).parents[2] / "tests/deviceless/h200.txtpb"
    devices = topologies.get_topology_desc(
        "h200", "cuda", topology="1x1x1", target_config=description.read_text()
    ).devices
    mesh = Mesh(devices, ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = []
    for name in names:
        tx, *dtypes = (OPTIMIZERS | FUSED)[name]
        with jax.set_mesh(mesh):
            given = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(mesh, jax.P())
                ),
                types_of(tx, *dtypes, side),
            )
            compiled = step_of(tx).lower(*given).compile()
        grads, state, w = given
        floor = size_of(grads) + 2 * size_of(state) + 2 * size_of(w)
        total = moved(compiled.as_text())
        rows.append({
            "optimizer": name,
            "floor_bytes": round(floor / side**2, 2),
            "moved_bytes": round(total / side**2, 2),
            "over_floor": round(total / floor, 2),
            "temporary_bytes": round(
                compiled.memory_analysis().temp_size_in_bytes / side**2, 2
            ),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--h200", action="store_true", help="compile for an H200, run nothing")
    parser.add_argument("--side", type=int, default=2048, help="of the weight (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    if given.h200:
        # Muon multiplies matrices, so bytes are not what its update costs.
        names = [name for name in (OPTIMIZERS | FUSED) if "Muon" not in name]
        rows = for_h200(names, given.side)
        hardware = "compiled for NVIDIA H200, not run"
    elif jax.default_backend() == "gpu":
        names = [name for name in (OPTIMIZERS | FUSED) if "Muon" not in name]
        rows = here(names, given.side, given.rounds, CALLS)
        hardware = jax.devices()[0].device_kind
    else:
        rows = here([*OPTIMIZERS], given.side, given.rounds, 1)
        hardware = f"{platform.machine()} cpu, {os.cpu_count()} cores"
    for row in rows:
        print(json.dumps(row), flush=True)
    result = {
        "command": " ".join(["python benchmarks/optimizers/optimizer_updates.py", *sys.argv[1:]]),
        "shape": [given.side, given.side],
        "rounds": given.rounds,
        "hardware": hardware,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "optax")},
        "unit": "bytes a parameter; time over that of optax in the same round, with quartiles",
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
