"""Whether an optimizer couples parameters, found by numbers.

Released layers are updated one after another. At the update of a layer the gradients of other
layers do not exist. So a norm over all gradients cannot be computed. A small tree shows whether the
optimizer needs one: does the update of one parameter change with the gradient of another?
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfp8._typing import PyTree
from jaxfp8.optim._carriers import is_float

_STEPS = (1.0, 0.01, 0.02)
"""The sizes of gradients. With smaller later steps, moments remember the first one."""
_LARGEST = 4  # of an axis


def check_uncoupled(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise ValueError if an update couples parameters, or if this cannot be seen.

    The parameters of the probe have the structure of `params`, and axes of up to 4. In a tree of
    one parameter, a list of two copies stands in its place. A number in the optimizer state that
    depends on several gradients, such as a common step size, also couples parameters.

    Args:
      tx: the optimizer.
      params: the parameters of one layer, or their types.

    Example:
      >>> check_uncoupled(optax.adam(1e-3), {"w": jnp.ones((3, 4))})
      >>> check_uncoupled(optax.clip_by_global_norm(1.0), {"w": jnp.ones((3, 4))})
      Traceback (most recent call last):
      ...
      ValueError: the optimizer couples parameters: the update of ... changes ...
    """
    if len(jax.tree.leaves(params)) < 2:
        params = jax.tree.map(lambda x: [x, x], params)
    found = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    with jax.ensure_compile_time_eval():
        # Weights of zero: the master weight of a small update is then the update itself.
        small = jax.tree.map(
            lambda x: jnp.zeros(tuple(min(n, _LARGEST) for n in x.shape), x.dtype), params
        )
        alone, numbers = _updates(tx, small, None)
        readers: dict[int, set[str]] = {}  # of each number, the gradients that change it
        if not any(np.any(update) for update in alone):
            raise ValueError(
                f"the optimizer gave updates of 0 in {len(_STEPS)} steps, so it cannot be seen "
                "whether it couples parameters. If it uses no norm over all gradients, write "
                "release(tx, per_layer=True)."
            )
        for large in range(len(paths)):
            changed, others = _updates(tx, small, large)
            for i, (one, other) in enumerate(zip(numbers, others, strict=True)):
                if not np.array_equal(one, other, equal_nan=True):
                    readers.setdefault(i, set()).add(paths[large])
            for i, path in enumerate(paths):
                if i != large and not np.array_equal(alone[i], changed[i], equal_nan=True):
                    raise ValueError(
                        f"the optimizer couples parameters: the update of {path} changes if the "
                        f"gradient of {paths[large]} is large. Each layer is updated before the "
                        "gradients of other layers exist, so no norm over all of them can be "
                        "used. Clip per layer: release(tx, per_layer=True) applies the optimizer "
                        "to each layer alone, as jax.vmap(tx.update) does. Or clip each "
                        "parameter: optax.clip_by_block_rms, optax.adaptive_grad_clip."
                    )

        common = next((found for found in readers.values() if len(found) > 1), None)
        if common:
            raise ValueError(
                "the optimizer couples parameters: a number in its state depends on the gradients "
                f"of {', '.join(sorted(common))}. Each layer is updated before the gradients of "
                "other layers exist. release(tx, per_layer=True) accepts it, with a number for "
                "each layer."
            )


def _updates(tx: Any, params: PyTree, large: int | None) -> tuple[list[Any], list[Any]]:
    """The updates of each parameter in all steps, if one has large gradients from the start.

    The second result is what the numbers in the optimizer state are after each step.
    """
    leaves, flat = jax.tree.flatten(params)
    treedef: Any = flat  # jax gives it no type
    draw = np.random.default_rng(0)
    state, steps, numbers = tx.init(params), [], []
    update = jax.jit(tx.update)  # JAX keeps the program, by the function
    for size in _STEPS:
        grads = []
        for i, leaf in enumerate(leaves):
            # In float16 no gradient would be above the norms that are usual with a loss scale.
            dtype = jnp.float32 if leaf.dtype == jnp.float16 else leaf.dtype
            factor = 0.125 * float(jnp.finfo(dtype).max) ** 0.4 if i == large else 1e-3
            values = draw.normal(size=leaf.shape) * size * factor
            grads.append(jnp.asarray(values, dtype))
        updates, state = update(jax.tree.unflatten(treedef, grads), state, params)
        steps.append(treedef.flatten_up_to(updates))
        params = optax.apply_updates(params, updates)
        numbers.append([x for x in jax.tree.leaves(state) if is_float(x.dtype) and not x.ndim])
    # An update is an array, or an `Overwrite` with one.
    of_each = [
        np.stack([np.asarray(jax.tree.leaves(update)[0], np.float64) for update in of_one])
        for of_one in zip(*steps, strict=True)
    ]
    return of_each, [np.stack([*map(np.asarray, each)]) for each in zip(*numbers, strict=True)]
