"""`value_and_grad` for losses with quantizer state.

It returns the gradients, and the state of the next step.

A cast with an unset scale needs the amax of its own tensor, which is one more read. The program
selects between that scale and the stored one at each use, so there is one copy of the loss. (With a
`lax.cond` around two copies the later steps would need no such read. But compiling would take twice
as long, and every run would have a copy that is used once.) `settle` marks the states that need no
such read.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.sharding._amax import check_axes, manual_axes, types_tell
from jaxfp8.state._commit import commit_one, nothing_seen
from jaxfp8.state._high_precision import in_high_precision
from jaxfp8.state._identity import checked, explained, known_scales
from jaxfp8.state._ledger import decode
from jaxfp8.state._over_mesh import axes_named, over_mesh, vary_everywhere
from jaxfp8.state._probes import with_probes, without_probes, zero_ledgers
from jaxfp8.state._stacks import Stacks
from jaxfp8.state._state import SeenAmax, is_state
from jaxfp8.state._trees import map_states
from jaxfp8.weights._quantized_weight import handles_of, with_handles


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
    named = axes_named(reduce_axes)

    @functools.wraps(loss_fn)
    def wrapped(
        params: PyTree, state: PyTree, *args: Any, **kwargs: Any
    ) -> tuple[Any, PyTree, PyTree]:
        if not types_tell() and named is None and jax.tree.leaves(state):
            raise FP8StateError(
                f"inside shard_map(check_vma=False) or pmap over {manual_axes()} types do not say "
                "over which mesh axes an amax is reduced. Name the axes, all but those of pipeline "
                "stages: fp8.value_and_grad(..., reduce_axes=(...))."
            )
        if named and manual_axes() and types_tell():
            raise ValueError(
                f"reduce_axes={named} is not used here. JAX's types say over which axes a value "
                "varies. Drop it."
            )
        check_axes(named or ())
        state = map_states(checked, state)
        if in_high_precision():  # no matmul reads the state
            high = jax.value_and_grad(loss_fn, has_aux=has_aux)
            value, grads = high(params, state, *args, **kwargs)
            return value, grads, state if commit else nothing_seen(state)
        states, flat = jax.tree.flatten(state, is_leaf=is_state)
        structure: Any = flat  # jax gives it no type
        ledgers = jax.tree.map(vary_everywhere, zero_ledgers(state))
        scales = structure.unflatten(map(known_scales, states))

        def loss(handles: PyTree, ledgers: PyTree) -> Any:
            probed = with_probes(state, ledgers, scales, reduce_axes=named)
            out = loss_fn(with_handles(params, handles), probed, *args, **kwargs)
            # Outside of the loss states have no probe. aux may hold a state that had one.
            return (out[0], without_probes(out[1])) if has_aux else out

        with explained(states):
            value, (grads, cotangents) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)(
                handles_of(params), ledgers
            )
        stacks = Stacks.of(states)
        amaxes = stacks.apply(decode, structure.flatten_up_to(cotangents))
        amaxes = over_mesh(amaxes, states, named)
        seen = [SeenAmax(amax, s.rows) for amax, s in zip(amaxes, states, strict=True)]
        new = stacks.apply(commit_one, states, seen) if commit else seen
        return value, grads, structure.unflatten(new)

    return wrapped
