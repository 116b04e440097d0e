"""Two weights whose gradients become 0 in some entries, and how far these entries move then.

`stopped_gradients.py` has the tables, and `tests/optim/test_dither.py` some rows as tests.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8.optim import release

BEFORE, REST = 100, 200  # steps with gradients, and steps after them that are not counted
RATE = 1e-3


class Optimizer(NamedTuple):
    """A way to update the two weights."""

    init: Callable[[Any], Any]  # of the two weights, zeros
    step: Callable[[Any, Any], tuple[Any, Any]]  # state, gradients -> state, updates
    rate: float  # in its updates


def of_optax(tx: Any, rate: float = RATE) -> Optimizer:
    def step(state: Any, grads: Any) -> tuple[Any, Any]:
        # The parameters have no effect, because no weight decays.
        updates, state = tx.update(grads, state, jax.tree.map(jnp.zeros_like, grads))
        return state, updates

    return Optimizer(tx.init, step, rate)


def of_release(tx: Any) -> Optimizer:
    """Gradient release. The loss of a layer is linear, so that its gradient is what we choose."""
    stack = release(tx, per_layer=True)  # skips a check, which cannot read a traced b2

    def init(params: Any) -> Any:
        return stack.init({"w": jnp.stack([params["columns"], params["rows"]])})

    def loss(layers: Any, grads: Any) -> Any:
        def layer(x: Any, of_layer: Any) -> Any:
            return x + jnp.sum(of_layer[0]["w"] * of_layer[1]), None

        return stack.scan(layer, jnp.float32(0), (layers, grads))[0]

    def step(layers: Any, grads: Any) -> tuple[Any, Any]:
        new = jax.grad(loss)(layers, jnp.stack([grads["columns"], grads["rows"]]))
        columns, rows = new.params["w"] - layers.params["w"]
        return new, {"columns": columns, "rows": rows}

    return Optimizer(init, step, RATE)


def stopped(rows: int, columns: int) -> dict[str, Any]:
    """Which entries stop: of each 16 columns one, or an eighth of the rows."""
    column, row = np.zeros((rows, columns), bool), np.zeros((rows, columns), bool)
    column[:, [i for i in range(columns) if i % 16 == 5]] = True
    row[3::8] = True
    return {"columns": column, "rows": row}


def movement(opt: Optimizer, masks: Any, gradients: Any, left: Any) -> Any:
    """|sum of updates| of all entries after the `REST`, in learning rates. It is traced."""

    def step(carry: Any, xs: Any) -> tuple[Any, None]:
        state, moved = carry
        index, gradient = xs
        grads = {
            name: jnp.where(mask & (index >= BEFORE), gradient * left, gradient)
            for name, mask in masks.items()
        }
        state, updates = opt.step(state, grads)
        counts = index >= BEFORE + REST
        moved = jax.tree.map(lambda m, u: jnp.where(counts, m + u / opt.rate, m), moved, updates)
        return (state, moved), None

    zeros = {name: jnp.zeros(mask.shape) for name, mask in masks.items()}
    xs = jnp.arange(len(gradients)), gradients
    (_, moved), _ = jax.lax.scan(step, (opt.init(zeros), zeros), xs)
    return jax.tree.map(jnp.abs, moved)
