"""`value_and_grad` for losses with quantizer state, and the switch to high precision.

It returns the gradients, and the state of the next step.

A cast with an unset scale needs the amax of its own tensor, which is one more read. The program
selects between that scale and the stored one at each use, so there is one copy of the loss. (With a
`lax.cond` around two copies the later steps would need no such read. But compiling would take twice
as long, and every run would have a copy that is used once.) `settle` marks the states that need no
such read.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxfp8._typing import Array, PyTree
from jaxfp8.recipes._presets import identity
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import check_axes, manual_axes, types_show_varying, vary_everywhere
from jaxfp8.state._commit import commit_one, nothing_seen
from jaxfp8.state._identity import check_at_use
from jaxfp8.state._ledger import (
    check_named,
    decode,
    read_reduce_axes,
    reduce_over_mesh,
    zero_ledgers,
)
from jaxfp8.state._state import MatmulState, Probe, SeenAmax, is_state, map_states
from jaxfp8.state._together import by_groups, groups_of, known_scales_of
from jaxfp8.weights._quantized_weight import handle, is_weight

# Whether the matmuls of a recipe run in high precision, so that a step can be compared.
#
# The switch is a context that JAX knows (`jax.make_user_context`). Every cache of JAX has it in its
# key: those of traces, of loops and of programs. So a step that was traced before is traced once
# more in the context, also its inner `jax.jit` functions. Afterwards the old programs are used
# again.

_switch: Any = jax.make_user_context(False)


@contextlib.contextmanager
def high_precision() -> Iterator[None]:
    """Run all matmuls that are traced in this context as with `recipes.identity()`.

    Quantizer state stays in the trees of the step. No matmul reads it.
    """
    with _switch(True):
        yield


def in_high_precision() -> bool:
    """Whether matmuls run in high precision here."""
    return bool(_switch.value)


def recipe_in_context(
    recipe: Recipe, state: MatmulState | tuple[()] | None
) -> tuple[Recipe, MatmulState | tuple[()] | None]:
    """The recipe and the state that a matmul uses here: its own, or none in high precision."""
    return (identity(), None) if in_high_precision() else (recipe, state)


# The gradient by parameters, handles of weights and probes.


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    commit: bool = True,
    reduce_axes: Sequence[str] | None = None,
) -> Callable[..., tuple[Any, PyTree, PyTree]]:
    """`jax.value_and_grad` of a loss whose second argument is quantizer state.

    The gradients hold no quantizer state: clip, scale, average and cast them as you like. The
    gradient of a weight in FP8 (`fp8.quantize_params`) is one array, in the dtype of the weight.

    Args:
      loss_fn: `loss_fn(params, state, *args, **kwargs) -> loss` (or `(loss, aux)`). It is
        differentiated with respect to params. state is () if no recipe has state.
      has_aux: as in `jax.value_and_grad`. aux must be a pytree of arrays.
      commit: whether to return the state of the next step. If False, the amaxes that were seen are
        returned instead. Merge those of all microbatches with `fp8.merge_seen`. Then call
        `fp8.commit` once per optimizer step.
      reduce_axes: names of the mesh axes over which amaxes are reduced. It is needed inside
        `shard_map(check_vma=False)` and `pmap`, where JAX's types do not give them.

    Returns:
      A function `(params, state, *args, **kwargs) -> (loss, grads, new_state)`. With `has_aux` its
      first result is `(loss, aux)`.

    Raises:
      TypeError: if `reduce_axes` is one name, and not a sequence of names.
      FP8StateError: if the second argument is no tree of states. Also inside a mesh where types do
        not give the axes and `reduce_axes` is missing.
      ValueError: if `reduce_axes` is given where types give the axes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> def loss_fn(params, state, x):
      ...     return jnp.sum(fp8.dot(x, params, recipe=recipe, state=state))
      >>> params, state, x = jnp.ones((4, 2)), fp8.init_state(recipe), jnp.ones((3, 4))
      >>> loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, x)
      >>> state.amax_history[:, -1]
      Array([1., 1., 1.], dtype=float32)
    """
    named = read_reduce_axes(reduce_axes)

    @functools.wraps(loss_fn)
    def wrapped(
        params: PyTree, state: PyTree, *args: Any, **kwargs: Any
    ) -> tuple[Any, PyTree, PyTree]:
        if jax.tree.leaves(state):
            check_named(named, "fp8.value_and_grad(..., reduce_axes=(...))")
        if named and manual_axes() and types_show_varying():
            raise ValueError(
                f"reduce_axes={named} is not used here. JAX's types say over which axes a value "
                "varies. Drop it."
            )
        check_axes(named or ())
        state = map_states(check_at_use, state)
        if in_high_precision():  # no matmul reads the state
            high = jax.value_and_grad(loss_fn, has_aux=has_aux)
            value, grads = high(params, state, *args, **kwargs)
            return value, grads, state if commit else nothing_seen(state)
        states, flat = jax.tree.flatten(state, is_leaf=is_state)
        structure: Any = flat  # jax gives it no type
        ledgers = jax.tree.map(vary_everywhere, zero_ledgers(state))
        groups = groups_of(states)
        scales = structure.unflatten(known_scales_of(groups, states))

        def with_probe(s: MatmulState, ledger: Array, known: Array) -> MatmulState:
            return dataclasses.replace(s, probe=Probe(None if s.frozen else ledger, known, named))

        def loss(handles: PyTree, ledgers: PyTree) -> Any:
            probed = map_states(with_probe, state, ledgers, scales)
            out = loss_fn(_with_handles(params, handles), probed, *args, **kwargs)
            # Outside of the loss states have no probe. aux may hold a state that had one.
            return (out[0], _without_probes(out[1])) if has_aux else out

        value, (grads, cotangents) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)(
            _handles_of(params), ledgers
        )
        amaxes = by_groups(groups, decode, structure.flatten_up_to(cotangents), stored=False)
        amaxes = reduce_over_mesh(amaxes, states, named)
        seen = [SeenAmax(amax, s.rows) for amax, s in zip(amaxes, states, strict=True)]
        new = by_groups(groups, commit_one, states, seen) if commit else seen
        return value, grads, structure.unflatten(new)

    return wrapped


def _handles_of(params: PyTree) -> PyTree:
    """The parameters, with the handle of each weight in its place."""
    return jax.tree.map(lambda n: handle(n) if is_weight(n) else n, params, is_leaf=is_weight)


def _with_handles(params: PyTree, handles: PyTree) -> PyTree:
    """The parameters, with other values of `_handles_of`."""
    return jax.tree.map(
        lambda node, array: (
            dataclasses.replace(node, original=array) if is_weight(node) else array
        ),
        params, handles, is_leaf=is_weight,
    )  # fmt: skip


def _without_probes(tree: PyTree) -> PyTree:
    """The tree without the probes of its states; other nodes do not change."""
    return jax.tree.map(
        lambda n: dataclasses.replace(n, probe=None) if is_state(n) else n, tree, is_leaf=is_state
    )
