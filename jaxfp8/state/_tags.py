"""Tags: how a state shows that it is a mean of states, and not one of them.

With `state_channel="gradient"` JAX treats a state as a gradient. A training loop may then add or
average the states of several backward passes. A sum changes the checksum in the fingerprint. A mean
does not, because the checksum is the same in all of them.

A float32 in [1, 2) has 23 bits after the point, and the checksum takes 16. The channel writes a tag
into the other 7. The tag is computed from the newest amax and the scale of the row. A mean of
states has the mean of their tags, but needs the tag of its own amax and scale.

    fingerprint = checksum + tag * 2^-23,  8 <= tag <= 60,  or tag = 0: not tagged

The tag is a wave of the bits of both numbers. Two properties matter:

- It is steep. It runs through all values while an amax grows by 2^-12. So the mean of the tags of
  two states is not the tag of their mean.
- It is continuous. If an amax changes by its last bit, the tag changes by less than 0.1. A mean of
  equal states over devices rounds, and still passes.

`tag_fits` allows an error of 3. So a mean of states with different amaxes passes in about 1 of 8
rows. The states of one step differ in the rows of x and g, and all rows must pass. So one matmul
hides a mean in about 1 of 60 steps, two matmuls in 1 of 4000.
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

A mean over 7 devices can be 1 unit off, or 2 if the devices are added one after the other. The
error grows with the number of devices that are added so: 3 for 12 of them, 16 for 64.
"""

TAG_ROUNDING = 3.5 * UNIT
"""Above the largest error of a tag: 2 from a mean over 8 devices, 1 because tags are whole."""

_LEAST, _RANGE = 8, 52  # a tag is far enough from 0, "not tagged", and from `TAGS`
# One period of a wave is 2^32. The amaxes of bfloat16 tensors differ by multiples of 2^16, and the
# scales of powers of two by multiples of 2^23. The products of these steps with the factors are
# spread over the period. They are odd, and no two are in a simple ratio.
_FIRST = np.uint32(171_575), np.uint32(141_201)  # of the newest amax, and of the scale
_SECOND = np.uint32(29_777), np.uint32(52_711)


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
      >>> tag_fits(state.fingerprint, want, state.scale + 0.6, state.amax_history)
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
    """The tags f32[..., R], whole numbers, for scale [..., R] and history [..., R, H].

    A wave in the phase of another wave. A sum of waves would be worse: for two states, the tag of
    the mean is the mean of the tags in 1 of 5 rows, and in 1 of 3 for a single wave.
    """
    newest, scale = _bits(history[..., -1]), _bits(scale)
    first = _wave(newest * _FIRST[0] + scale * _FIRST[1])
    phase = newest * _SECOND[0] + scale * _SECOND[1] + first * first * np.uint32(4)
    tag = (_wave(phase) * np.uint32(_RANGE) + np.uint32(2**15)) >> np.uint32(16)
    return tag.astype(np.float32) + np.float32(_LEAST)


def _wave(phase: Any) -> Any:
    """A triangle wave of a phase uint32, from 0 to 2^16 - 1, with the period 2^32.

    It is computed in whole numbers, so every device and every program gets the same tags.
    """
    half = np.uint32(2**31 - 1)
    falls = phase >> np.uint32(31)  # 1 in the second half of the period
    return ((phase & half) ^ (half * falls)) >> np.uint32(15)


def _bits(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(np.uint32)
    return lax.bitcast_convert_type(x, jnp.uint32)
