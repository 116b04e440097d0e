"""A quantizer state as bytes, for frameworks that cast or average all floats of a model.

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

from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array
from jaxfp8.state._gradient_channel import Use, check_one_use
from jaxfp8.state._state import MatmulState

_ROUNDING = 2.0**-10
"""Above the error of a mean over devices of equal bytes, in float32."""


@register_node
@dataclasses.dataclass(frozen=True)
class StateBytes:
    """The state of one matmul, whose arrays survive a cast.

    Attributes:
      leaves: the state, with the bytes of its arrays, [..., 4] of any floating dtype.
    """

    leaves: MatmulState


def split(state: MatmulState) -> MatmulState:
    """The four bytes of each value, as f32[..., 4]."""
    return jax.tree.map(lambda x: lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.float32), state)


def from_bytes(held: Any) -> Any:
    """The state of a `StateBytes`, after any cast. Anything else is returned unchanged.

    It is unset if `held` is an average of several states. If the cotangent of the state is the next
    state, the cotangent of `held` has its bytes. FP8StateError while a gradient is traced, if the
    state has been used before.
    """
    if not isinstance(held, StateBytes):
        return held
    # `dot_general` sees another array in each call, so it cannot find a second use of the state.
    use = Use.of(held.leaves.scale)
    return _joined(use, jax.tree.map(lambda x: x.astype(jnp.float32), held.leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joined(use: Use, leaves: MatmulState) -> MatmulState:
    del use
    # A state of zeros is unset.
    whole = jnp.all(jnp.stack([_is_whole(leaf) for leaf in jax.tree.leaves(leaves)]))
    return jax.tree.map(lambda x: jnp.where(whole, _float(x), np.float32(0)), leaves)


def _forward_rule(use: Use, leaves: MatmulState) -> tuple[MatmulState, None]:
    check_one_use(use)
    return _joined(use, leaves), None


def _backward_rule(use: Use, _: None, new: MatmulState) -> tuple[MatmulState]:
    del use
    return (split(new),)


_joined.defvjp(_forward_rule, _backward_rule)


def _is_whole(leaf: Array) -> Array:
    return jnp.all(abs(leaf - jnp.round(leaf)) < _ROUNDING)


def _float(leaf: Array) -> Array:
    """The values f32[...] of bytes f32[..., 4].

    A sum of bytes may be above 255. Clipped, its fingerprint does not fit (`state/_identity.py`).
    """
    whole = jnp.clip(jnp.round(leaf), 0, 255).astype(jnp.uint8)
    return lax.bitcast_convert_type(whole, jnp.float32)
