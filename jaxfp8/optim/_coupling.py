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

_STEPS = (1.0, 0.01, 0.02)
"""The sizes of gradients. With smaller later steps, moments remember the first one."""
_LARGEST = 4  # of an axis


def check_uncoupled(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise ValueError if an update couples parameters, or if this cannot be seen.

    The parameters of the probe have the structure of `params`, and axes of up to 4. A tree of one
    parameter is replaced by two copies of it.

    Args:
      tx: the optimizer.
      params: the parameters of one layer, or their types.

    Example:
      >>> check_uncoupled(optax.adam(1e-3), {"w": jnp.ones((3, 4))})
      >>> check_uncoupled(optax.clip_by_global_norm(1.0), {"w": jnp.ones((3, 4))})
      Traceback (most recent call last):
      ...
      ValueError: the optimizer couples parameters: the update of [1] changes ...
    """
    if len(jax.tree.leaves(params)) < 2:
        params = jax.tree.leaves(params) * 2
    found = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    with jax.ensure_compile_time_eval():
        # Weights of zero: the master weight of a small update is then the update itself.
        small = jax.tree.map(
            lambda x: jnp.zeros(tuple(min(n, _LARGEST) for n in x.shape), x.dtype), params
        )
        alone = _updates(tx, small, None)
        if not any(np.any(update) for update in alone):
            raise ValueError(
                f"the optimizer gave updates of 0 in {len(_STEPS)} steps, so it cannot be seen "
                "whether it couples parameters. If it uses no norm over all gradients, write "
                "release(tx, per_layer=True)."
            )
        for large in range(len(paths)):
            changed = _updates(tx, small, large)
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


def _updates(tx: Any, params: PyTree, large: int | None) -> list[Any]:
    """The updates of each parameter in all steps, if one has large gradients from the start."""
    leaves, flat = jax.tree.flatten(params)
    treedef: Any = flat  # jax gives it no type
    draw = np.random.default_rng(0)
    state, steps = tx.init(params), []
    for size in _STEPS:
        grads = []
        for i, leaf in enumerate(leaves):
            factor = 0.125 * float(jnp.finfo(leaf.dtype).max) ** 0.4 if i == large else 1e-3
            values = draw.normal(size=leaf.shape) * size * factor
            grads.append(jnp.asarray(values, leaf.dtype))
        updates, state = tx.update(jax.tree.unflatten(treedef, grads), state, params)
        steps.append(treedef.flatten_up_to(updates))
    # An update is an array, or an `Overwrite` with one.
    return [
        np.stack([np.asarray(jax.tree.leaves(update)[0], np.float64) for update in of_one])
        for of_one in zip(*steps, strict=True)
    ]
