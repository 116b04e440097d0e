"""Tags: how a state shows that it is a mean of states, and not one of them.

With `state_channel="gradient"` JAX treats a state as a gradient. A training loop may then add or
average the states of several backward passes. A sum changes the checksum in the fingerprint. A mean
does not, because the checksum is the same in all of them.

A float32 in [1, 2) has 23 bits after the point, and the checksum takes 16. The channel writes a tag
into the other 7. The tag is computed from the newest amax and the scale of the row. A mean of
states has the mean of their tags, but needs the tag of its own amax and scale.

    fingerprint = checksum + tag * 2^-23,  8 <= tag <= 60,  or tag = 0: not tagged

The tag is a triangle wave of the bits of both numbers. Two properties matter:

- It is steep. It runs through all values while an amax grows by 2^-12. So the mean of the tags of
  two states is not the tag of their mean.
- It is continuous. If an amax changes by its last bit, the tag changes by less than 0.04. A mean
  of equal states over devices rounds, and still passes.

`tag_fits` allows an error of 2. So a mean of states with different amaxes passes in about 1 of 10
rows. The states of one step differ in the rows of x and g, and all rows must pass. So one matmul
hides a mean in about 1 of 100 steps, two matmuls in 1 of 10000.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8.state._state import MatmulState
from jaxfp8.state._unset import fingerprints

UNIT = 2.0**-23
"""What a tag of 1 adds to a fingerprint: the last bit of a float32 in [1, 2)."""

TAGS = 64 * UNIT
"""Tags are below it: the fingerprints of other rows are at least twice as far away."""

MEAN_ROUNDING = 4 * UNIT
"""The largest error of a mean over devices of equal fingerprints.

A mean over 7 devices can be 1 unit off.
"""

TAG_ROUNDING = 2.5 * UNIT
"""The largest error of a tag: 1 from a mean over devices, and 1 because tags are whole numbers."""

_LEAST, _RANGE = 8, 52  # a tag is far enough from 0, "not tagged", and from `TAGS`
# One period of the wave is 2^32. The amaxes of bfloat16 tensors differ by multiples of 2^16, and
# the scales of powers of two by multiples of 2^23. Modulo 2^32 their products with these factors
# are spread over the period: 0.618 and 0.155 of it for the first, 0.11 and 0.78 for the second.
_FACTORS = np.uint32(19 * 2**16 + 40503), np.uint32(24 * 2**16 + 10129)
_HALF = 2**31


def tagged(state: MatmulState) -> MatmulState:
    """The state, with its exact fingerprints and the tags of its arrays.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> (tagged(state).fingerprint - state.fingerprint) / UNIT
      Array([8., 8., 8.], dtype=float32)
    """
    want = fingerprints(state.rows, state.fingerprint.shape)
    tag = _tag(state.scale, state.amax_history)
    # The select keeps the mesh axes that the state varies over, and XLA removes it.
    exact = jnp.where(state.fingerprint > 0, want, want)
    return dataclasses.replace(state, fingerprint=exact + tag * np.float32(UNIT))


def tag_fits(fingerprint: Any, want: np.ndarray, scale: Any, history: Any) -> Any:
    """Whether rows have the tag of their arrays, or none.

    `want` are the checksums. All arrays are NumPy's, or all are JAX's.

    Example:
      >>> import dataclasses, numpy as np
      >>> import jaxfp8 as fp8
      >>> state = tagged(fp8.init_state(fp8.recipes.delayed()))
      >>> want = fingerprints(state.rows, (3,))
      >>> tag_fits(state.fingerprint, want, state.scale + 0.7, state.amax_history)
      Array([False, False, False], dtype=bool)
    """
    found = fingerprint - want
    untagged = abs(found) < MEAN_ROUNDING
    tag = _tag(scale, history)
    return untagged | (abs(found - tag * np.float32(UNIT)) < TAG_ROUNDING)


def same_fingerprint(found: Any, want: np.ndarray) -> Any:
    """Whether fingerprints are equal, up to a tag and the rounding of a mean over devices.

    Example:
      >>> import numpy as np
      >>> same_fingerprint(np.float32([1.5, 1.75]), np.float32([1.5, 1.5]))
      array([ True, False])
    """
    return (found - want > -MEAN_ROUNDING) & (found - want < TAGS)


def why_not(found: float, want: float) -> str:
    """What a sum or a mean of states is called in messages; "" for another wrong fingerprint.

    Example:
      >>> why_not(1.25, 1.5)
      ''
      >>> why_not(4.5 + 40 * UNIT, 1.5).split(".")[0]
      'This looks like a sum of 3 states'
    """
    if not np.isfinite(found):
        return ""
    count = max(1, round(float(found) / want))
    if not -MEAN_ROUNDING < found / count - want < TAGS:
        return ""
    what = "a mean of states" if count == 1 else f"a sum of {count} states"
    return (
        f'This looks like {what}. state_channel="gradient" takes one backward pass per optimizer '
        "step, and one use of each state. For microbatches use fp8.value_and_grad(commit=False) "
        "and state_channel=None."
    )


def _tag(scale: Any, history: Any) -> Any:
    """The tags f32[..., R], whole numbers, for scale [..., R] and history [..., R, H]."""
    first, second = _FACTORS
    phase = _bits(history[..., -1]) * first + _bits(scale) * second
    # Up in the first half of the period, down in the second. Whole numbers, so that every device
    # and every program computes the same tag.
    rising = np.uint32(_HALF - 1)
    up = ((phase & rising) ^ (rising * (phase >> np.uint32(31)))) >> np.uint32(15)
    tag = _LEAST + ((up * np.uint32(_RANGE) + np.uint32(2**15)) >> np.uint32(16)).astype(np.int32)
    return tag.astype(np.float32)


def _bits(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(np.uint32)
    return lax.bitcast_convert_type(x, jnp.uint32)
