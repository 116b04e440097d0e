"""`value_and_grad` for losses with quantizer state.

Gradients, and the state of the next step beside them.

An unset scale makes a cast wait for the amax of its own tensor: one more read. So that no later
step pays for the first, the whole differentiated loss is compiled twice, with and without unset
scales, and one `lax.cond` chooses. That doubles compile time and costs the steady state nothing.
Selecting per use would read every tensor twice for ever (no cast shares a kernel with its amax; 9 %
more bytes for four GPT blocks on an H200), and a `cond` per use is turned into that select.
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
      loss_fn: `loss_fn(params, state, *args, **kwargs) -> loss` (or `(loss, aux)`), differentiated
        with respect to params.
      has_aux: as in `jax.value_and_grad`; aux must be a pytree of arrays.
      commit: return the state of the next step; else what was seen, for `fp8.merge_seen` over
        microbatches and one `fp8.commit` per optimizer step.
      reduce_axes: mesh axes over which amaxes are combined, where types cannot tell:
        `shard_map(check_vma=False)`.

    Returns:
      A function `(params, state, *args, **kwargs) -> (loss, grads, new_state)`; loss is `(loss,
      aux)` with has_aux.

    Raises:
      FP8StateError: for a second argument that is no tree of states; for a mesh whose types do not
        tell.

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
                f"inside shard_map(check_vma=False) or pmap over {manual_axes()} types do not tell "
                "over which mesh axes amaxes have to be combined; name them: "
                "fp8.value_and_grad(..., reduce_axes=(...)), all but those of pipeline stages."
            )
        if named and manual_axes() and types_tell():
            raise ValueError(
                f"reduce_axes={named} is not used here: types tell over which axes a value varies. "
                "Drop it."
            )
        check_axes(named or ())
        state = map_states(_checked, state)
        ledgers = jax.tree.map(_vary_everywhere, zero_ledgers(state))

        def step(all_set: bool) -> tuple[Any, PyTree, PyTree]:
            def loss(params: PyTree, ledgers: PyTree) -> Any:
                probed = with_probes(state, ledgers, all_set=all_set, reduce_axes=named)
                out = loss_fn(params, probed, *args, **kwargs)
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
    """`step(all_set)`, chosen by whether any scale is unset."""
    if not states:
        return step(True)
    unset = functools.reduce(jnp.maximum, [_any_unset(s.scale) for s in states])
    if not isinstance(unset, jax.core.Tracer):
        return step(not bool(unset))
    # Collectives inside the branches: all devices have to take the same one.
    unset = pmax(unset, manual_axes() if not types_tell() else varying(unset))
    return lax.cond(unset > 0, functools.partial(step, False), functools.partial(step, True))


@custom_vmap
def _any_unset(scale: Array) -> Array:
    """1 if any scale is unset, else 0.

    Over the examples of a vmap as well, so that `cond` stays a branch.
    """
    return jnp.max((scale == 0).astype(jnp.float32), initial=0.0)


@_any_unset.def_vmap
def _any_unset_batched(size: int, mapped: list[bool], scale: Array) -> tuple[Array, bool]:
    del size, mapped
    return _any_unset(scale), False


def _vary_everywhere(ledger: Array) -> Array:
    """So that backward rules emit no collective of their own; one `pmax` follows at the end."""
    missing = tuple(sorted(set(manual_axes()) - varying(ledger))) if types_tell() else ()
    return lax.pcast(ledger, missing, to="varying") if missing else ledger


def _seen(named: tuple[str, ...] | None, state: MatmulState, amax: Array) -> SeenAmax:
    axes = (
        varying(amax) - varying(state.scale)
        if types_tell()
        else set(named or ()) & set(manual_axes())
    )
    return SeenAmax(pmax(amax, axes), state.rows)
