"""Golden bits: what reaches each FP8 matmul, quantizer state and `fp8.quantize`, as hashes.

    python tests/golden/bits.py           compare with bits.json
    python tests/golden/bits.py --write   remake bits.json

Nothing here depends on the order of a float sum, so the hashes hold for every version of jax and
every CPU. `results.py` compares what does depend on them, on one machine.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from inputs import MATMULS, RECIPES, STEPS, Matmul, array, positive

import jaxfp8 as fp8

FILE = Path(__file__).with_name("bits.json")
_Hashes = dict[str, dict[str, str]]


@contextlib.contextmanager
def seen_by_matmuls() -> Iterator[list[tuple[fp8.QuantizedTensor, fp8.QuantizedTensor]]]:
    """The operands of the scaled matmuls that would run inside, in their order.

    The products are zeros. Nothing may depend on them, and compiling them takes longest.

    This is the only access to the inside of jaxfp8. The three matmuls of a training step read
    `multiply` from this module. If they stop doing so, `operands` raises an error.
    """
    home: Any = importlib.import_module("jaxfp8.matmul._call")
    original: Callable[..., Any] = home.multiply
    seen: list[tuple[fp8.QuantizedTensor, fp8.QuantizedTensor]] = []

    def recorded(lhs: Any, rhs: Any, *how: Any) -> Any:
        seen.append((lhs, rhs))
        product = jax.eval_shape(lambda lhs, rhs: original(lhs, rhs, *how), lhs, rhs)
        return jnp.asarray(np.zeros(product.shape, product.dtype))

    home.multiply = recorded
    try:
        with jax.disable_jit():  # so that what is recorded belongs to the caller's trace
            yield seen
    finally:
        home.multiply = original


def digest(values: Any) -> str:
    """48 bits of the SHA-256 of an array: dtype, shape and bytes."""
    values = np.asarray(values)
    head = f"{values.dtype.name}{list(values.shape)}"
    data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    return hashlib.sha256(head.encode() + data).hexdigest()[:12]


def step_of(recipe: fp8.Recipe, matmul: Matmul) -> Callable[..., Any]:
    """`step(state, x, w, g, bias=None)` is (y, gradients of x, w and the bias, the next state).

    The gradient that reaches the matmul is g itself, because the loss is linear in y.
    """

    def step(state: Any, x: Any, w: Any, g: Any, bias: Any = None) -> Any:
        def loss(params: dict[str, Any], state: Any) -> tuple[Any, Any]:
            y = matmul(recipe, state, **params)
            return jnp.sum((y * g).astype(jnp.float32)), y

        params = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
        (_, y), grads, state = fp8.value_and_grad(loss, has_aux=True)(params, state)
        return y, grads, state

    return step


def operands(recipe: fp8.Recipe, name: str) -> _Hashes:
    """The operands of each scaled matmul, and the state after each of three training steps.

    A recipe without state runs one step.
    """
    matmul, state, hashes = MATMULS[name], fp8.init_state(recipe), {}
    step = step_of(recipe, matmul)

    def read(state: Any, arrays: dict[str, Any]) -> tuple[Any, Any]:
        with seen_by_matmuls() as seen:
            *_, state = step(state, **arrays)
        return seen, state

    programs: dict[Any, tuple[Callable[..., Any], Any]] = {}  # a settled state is another structure
    for index in range(len(STEPS)) if recipe.rows else (matmul.hard_steps or (0,)):
        arrays = jax.device_put(matmul.arrays(index))
        leaves, structure = jax.tree.flatten((state, arrays))
        if structure not in programs:
            traced, types = jax.make_jaxpr(read, return_shape=True)(state, arrays)
            run = jax.jit(jax.extend.core.jaxpr_as_fun(traced))
            programs[structure] = run, jax.tree.structure(types)
        run, of_results = programs[structure]
        seen, state = jax.tree.unflatten(of_results, run(*leaves))
        in_fp8 = [each for each in ("fprop", "dgrad", "wgrad") if getattr(recipe, each).in_fp8]
        if len(seen) != len(in_fp8):
            raise RuntimeError(
                f"{len(seen)} scaled matmuls were recorded, but {recipe} runs {len(in_fp8)}; make "
                "`seen_by_matmuls` wrap the name by which the training step calls scaled_matmul."
            )
        for product, pair in zip(in_fp8, seen, strict=True):
            for side, tensor in zip(("lhs", "rhs"), pair, strict=True):
                hashes[f"step {index + 1} / {product} / {side}"] = {
                    "values": digest(tensor.values),
                    "scale": digest(tensor.scale),
                    "granularity": repr(tensor.granularity),
                }
        if recipe.rows:
            leaves = ("scale", "amax_history", "nonfinite_steps", "fingerprint")
            row = {leaf: digest(getattr(state, leaf)) for leaf in leaves}
            hashes[f"step {index + 1} / state"] = row
    return hashes


_TILES = ((1, 32), (32, 1), (32, 32), (1, 128), (128, 128))
_GRANULARITIES = {
    (3, 40, 72): (fp8.PerAxis(0, 1), fp8.PerBlock((32, 32))),
    (150, 200): (fp8.PerTensor(), fp8.PerAxis(0), fp8.PerAxis(1), *map(fp8.PerBlock, _TILES)),
}
_RULES: dict[str, dict[str, Any]] = {
    "float32": {},
    "power_of_two": {"power_of_two": True},
    "E8M0 rceil": {"scale_format": fp8.E8M0, "scale_rounding": "rceil"},
    "E8M0 floor": {"scale_format": fp8.E8M0, "scale_rounding": "floor"},
    "given": {},
}


def quantized(shape: tuple[int, ...], dtype: str, hard: bool) -> _Hashes:
    """`fp8.quantize` in every format, granularity, rule and rounding."""
    x = jax.device_put(array("x", shape, dtype, hard=hard))
    roundings: dict[str, dict[str, Any]] = {
        "nearest": {},
        "stochastic": {"rounding": "stochastic", "key": jax.random.key(7, impl="threefry2x32")},
    }
    cases, scales = {}, {}
    for each, rule in itertools.product(_GRANULARITIES[shape], _RULES):
        if "scale_format" in _RULES[rule] and not isinstance(each, fp8.PerBlock):
            continue
        if rule == "given":
            scales[each] = jax.device_put(positive("scale", each.scale_shape(shape)))
        for format in (fp8.E4M3, fp8.E5M2):
            cases[f"{each!r} / {format!r} / {rule}"] = format, each, rule

    def case(x: Any, scales: Any, format: Any, each: Any, rule: str) -> dict[str, Any]:
        row = {}
        for rounding, how in roundings.items():
            given = {"scale": scales[each]} if rule == "given" else {}
            tensor = fp8.quantize(x, format, each, **_RULES[rule], **given, **how)
            row |= {f"{rounding} values": tensor.values, f"{rounding} scale": tensor.scale}
        return row

    # One program: each call of its own would be one.
    @jax.jit
    def run(x: Any, *given: Any) -> list[dict[str, Any]]:
        by_granularity = dict(zip(scales, given, strict=True))
        return [case(x, by_granularity, *fields) for fields in cases.values()]

    rows = zip(cases, run(x, *scales.values()), strict=True)
    return {name: {part: digest(array) for part, array in row.items()} for name, row in rows}


TABLE: dict[str, Callable[[], _Hashes]] = {
    f"{recipe} / {matmul}": functools.partial(operands, RECIPES[recipe], matmul)
    for recipe, matmul in itertools.product(RECIPES, MATMULS)
} | {
    f"fp8.quantize / {list(shape)} {dtype}{' hard' * hard}": functools.partial(
        quantized, shape, dtype, hard
    )
    for shape, dtype, hard in (
        ((3, 40, 72), "bfloat16", True),
        ((150, 200), "bfloat16", False),
        ((150, 200), "bfloat16", True),
        ((150, 200), "float16", True),
        ((150, 200), "float32", True),
    )
}
"""What makes the hashes of each group of the file."""


def differences(name: str, golden: _Hashes, now: _Hashes) -> list[str]:
    """One line for each array that differs."""
    lines = []
    for key in dict.fromkeys((*golden, *now)):
        before, after = golden.get(key, {}), now.get(key, {})
        for part in dict.fromkeys((*before, *after)):
            if before.get(part) != after.get(part):
                change = f"was {before.get(part, 'absent')}, is {after.get(part, 'absent')}"
                lines.append(f"{name} / {key} / {part}: {change}")
    return lines


def written(hashes: dict[str, _Hashes]) -> str:
    """JSON with one row a line, so that a diff shows what changed."""
    groups = []
    for name, rows in hashes.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        groups.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="remake the file of golden bits")
    parser.add_argument("--file", type=Path, default=FILE, help="default: bits.json beside this")
    given = parser.parse_args()
    print(f"{fp8.__file__}, jax {jax.__version__}")
    hashes = {name: compute() for name, compute in TABLE.items()}
    if given.write:
        given.file.write_text(written(hashes))
        return 0
    golden = json.loads(given.file.read_text())
    rows = ((name, golden.get(name, {}), hashes.get(name, {})) for name in {**golden, **hashes})
    lines = [line for row in rows for line in differences(*row)]
    print("\n".join(lines) or "all bits are equal")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
