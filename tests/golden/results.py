"""Results and compiled programs of two versions of jaxfp8, compared on one machine with one jax.

    python tests/golden/results.py --write before.npz                 results and CPU programs
    python tests/golden/results.py --write h200.npz --chip h200       programs for an H200, no GPU
    python tests/golden/results.py --compare before.npz after.npz     exit code 1 if worse

Products depend on the order of their sums, so on jax and the CPU: such a file is never committed.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # no driver is needed

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bits import step_of
from flax import linen as nn
from inputs import MATMULS, RECIPES, STEPS

import jaxfp8 as fp8

SIZES = ("temp", "argument", "output", "alias")
_META = "programs"


def results(recipe: fp8.Recipe, name: str) -> dict[str, np.ndarray]:
    """y and the gradients of jitted training steps, and the last state."""
    step, state, arrays = jax.jit(step_of(recipe, MATMULS[name])), fp8.init_state(recipe), {}
    for index in range(len(STEPS)):
        inputs = {key: jnp.asarray(each) for key, each in MATMULS[name].arrays(index).items()}
        y, grads, state = step(state, **inputs)
        for key, value in {"y": y, **grads}.items():
            arrays[f"step {index + 1} / d{key}".replace("dy", "y")] = np.asarray(value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        arrays[f"state{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    return arrays


class Model(nn.Module):
    """Two blocks of an FP8 dense layer each."""

    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for features in (512, 256):
            layer = fp8.linen.FP8Dense(features, recipe=self.recipe, dtype=jnp.bfloat16)
            x = nn.gelu(layer(nn.LayerNorm(dtype=jnp.bfloat16)(x)))
        return x


def program(recipe: fp8.Recipe, chip: str) -> dict[str, float]:
    """The size of a compiled training step of `Model` with AdamW, its arguments donated."""
    model, collection = Model(recipe), fp8.linen.COLLECTION
    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def train_state(variables: Any) -> fp8.linen.TrainState:
        return fp8.linen.TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=optax.adamw(1e-3),
            fp8_state=variables.get(collection, {}),
        )  # fmt: skip

    def step(ts: fp8.linen.TrainState, x: Any) -> Any:
        def loss(params: Any, state: Any, x: Any) -> Any:
            y = model.apply({"params": params, collection: state}, x)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, grads, state = fp8.value_and_grad(loss)(ts.params, ts.fp8_state, x)
        return ts.apply_gradients(grads=grads, fp8_state=state), value

    arguments = jax.eval_shape(train_state, variables), x
    if chip != "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1] / "deviceless"))
        from targets import topology

        place = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arguments
        )
    lowered = jax.jit(step, donate_argnums=0).lower(*arguments)
    compiled = lowered.compile(compiler_options=fp8.Kernels(chip).compiler_options(recipe))
    memory = compiled.memory_analysis()
    instructions = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", compiled.as_text(), re.MULTILINE)
    sizes = {f"{name} bytes": getattr(memory, f"{name}_size_in_bytes") for name in SIZES}
    return sizes | _traffic(compiled) | {"instructions": len(instructions)}


def _traffic(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The bytes that a program reads and writes.

    XLA has no cost analysis of a program for a GPU that is not there, so its text is read.
    """
    if cost := compiled.cost_analysis():
        return {"bytes accessed": cost["bytes accessed"]}
    from program import Program

    read = Program(compiled.as_text())
    return {"bytes accessed": read.traffic(read.entry)}


def write(file: Path, chip: str) -> None:
    arrays, programs = {}, {}
    for name, recipe in RECIPES.items():
        programs[name] = program(recipe, chip)
        print(name, programs[name], flush=True)
        if chip == "cpu":
            for matmul in MATMULS:
                for key, value in results(recipe, matmul).items():
                    arrays[f"{name} / {matmul} / {key}"] = value
    # NumPy cannot store bfloat16, so every array is stored as bytes beside its dtype and shape.
    kinds = {key: f"{value.dtype.name}{list(value.shape)}" for key, value in arrays.items()}
    meta = {"chip": chip, "jax": jax.__version__, "kinds": kinds, _META: programs}
    data = {key: np.frombuffer(value.tobytes(), np.uint8) for key, value in arrays.items()}
    np.savez_compressed(file, **{_META: np.array(json.dumps(meta))}, **data)


def compare(before: Path, after: Path) -> list[str]:
    """One line for each array that differs, and for each program that moves or needs more bytes.

    A change of the number of instructions is printed, and is no failure.
    """
    with np.load(before) as old, np.load(after) as new:
        metas = [json.loads(str(each[_META])) for each in (old, new)]
        for field in ("chip", "jax"):
            first, second = (meta[field] for meta in metas)
            if first != second:
                return [
                    f"{before} is of {field} {first}, {after} of {second}; write both with one."
                ]
        lines = []
        kinds = [meta["kinds"] for meta in metas]
        for key in dict.fromkeys((*kinds[0], *kinds[1])):
            first, second = (kind.get(key, "absent") for kind in kinds)
            if first != second:
                lines.append(f"{key}: was {first}, is {second}")
            elif not np.array_equal(old[key], new[key]):
                count = np.count_nonzero(old[key] != new[key])
                lines.append(f"{key}: {count} of {old[key].size} bytes differ")
    programs = [meta[_META] for meta in metas]
    for name in dict.fromkeys((*programs[0], *programs[1])):
        first, second = (each.get(name, {}) for each in programs)
        for field in dict.fromkeys((*first, *second)):
            was, now = first.get(field), second.get(field)
            if was == now:
                continue
            line = f"{name} / program / {field}: was {was}, is {now}"
            # Fewer aliased bytes mean that a donated buffer is no longer used again.
            worse = None in (was, now) or (now < was if field == "alias bytes" else now > was)
            if worse and field != "instructions":
                lines.append(line)
            else:
                print(f"(no failure) {line}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="OUT.npz")
    what.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument(
        "--chip", default="cpu", help="write programs only, for a chip such as h200"
    )
    given = parser.parse_args()
    if given.compare:
        lines = compare(*given.compare)
        print("\n".join(lines) or "no array differs, no program needs more bytes")
        return bool(lines)
    print(f"{fp8.__file__}, jax {jax.__version__}, {given.chip}")
    write(given.write, given.chip)
    return 0


if __name__ == "__main__":
    sys.exit(main())
