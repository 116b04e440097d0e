"""Which matmuls of models that others wrote does `fp8.convert` put into FP8, and is it exact?

Converts each model of a Python file with `keep=()`, and asks whether `identity()` changes a bit of
its results and gradients. Beside it is the count of `_matmul_count.py`, which reads the program of
the unconverted model, and what qwix quantizes.

    python benchmarks/programs/clients.py --models models.py --json result.json
    python benchmarks/programs/clients.py --models models.py --only gemma3 tunix_qwen3

The file has `MODELS: dict[str, Callable[[], tuple]]`. Each function makes (model, inputs, kwargs):
a linen module, or an nnx module, and the arguments of a call. `SOURCES` of the file, if any, goes
to the result. Each model has a process of its own, and takes a minute. One that the JSON file has
already is not converted again.

Needs: a file of models, and what it imports; qwix for its column.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import about_this_machine

COLUMNS = (
    "weights", "share_of_weights", "share_of_all", "forward", "backward", "trees", "counted",
    "counted_flops", "qwix",
)  # fmt: skip


def models_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


# One model. jax is imported in its process only.


class Call:
    """A call of a model as a function of (parameters, other variables, arrays of arguments)."""

    def __init__(self, model: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import flax.linen as nn
        import jax
        from flax import nnx

        leaves, self._structure = jax.tree.flatten((inputs, kwargs))
        self._plain = [None if hasattr(leaf, "shape") else (leaf,) for leaf in leaves]
        self.arrays = [leaf for leaf in leaves if hasattr(leaf, "shape")]
        self._model, self._linen = model, isinstance(model, nn.Module)
        if self._linen:
            key = jax.random.key(0)
            self._rngs = {"params": key, "dropout": key}
            variables = jax.jit(lambda: model.init(self._rngs, *inputs, **kwargs))()
            self.parameters = variables["params"]
            self.others = {name: of for name, of in variables.items() if name != "params"}
        else:
            self._graph, self.parameters, self.others = nnx.split(model, nnx.Param, ...)

    def __call__(self, parameters: Any, others: Any, *arrays: Any) -> Any:
        import jax
        from flax import nnx

        rest = iter(arrays)
        leaves = [next(rest) if leaf is None else leaf[0] for leaf in self._plain]
        args, kwargs = jax.tree.unflatten(self._structure, leaves)
        if self._linen:
            # Quantizer states are an input, and no output.
            changes = [name for name in others if not name.startswith("_overwrite")]
            out = self._model.apply(
                {"params": parameters, **others}, *args, **kwargs, mutable=changes or False,
                rngs={"dropout": self._rngs["dropout"]},
            )  # fmt: skip
        else:
            out = nnx.merge(self._graph, parameters, others)(*args, **kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if is_numbers(leaf)]


def is_numbers(leaf: Any) -> bool:
    import jax

    return hasattr(leaf, "dtype") and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees have the same structure, and leaves of the same bits."""
    import jax
    import numpy as np

    def bits(tree: Any) -> list[Any]:
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_numbers(leaf)]
        return [(x.dtype, x.shape, x.tobytes()) for x in arrays]

    return jax.tree.structure(one) == jax.tree.structure(other) and bits(one) == bits(other)


def zeros_of(grads: Any) -> int:
    """How many parameters have a gradient of exactly 0, which says nothing about bits."""
    import jax
    import numpy as np

    return sum(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(grads))


def results_of(call: Call, parameters: Any) -> Any:
    """The result of a call, and the gradients of the sum of its sines."""
    import jax
    import jax.numpy as jnp

    def loss_fn(parameters: Any) -> tuple[jax.Array, Any]:
        outs = call(parameters, call.others, *call.arrays)
        floats = [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in floats), jnp.zeros(())), outs

    grads, outs = jax.jit(jax.grad(loss_fn, has_aux=True))(parameters)
    return outs, grads


def examine(build: Callable[[], Any]) -> dict[str, Any]:
    """The row of one model."""
    import _matmul_count

    import jaxfp8 as fp8

    start = time.perf_counter()
    model, inputs, kwargs = build()
    plain = Call(model, inputs, kwargs)
    converted, coverage = fp8.convert(
        model, fp8.recipes.identity(), inputs=inputs, arguments=kwargs, keep=()
    )
    in_fp8 = [row for row in coverage if row.recipe]
    products = _matmul_count.count(plain, plain.parameters, plain.others, *plain.arrays)
    flops, counted = sum(row.flops for row in in_fp8), sum(each.flops for each in products)
    mine = Call(converted, inputs, kwargs)
    (out, grads), (own_out, own_grads) = (
        results_of(call, plain.parameters) for call in (plain, mine)
    )
    return {
        "weights": len({row.parameters or row.path for row in in_fp8}),
        "matmuls": len(in_fp8),
        "share_of_weights": round(flops / max(sum(row.flops for row in coverage), 1), 4),
        "share_of_all": round(coverage.share, 4),
        "forward": same_bits(out, own_out),
        "backward": same_bits(grads, own_grads),
        "zero_gradients": zeros_of(grads),
        "trees": same_bits(plain.parameters, mine.parameters),
        "counted": len({each.names for each in products}),
        "counted_matmuls": len(products),
        # What a `cond` chooses from counts with all its branches here.
        "counted_flops": round(flops / max(counted, 1), 4),
        "qwix": qwix_count(model, inputs, kwargs),
        "high_precision": [[r.path, r.type, r.reason] for r in coverage if not r.recipe],
        "seconds": round(time.perf_counter() - start, 1),
    }


def qwix_count(model: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many matmuls of parameters qwix quantizes, and of others. A text if it fails."""
    if importlib.util.find_spec("qwix") is None:
        return "not installed"
    import flax.linen as nn
    import jax
    import qwix
    from qwix._src.utils import flax_util

    found: set[tuple[str, bool]] = set()

    class Counting(qwix.QtProvider):
        def _create_dot_general_qt_config(self, rule: Any, op: str, lhs: Any, rhs: Any) -> Any:
            note(op, any(flax_util.find_param(x) is not None for x in (lhs, rhs)))
            return super()._create_dot_general_qt_config(rule, op, lhs, rhs)

        def ragged_dot(self, *args: Any, **options: Any) -> Any:
            note(f"ragged{len(found)}", True)
            return super().ragged_dot(*args, **options)

    def note(op: str, is_weight: bool) -> None:
        path = "/".join(map(str, flax_util.get_current_module_path()))
        found.add((f"{path}:{op}", is_weight))

    rule = qwix.QtRule(module_path=".*", weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn")
    try:
        if isinstance(model, nn.Module):
            quantized, key = qwix.quantize_model(model, Counting([rule])), jax.random.key(0)
            keys = {"params": key, "dropout": key}
            jax.eval_shape(lambda: quantized.init(keys, *inputs, **kwargs))
        else:
            qwix.quantize_model(model, Counting([rule]), *inputs, **kwargs)
    except Exception as error:
        return f"fails: {first_line(error)}"
    weights = sum(is_weight for _, is_weight in found)
    return {"weights": weights, "others": len(found) - weights}


def first_line(error: BaseException) -> str:
    """The first line of a message, without the paths of this machine."""
    line = next(iter(f"{type(error).__name__}: {error}".splitlines()))
    return re.sub(r"(?<!\w)/[\w.-]+(/[\w.-]+)+", "PATH", line)[:160]


# All models.


def in_a_process(file: Path, name: str, log: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--models", str(file), "--one", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        return {"error": f"exit status {done.returncode}"}
    return json.loads(last)


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [["model", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for name, row in rows.items():
        cells = [row.get(column, row.get("error", "-")) for column in COLUMNS]
        if isinstance(of_qwix := row.get("qwix"), dict):
            cells[-1] = "{weights} + {others}".format(**of_qwix)
        lines.append([name, *map(str, cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="(default: all models)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()
    if given.one:
        try:
            row = examine(models_of(given.models).MODELS[given.one])
        except Exception as error:
            notes = [note for note in getattr(error, "__notes__", ()) if "fp8.convert" in note]
            row = {"error": " ".join([first_line(error), *notes])}
        print(json.dumps(row))
        return

    file = models_of(given.models)
    rows: dict[str, Any] = {}
    if given.json and given.json.exists():
        rows = json.loads(given.json.read_text())["rows"]
    for name in given.only or file.MODELS:
        if name in rows and "error" not in rows[name]:
            continue
        rows[name] = in_a_process(given.models, name, sys.stderr)
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
        if given.json:
            found = {
                "command": "python benchmarks/programs/clients.py --models FILE",
                "sources": getattr(file, "SOURCES", {}), **about_this_machine(), "rows": rows,
            }  # fmt: skip
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
