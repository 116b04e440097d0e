"""A state as bytes, for frameworks that cast a whole model to a shorter dtype, its state too.

A cast to bfloat16 would round scales and amaxes, and fingerprints would not fit. So each float32 is
kept as its four bytes: four floats from 0 to 255. bfloat16 and float16 hold these numbers exactly.

An average of models (EMA) also averages these bytes, and bytes that are no whole numbers have no
meaning. Such a state counts as unset: each tensor is quantized with its current amax.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.recipes._recipe import Row
from jaxfp8.state._gradient_channel import Use
from jaxfp8.state._state import LEAVES, MatmulState

_ROUNDING = 2.0**-10
"""Above the error of a mean over devices of equal bytes, in float32."""

Leaves = dict[str, Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["rows"])
@dataclasses.dataclass(frozen=True)
class StateBytes:
    """The state of one matmul, whose arrays survive a cast.

    Attributes:
      leaves: the bytes of each array of the state, [..., 4] of any floating dtype, by its name.
      rows: the tensor and the quantizer of each row (static).
    """

    leaves: Leaves
    rows: tuple[Row, ...]


def to_bytes(state: Any) -> Any:
    """The bytes of a state; () for recipes without state.

    Example:
      >>> import jaxfp8 as fp8
      >>> to_bytes(fp8.init_state(fp8.recipes.delayed())).leaves["amax_history"].shape
      (3, 16, 4)
    """
    if not isinstance(state, MatmulState):
        return state
    return StateBytes(_split(state), state.rows)


def from_bytes(held: Any) -> Any:
    """The state, whose gradient is a state too. Anything but `StateBytes` is returned unchanged.

    Args:
      held: what `to_bytes` returned, after any cast.

    Returns:
      A `MatmulState`, unset if `held` is an average of several states. If its cotangent is the next
      state, the cotangent of `held` has the bytes of the next state.

    Raises:
      FP8StateError: while a gradient is traced, if the state has been used before.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> short = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), to_bytes(state))
      >>> bool((from_bytes(short).fingerprint == state.fingerprint).all())
      True
    """
    if not isinstance(held, StateBytes):
        return held
    # `dot_general` sees another array in each call, so it cannot find a second use of the state.
    use = Use.of(held.leaves["scale"])
    return _joined(use, held.rows, {n: x.astype(jnp.float32) for n, x in held.leaves.items()})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _joined(use: Use, rows: tuple[Row, ...], leaves: Leaves) -> MatmulState:
    del use
    # A state of zeros is unset.
    whole = jnp.all(jnp.stack([_is_whole(leaf) for leaf in leaves.values()]))
    arrays: Any = {n: jnp.where(whole, _float(x), np.float32(0)) for n, x in leaves.items()}
    return MatmulState(**arrays, probe=None, rows=rows)


def _forward_rule(use: Use, rows: tuple[Row, ...], leaves: Leaves) -> tuple[MatmulState, None]:
    use.differentiate()
    return _joined(use, rows, leaves), None


def _backward_rule(use: Use, rows: tuple[Row, ...], _: None, new: MatmulState) -> tuple[Leaves]:
    del use, rows
    return (_split(new),)


_joined.defvjp(_forward_rule, _backward_rule)


def _split(state: MatmulState) -> Leaves:
    """The four bytes of each value, as f32[..., 4]."""
    return {
        name: lax.bitcast_convert_type(getattr(state, name), jnp.uint8).astype(jnp.float32)
        for name in LEAVES
    }


def _is_whole(leaf: Array) -> Array:
    return jnp.all(abs(leaf - jnp.round(leaf)) < _ROUNDING)


def _float(leaf: Array) -> Array:
    """The values f32[...] of bytes f32[..., 4].

    A sum of bytes may be above 255. Clipped, its fingerprint does not fit (`state/_identity.py`).
    """
    whole = jnp.clip(jnp.round(leaf), 0, 255).astype(jnp.uint8)
    return lax.bitcast_convert_type(whole, jnp.float32)
