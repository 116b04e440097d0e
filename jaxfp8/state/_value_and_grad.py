"""`value_and_grad` for losses with quantizer state.

It returns the gradients, and the state of the next step.

A cast with an unset scale needs the amax of its own tensor, which is one more read. Only first
steps have unset scales, and later steps must not pay for that read. So the whole differentiated
loss is compiled twice, with and without unset scales. One `lax.cond` chooses. This doubles the
compile time and costs later steps nothing.

The alternative is a select in each use. It would read every tensor twice in all steps, because no
cast then shares a kernel with its amax. For four GPT blocks on an H200, that is 9 % more bytes. A
`cond` in each use becomes the same select.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, PyTree
from jaxfp8.sharding._amax import check_axes, manual_axes, pmax, types_tell, varying
from jaxfp8.state._commit import commit_known
from jaxfp8.state._identity import check_layout, explained, known
from jaxfp8.state._ledger import decode
from jaxfp8.state._probes import with_probes, without_probes, zero_ledgers
from jaxfp8.state._state import MatmulState, SeenAmax, is_state
from jaxfp8.state._trees import map_states


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    commit: bool = True,
    reduce_axes: Sequence[str] | None = None,
) -> Callable[..., tuple[Any, PyTree, PyTree]]:
    """`jax.value_and_grad` of a loss whose second argument is quantizer state.

    The gradients hold no quantizer state: clip, scale, average and cast them as you like.

    Args:
      loss_fn: `loss_fn(params, state, *args, **kwargs) -> loss` (or `(loss, aux)`). It is
        differentiated with respect to params.
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
    if isinstance(reduce_axes, str):
        raise TypeError(
            f"reduce_axes={reduce_axes!r} must be a sequence of mesh axis names; write "
            f"({reduce_axes!r},)."
        )
    named = None if reduce_axes is None else tuple(reduce_axes)

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
        state = map_states(_checked, state)
        ledgers = jax.tree.map(_vary_everywhere, zero_ledgers(state))

        def step(all_set: bool) -> tuple[Any, PyTree, PyTree]:
            def loss(params: PyTree, ledgers: PyTree) -> Any:
                probed = with_probes(state, ledgers, all_set=all_set, reduce_axes=named)
                out = loss_fn(params, probed, *args, **kwargs)
                # Outside of the loss states have no probe. aux may hold a state that had one.
                return (out[0], without_probes(out[1])) if has_aux else out

            value, (grads, cotangents) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)(
                params, ledgers
            )
            return value, grads, jax.tree.map(decode, cotangents)

        states = jax.tree.leaves(state, is_leaf=is_state)
        with explained(states):
            value, grads, amaxes = _with_or_without_unset(step, states)
        seen = jax.tree.map(functools.partial(_seen, named), state, amaxes, is_leaf=is_state)
        return value, grads, commit_known(state, seen) if commit else seen

    return wrapped


def _checked(state: MatmulState) -> MatmulState:
    check_layout(state)
    return known(state)


def _with_or_without_unset(step: Callable[[bool], Any], states: Sequence[MatmulState]) -> Any:
    """`step(all_set)`, where `all_set` is False if any scale is unset."""
    if not states:
        return step(True)
    unset = functools.reduce(jnp.maximum, [_any_unset(s.scale) for s in states])
    if not isinstance(unset, jax.core.Tracer):
        return step(not bool(unset))
    # Branches contain collectives. If devices took different branches, they would wait for each
    # other forever.
    unset = pmax(unset, manual_axes() if not types_tell() else varying(unset))
    return lax.cond(unset > 0, functools.partial(step, False), functools.partial(step, True))


@custom_vmap
def _any_unset(scale: Array) -> Array:
    """1 if any scale is unset, else 0.

    Under vmap it is one number for all examples. With a mapped predicate JAX would turn `cond` into
    a select that runs both branches.
    """
    return jnp.max((scale == 0).astype(jnp.float32), initial=0.0)


@_any_unset.def_vmap
def _any_unset_batched(size: int, mapped: list[bool], scale: Array) -> tuple[Array, bool]:
    del size, mapped
    return _any_unset(scale), False


def _vary_everywhere(ledger: Array) -> Array:
    """The ledger, with a type that varies over all manual mesh axes.

    Backward rules then emit no collective for its cotangent. One `pmax` follows at the end.
    """
    missing = tuple(sorted(set(manual_axes()) - varying(ledger))) if types_tell() else ()
    return lax.pcast(ledger, missing, to="varying") if missing else ledger


def _seen(named: tuple[str, ...] | None, state: MatmulState, amax: Array) -> SeenAmax:
    axes = (
        varying(amax) - varying(state.scale)
        if types_tell()
        else set(named or ()) & set(manual_axes())
    )
    return SeenAmax(pmax(amax, axes), state.rows)
