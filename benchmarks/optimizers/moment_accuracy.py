"""How exact are stored moments, beside the rule of COAT's code and beside float32?

    python benchmarks/optimizers/moment_accuracy.py --json FILE

Four tables. A moment has groups of 128 values of several kinds.

- store: one array is stored and read. The error is the rms relative error of values that are not 0.
  For a second moment, `up` is the largest factor by which a value is rounded up, and `zeros` (in
  the JSON) is the part of these values that becomes 0.
- train: the moments of Adam after some steps. Gradients are normal, times the scales of the kind.
  Those of `constant` are the same in all of a group. Half of `dying` become 0 after 350 steps.
  The error of nu is relative to float32's nu. That of mu is relative to the deviation that mu has
  for float32's nu, because mu crosses 0: `sqrt(nu (1-b1)/(1+b1))`. That of the update is the rms
  over the last 100 steps, relative to that of float32's update (to 0.01, where that is smaller).
  All are rms over the values with a nu above 0 in float32.
- small: gradients `scale * (1 + 0.5 normal)`. `moved` is the movement of a value over that with
  float32, and `largest` the largest update, in learning rates. Scales are 1 to 1e-6 in each group.
- fit: the loss of least squares over that with float32. The outputs have weights over eight orders
  of magnitude in their gradients, but not in the loss that is reported.
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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _moment_pairs import B1, GROUP, PAIRS, Pair

GROUPS = 16
B2 = (0.95, 0.999)
EPS = 1e-12  # less than the smallest root of nu, so that eps hides no error
LAST, SEGMENT, DYING = 100, 500, 350


def scales_of(seed: int = 0) -> dict[str, Any]:
    """The scale of each value's gradient, float32 [groups, 128]."""
    rng, shape = np.random.default_rng(seed), (GROUPS, GROUP)
    half = np.arange(GROUP) % 2 == 0
    scales = {
        "constant": np.ones(shape),
        "normal": np.ones(shape),
        "wide": 10.0 ** rng.uniform(-8, 0, shape),
        "sparse": rng.uniform(size=shape) < 0.1,
        "mixed": np.broadcast_to(np.where(half, 1, 1e-4), shape),
        "outlier": np.where(np.arange(GROUP) == 7, 1e4, np.ones(shape)),
        "dying": np.ones(shape),
    }
    return {name: np.asarray(x, np.float32) for name, x in scales.items()}


def arrays_of(seed: int = 1) -> dict[str, Any]:
    """Arrays to store. Of `dying` values half are small after 0 to 400 steps without gradients."""
    rng, shape = np.random.default_rng(seed), (GROUPS, GROUP)
    arrays = {name: x * rng.normal(size=shape) for name, x in scales_of().items()}
    steps = rng.integers(0, 400, shape) * (np.arange(GROUP) % 2)
    arrays["dying"] = arrays["dying"] * 0.95**steps
    arrays["constant"] = np.full(shape, 0.37)
    arrays["constant to 1e-3"] = 0.37 * (1 + 1e-3 * rng.uniform(-1, 1, shape))
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


def rms(x: Any, where: Any) -> float:
    x = np.asarray(x, np.float64)[np.asarray(where)]
    return float(np.sqrt(np.mean(x**2)))


def stored_errors(pair: Pair) -> dict[str, Any]:
    """The errors of one store, for each kind."""
    rows = {}
    for kind, x in arrays_of().items():
        some = x != 0
        safe = np.where(some, x, 1)
        first = jax.jit(lambda x: pair.store(x, True))(x)
        second = np.asarray(jax.jit(lambda x: pair.store(x, False))(x * x), np.float64)
        ratio = second / np.square(safe, dtype=np.float64)
        rows[kind] = {
            "mu": rms((np.asarray(first, np.float64) - x) / safe, some),
            "nu": rms(ratio - 1, some),
            "up": float(ratio[some].max()),
            "zeros": float(np.mean(second[some] == 0)),
        }
    return rows


def gradients_of(key: Any, step: Any, scales: Any) -> Any:
    half = jnp.arange(GROUP) % 2 == 0
    noise = jax.random.normal(jax.random.fold_in(key, step), (len(scales), GROUPS, GROUP))
    grads = {name: x * noise[i] for i, (name, x) in enumerate(scales.items())}
    grads["constant"] = jnp.broadcast_to(grads["constant"][:, :1], (GROUPS, GROUP))
    grads["dying"] = jnp.where(half & (step >= DYING), 0, grads["dying"])
    return grads


def segment(pair: Pair, carry: Any, first: Any, b2: Any) -> Any:
    """`SEGMENT` steps of a pair and of float32, and squares of updates in the `LAST` ones."""
    scales, key = scales_of(), jax.random.key(2)
    mine, theirs = pair.adam(b2=b2, eps=EPS), PAIRS["Float32"].adam(b2=b2, eps=EPS)
    zeros = jax.tree.map(jnp.zeros_like, scales)
    carry = carry or (mine.init(zeros), theirs.init(zeros))

    def step(carry: Any, index: Any) -> tuple[Any, None]:
        mine_state, their_state, differences, squares = carry
        grads = gradients_of(key, first + index, scales)
        a, mine_state = mine.update(grads, mine_state)
        b, their_state = theirs.update(grads, their_state)
        counts = index >= SEGMENT - LAST
        differences = jax.tree.map(
            lambda d, a, b: d + jnp.where(counts, (a - b) ** 2, 0), differences, a, b
        )
        squares = jax.tree.map(lambda s, b: s + jnp.where(counts, b**2, 0), squares, b)
        return (mine_state, their_state, differences, squares), None

    carry, _ = jax.lax.scan(step, (*carry, zeros, zeros), jnp.arange(SEGMENT))
    mu, nu = pair.moments(carry[0])
    mu32, nu32 = PAIRS["Float32"].moments(carry[1])
    return carry[:2], (mu, nu, mu32, nu32, *carry[2:])


def training_errors(pair: Pair, b2: float, steps: int) -> dict[str, Any]:
    """The errors of moments and updates after the first segment, and after the last one."""
    start, further = (jax.jit(functools.partial(segment, pair)) for _ in range(2))
    carry, found = start(None, 0, b2)
    rows = {str(SEGMENT): errors_of(*found)}
    for first in range(SEGMENT, steps, SEGMENT):
        carry, found = further(carry, first, b2)
    return rows | {str(steps): errors_of(*found)}


def errors_of(mu: Any, nu: Any, mu32: Any, nu32: Any, differences: Any, squares: Any) -> Any:
    rows = {}
    for kind in mu:
        some = np.asarray(nu32[kind]) > np.finfo(np.float32).tiny
        true = np.where(some, np.asarray(nu32[kind], np.float64), 1)
        deviation = np.sqrt(true * (1 - B1) / (1 + B1))
        update = np.maximum(np.sqrt(np.asarray(squares[kind]) / LAST), 0.01)
        rows[kind] = {
            "mu": rms((np.asarray(mu[kind]) - mu32[kind]) / deviation, some),
            "nu": rms(np.asarray(nu[kind]) / true - 1, some),
            "update": rms(np.sqrt(np.asarray(differences[kind]) / LAST) / update, some),
        }
    return rows


LEVELS = 10.0 ** -np.arange(7)


def small_entries(pair: Pair, b2: Any, steps: int) -> Any:
    """The movement and the largest update of values, [groups, 128] each. It is traced."""
    tx, key = pair.adam(b2=b2, eps=EPS), jax.random.key(3)
    scales = jnp.resize(jnp.asarray(LEVELS, jnp.float32), (GROUP,))
    zeros = jnp.zeros((GROUPS, GROUP))

    def step(carry: Any, index: Any) -> tuple[Any, None]:
        state, moved, largest = carry
        noise = jax.random.normal(jax.random.fold_in(key, index), zeros.shape)
        updates, state = tx.update({"w": scales * (1 + 0.5 * noise)}, state)
        u = updates["w"]
        return (state, moved + u, jnp.maximum(largest, jnp.abs(u))), None

    carry, _ = jax.lax.scan(step, (tx.init({"w": zeros}), zeros, zeros), jnp.arange(steps))
    return carry[1:]


def small_results(b2: float, steps: int) -> dict[str, Any]:
    """Movement over float32's, and the largest update, for each level of each pair."""
    found = {}
    for name, pair in PAIRS.items():
        run = jax.jit(lambda b2, pair=pair: small_entries(pair, b2, steps))
        found[name] = [np.asarray(x) for x in run(b2)]
    rows = {}
    for name, (moved, largest) in found.items():
        ratio = moved / found["Float32"][0]
        columns = [np.arange(GROUP) % len(LEVELS) == i for i in range(len(LEVELS))]
        rows[name] = {
            f"{level:g}": {
                "moved": float(ratio[:, column].mean()),
                "largest": float(largest[:, column].max()),
            }
            for level, column in zip(LEVELS, columns, strict=True)
        }  # fmt: skip
    return rows


def fit(pair: Pair, b2: float, steps: int) -> float:
    """The mean loss of 128 outputs. Their gradients have weights of 1e-8 to 1."""
    keys = jax.random.split(jax.random.key(4), 3)
    weights = 10.0 ** jax.random.uniform(keys[0], (GROUP,), minval=-8, maxval=0)
    true = jax.random.normal(keys[1], (64, GROUP))
    rate = optax.cosine_decay_schedule(1e-2, steps)
    tx = optax.chain(pair.adam(b2=b2, eps=EPS), optax.scale_by_learning_rate(rate))

    def step(carry: Any, index: Any) -> tuple[Any, None]:
        w, state = carry
        key, noise = jax.random.split(jax.random.fold_in(keys[2], index))
        x = jax.random.normal(key, (32, 64))
        error = x @ (w - true) + 0.1 * jax.random.normal(noise, (32, GROUP))
        updates, state = tx.update({"w": x.T @ error / 32 * weights}, state)
        return (w + updates["w"], state), None

    @jax.jit
    def run() -> Any:
        w = jnp.zeros_like(true)
        (w, _), _ = jax.lax.scan(step, (w, tx.init({"w": w})), jnp.arange(steps))
        return jnp.mean(jnp.sum((w - true) ** 2, 0)) + 0.1**2

    return float(run())


def show(title: str, rows: dict[str, dict[str, Any]], figures: list[str]) -> None:
    print(f"\n{title}: {' / '.join(figures)}")
    kinds = list(next(iter(rows.values())))
    width = max(9 * len(figures), *(len(kind) + 2 for kind in kinds))
    print(" " * 14 + "".join(f"{kind:>{width}}" for kind in kinds))
    for name, row in rows.items():
        cells = ("/".join(f"{row[kind][x]:.3g}" for x in figures) for kind in kinds)
        print(f"{name:14}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="1,000 steps, and only b2=0.95")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    steps, b2s = (1000, B2[:1]) if given.quick else (given.steps, B2)
    if steps % SEGMENT:
        parser.error(f"--steps {steps}: give a multiple of {SEGMENT}")

    tables: dict[str, Any] = {"train": {}, "small": {}, "fit": {}}
    tables["store"] = {name: stored_errors(pair) for name, pair in PAIRS.items()}
    show("store", tables["store"], ["mu", "nu", "up"])
    for b2 in b2s:
        errors = {name: training_errors(pair, b2, steps) for name, pair in PAIRS.items()}
        tables["train"][str(b2)] = errors
        for after in (str(SEGMENT), str(steps)):
            rows = {name: errors[name][after] for name in PAIRS}
            show(f"train, b2={b2}, {after} steps", rows, ["mu", "nu", "update"])
        tables["small"][str(b2)] = small_results(b2, steps)
        show(f"small, b2={b2}, {steps} steps", tables["small"][str(b2)], ["moved", "largest"])
        losses = {name: fit(pair, b2, steps) for name, pair in PAIRS.items()}
        rows = {name: {"loss": {"x": x / losses["Float32"]}} for name, x in losses.items()}
        tables["fit"][str(b2)] = losses
        show(f"fit, b2={b2}, over float32's {losses['Float32']:.4g}", rows, ["x"])
    if given.json:
        result = {
            "command": " ".join(["python benchmarks/optimizers/moment_accuracy.py", *sys.argv[1:]]),
            "hardware": f"{platform.machine()} {jax.default_backend()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "optax")},
            "steps": steps,
            "eps": EPS,
            **tables,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
