"""Whether an optimizer couples parameters, read from its program.

Released layers are updated one after another. At the update of a layer the gradients of other
layers do not exist. So a norm over all gradients cannot be computed. The traced program of one
layer shows whether the optimizer needs one: is the update of one parameter computed from another?
"""

import itertools
from typing import Any

import jax
import optax

from jaxfp8._typing import PyTree
from jaxfp8.jaxprs._data_flow import labels_of, union

_CURE = (
    "Each layer is updated before the gradients of other layers exist, so nothing can be computed "
    "from all of them. release(tx, per_layer=True) applies the optimizer to each layer alone, as "
    "jax.vmap(tx.update) does"
)


def check_uncoupled(tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise ValueError if an update may couple parameters.

    `tx.init` and `tx.update` are traced, and nothing is computed. The update of a parameter must
    not depend on another parameter or its gradient, in any number of steps. An array of the
    optimizer state must not depend on several of them. Whether values are finite may depend on all.

    In a tree of one parameter, a list of two copies stands in its place. An exception of `tx` is
    raised as it is, with a note.

    Args:
      tx: the optimizer.
      params: the parameters of one layer, or their types.

    Example:
      >>> import jax.numpy as jnp
      >>> check_uncoupled(optax.adam(1e-3), {"w": jnp.ones((3, 4))})
      >>> check_uncoupled(optax.clip_by_global_norm(1.0), {"w": jnp.ones((3, 4))})
      Traceback (most recent call last):
      ...
      ValueError: the optimizer couples parameters: the update of ['w'] depends on ...
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    alone = len(names) == 1
    if alone:
        params = jax.tree.map(lambda x: [x, x], params)
        names = [names[0], f"{names[0]} of another layer"]
    try:
        updates, state = _labels_after_steps(tx, params)
    except Exception as error:
        error.add_note(
            "release traced tx.init(params) and tx.update(grads, state, params) with the "
            f"parameters of one layer{', as a list of two copies' if alone else ''}. It gives no "
            "other arguments, such as value=, because a layer is updated before the loss is known. "
            "Use an optimizer that needs none. If the optimizer works with one layer and couples "
            "no parameters, write release(tx, per_layer=True), which traces nothing here."
        )
        raise
    for i, name in enumerate(names):
        others = updates[i] & ~(1 << i)
        if others:
            raise ValueError(
                f"the optimizer couples parameters: the update of {name} depends on the gradient "
                f"or the value of {_listed(others, names)}. {_CURE}. To clip each parameter, use "
                "optax.clip_by_block_rms or optax.adaptive_grad_clip."
            )
    for place, labels in state.items():
        if labels & (labels - 1):  # more than one bit
            raise ValueError(
                f"the optimizer couples parameters: state{place}, an array in its state, depends "
                f"on the gradients or the values of {_listed(labels, names)}. {_CURE}, with such "
                "an array for each layer."
            )


def _labels_after_steps(
    tx: optax.GradientTransformation, params: PyTree
) -> tuple[list[int], dict[str, int]]:
    """What updates and arrays of the state depend on after any number of steps.

    Label i is parameter i, or its gradient.

    Returns:
      the labels of each parameter's update, and those of each array of the state by its path.
    """
    leaves, flat = jax.tree.flatten(params)
    treedef: Any = flat  # jax gives it no type
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    start, state_types = jax.make_jaxpr(tx.init, return_shape=True)(types)
    step, (update_types, new_types) = jax.make_jaxpr(tx.update, return_shape=True)(
        types, state_types, types
    )
    found: Any = jax.tree.structure(new_types)
    needed: Any = jax.tree.structure(state_types)
    if found != needed:
        raise ValueError(
            f"tx.update returns another state than tx.init: {found} instead of {needed}. A "
            "Released needs the same tree of arrays in all steps."
        )
    own = [1 << i for i in range(len(leaves))]
    state = labels_of(start, own)
    while True:
        outs = labels_of(step, [*own, *state, *own])
        new = outs[len(outs) - len(state) :]
        after = [old | each for old, each in zip(state, new, strict=True)]
        # A state remembers earlier steps. So a coupling may need several to reach an update.
        if after == state:
            break
        state = after
    # An update is an array, an `Overwrite` with one, or nothing.
    sizes = [len(jax.tree.leaves(each)) for each in treedef.flatten_up_to(update_types)]
    left = iter(outs)
    updates = [union(itertools.islice(left, size)) for size in sizes]
    places = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state_types)]
    return updates, dict(zip(places, state, strict=True))


def _listed(labels: int, names: list[str]) -> str:
    """The names of labels. A layer may have many parameters, so at most three."""
    found = [name for i, name in enumerate(names) if labels >> i & 1]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more
