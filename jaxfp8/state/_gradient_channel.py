"""The gradient channel: the next state as the cotangent of the state.

Some training loops know `jax.value_and_grad` only. They differentiate all variables, and overwrite
the variables of collection `_overwrite_with_gradient` with their gradients. MaxText, axlearn and
flax's own FP8 layers do so. For these loops the backward rule here decodes the ledger of a state,
commits, and returns the state of the next step in the place of a gradient.

**JAX adds cotangents, and a sum of states is no state.** So each state must have one use, in one
backward pass per optimizer step:

- A second use that can be seen while tracing raises an error (`Use`).
- Any other sum, mean or scaling is found at the next use. The fingerprints do not fit then
  (`_identity.py`). The scales of the matmul become NaN. The state stays as it was found, so that
  `fp8.check_state` can name the cause.
"""

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, FP8StateError, PyTree
from jaxfp8.sharding._amax import check_axes, types_show_varying, vary_everywhere
from jaxfp8.state._commit import commit_one
from jaxfp8.state._identity import check_at_use, is_known, known_scales, tag_fits, tag_state
from jaxfp8.state._ledger import (
    check_named,
    decode,
    read_reduce_axes,
    reduce_over_mesh,
    zero_ledgers,
)
from jaxfp8.state._state import MatmulState, Probe, SeenAmax, map_states

# Uses of an array: a state in the gradient channel may be used once in a trace.
#
# JAX adds the cotangents of all uses. With `state_channel="gradient"` these are states, and a sum
# of states is no state. The seal of a `Released` (`optim/`) is such an array, too.


@dataclasses.dataclass(eq=False)
class _Traced:
    """A traced array."""

    array: weakref.ReferenceType[Any]  # its memory may be used again, so an address is no identity
    uses: list["Use"]  # the first one of each trace that a gradient goes through


# An entry lives as long as one of its uses, which the trace holds.
_traced: weakref.WeakValueDictionary[int, _Traced] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """One use of an array while a function is traced."""

    traced: _Traced | None  # None if the array is no tracer
    trace: Any  # the branches of `lax.cond` may each use a state once, and have their own traces

    @classmethod
    def of(cls, array: Any) -> "Use":
        if not isinstance(array, jax.core.Tracer):
            return cls(None, None)
        traced = _traced.get(id(array))
        if traced is None or traced.array() is not array:
            traced = _traced[id(array)] = _Traced(weakref.ref(array), [])
        return cls(traced, jax.extend.core.get_opaque_trace_state(convention="jaxfp8"))

    def is_second(self) -> bool:
        """Whether a gradient goes through an earlier use, too. A forward rule calls it."""
        if self.traced is None:
            return False
        first = next((use for use in self.traced.uses if use.trace == self.trace), None)
        if first is None:
            self.traced.uses.append(self)
        return first not in (None, self)  # JAX may run the forward rule of a use several times


def check_one_use(use: Use) -> None:
    """Raise FP8StateError if a gradient goes through another use of the state, too."""
    if use.is_second():
        raise FP8StateError(
            'a state with state_channel="gradient" is used twice in one loss, by a shared '
            "layer or by tied layers. JAX would add the states of both uses. Use "
            "fp8.value_and_grad and state_channel=None. Without flax, call "
            "fp8.state.in_gradient_channel(state) once, and pass what fp8.fork gives to the "
            "matmuls, with state_channel=None. For a use that the loss does not train, pass "
            "jax.lax.stop_gradient(fp8.freeze(state))."
        )


# The channel: a custom gradient that decodes, commits, and returns the next state.

Named = tuple[str, ...] | None  # the mesh axes of `reduce_axes=`


def in_gradient_channel(state: PyTree, *, reduce_axes: Sequence[str] | None = None) -> PyTree:
    """States whose gradients are the states of the next step.

    `state_channel="gradient"` of a matmul calls it. Call it yourself, once, if a state has several
    uses: pass its result to all of them, with `state_channel=None`. `fp8.fork` makes the maximum
    of their amaxes exact.

    Args:
      state: a tree of states, in a loss that `jax.grad` differentiates with respect to it.
      reduce_axes: names of the mesh axes over which amaxes are reduced. It is needed inside
        `shard_map(check_vma=False)` and `pmap`, where JAX's types do not give them.

    Returns:
      The tree of states for the matmuls of this loss.

    Raises:
      TypeError: if `reduce_axes` is one name, and not a sequence of names.
      FP8StateError: for a state that `fp8.value_and_grad` already collects, or if `reduce_axes` is
        missing. Later, if the state is used twice or is not differentiated.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> def loss_fn(w, state, x):
      ...     first, second = fp8.fork(fp8.state.in_gradient_channel(state))
      ...     h = fp8.dot(x, w, recipe=recipe, state=first)
      ...     return jnp.sum(fp8.dot(h, w, recipe=recipe, state=second))
      >>> w, state, x = jnp.eye(4), fp8.init_state(recipe), jnp.ones((3, 4))
      >>> grads, state = jax.grad(loss_fn, argnums=(0, 1))(w, state, x)
      >>> state.amax_history[:, -1].round(3)
      Array([1., 1., 1.], dtype=float32)
    """
    return map_states(functools.partial(_one, named=read_reduce_axes(reduce_axes)), state)


def _one(state: MatmulState, *, named: Named) -> MatmulState:
    if state.probe is not None:
        if state.probe.channel == "gradient":
            return state
        raise FP8StateError(
            'a matmul has state_channel="gradient", but fp8.value_and_grad collects its state. A '
            "state leaves the backward pass by one channel. Drop state_channel, or use "
            "jax.value_and_grad over all variables, and overwrite the state with its gradient."
        )
    check_named(named, 'reduce_axes= of this call or layer with state_channel="gradient"')
    if types_show_varying():
        named = None  # types say over which axes an amax is reduced
    check_axes(named or ())
    ledger, known = _collect(Use.of(state.scale), named, check_at_use(state))
    return dataclasses.replace(state, probe=Probe(ledger, known, named, "gradient"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _collect(use: Use, named: Named, state: MatmulState) -> tuple[Array | None, Array]:
    """The ledger and the scales of a probe. The cotangent of `state` is the next state."""
    del use, named
    return _ledger_and_scales(state)


def _ledger_and_scales(state: MatmulState) -> tuple[Array | None, Array]:
    return None if state.frozen else vary_everywhere(zero_ledgers(state)), _scales(state)


@jax.jit  # traced and lowered once for all equal layers
def _scales(state: MatmulState) -> Array:
    """`known_scales`, but NaN for all rows of a matmul with a broken one.

    A multiplier of 1 keeps a broken row from being taken for an unset one.
    """
    broken = _broken(state)
    multipliers, scales = jnp.split(known_scales(state), 2, axis=-1)
    multipliers = jnp.where(broken, np.float32(1.0), multipliers)
    scales = jnp.where(broken, np.float32(np.nan), scales)
    return jnp.concatenate([multipliers, scales], axis=-1)


def _broken(state: MatmulState) -> Array:
    """bool[..., 1], whether a row of the matmul is that of no run.

    A row of zeros is unset. JAX gives it for a layer that the loss does not use.
    """
    known = is_known(state) & tag_fits(state)
    zero = (state.fingerprint == 0) & (state.scale == 0) & jnp.all(state.amax_history == 0, axis=-1)
    return jnp.any(~(known | zero), axis=-1, keepdims=True)


def _forward_rule(use: Use, named: Named, state: MatmulState) -> tuple[Any, MatmulState]:
    del named
    # JAX calls this rule only if it differentiates with respect to the state.
    check_one_use(use)
    return _ledger_and_scales(state), state


def _backward_rule(
    use: Use, named: Named, state: MatmulState, cotangents: Any
) -> tuple[MatmulState]:
    del use
    if state.frozen:
        return (state,)  # its scales have a cotangent of zeros, so JAX calls this rule
    ledger, _ = cotangents
    (amax,) = reduce_over_mesh([decode(ledger)], [state], named)
    new = tag_state(commit_one(state, SeenAmax(amax, state.rows)))
    broken = _broken(state)

    def kept(old: Array, new: Array) -> Array:
        return jnp.where(broken[..., None] if old.ndim > broken.ndim else broken, old, new)

    return (jax.tree.map(kept, state, new),)


_collect.defvjp(_forward_rule, _backward_rule)
