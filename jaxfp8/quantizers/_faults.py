"""Faults of rows of state that come from a file: values that no training run can produce.

Between steps all numbers of a row are finite. Its scale is 0 (unset) or between 2^-126 and 2^126.
With `Delayed.update` more is true:

- An amax in the history is at least 2^-126. An empty slot is 0.
- The staging slot is 0.
- Entries fill the history from its newest end, without gaps.
- A scale is unset if and only if the history is empty.
- The scale is that of the largest entry, or of an entry that was just rotated out.
"""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxfp8.numerics._float32 import TINY
from jaxfp8.numerics._scale import inverse

LARGEST_FALL = 2.0**20
"""How many times larger than all entries of a history the entry that was just rotated out may be.

A loss scale can fall by 2^16 at once, and the amaxes of gradients with it.
"""
_ROUNDING = 1e-6  # relative: about 8 units in the last place of float32


class Fault(NamedTuple):
    """A fault of some rows of a state."""

    leaf: str  # the name of the array with the fault
    rows: np.ndarray  # bool[...], which rows have it
    what: str  # what is wrong, for the message


class DelayedPolicy(Protocol):
    """The part of `Delayed` that decides which scale a history gives."""

    @property
    def history_length(self) -> int:
        """H, the number of entries of a history."""

    @property
    def algorithm(self) -> str:
        """Which amax of the history gives the scale."""

    def multiplier(self, amax: Any) -> Any:
        """The encoding multiplier of an amax."""


def faults_of_values(
    scale: np.ndarray, history: np.ndarray, nonfinite_steps: np.ndarray
) -> list[Fault]:
    """Values that the arrays of a row may not hold, for any quantizer.

    Args:
      scale: float32 [...].
      history: float32 [..., H].
      nonfinite_steps: float32 [...].

    Example:
      >>> import numpy as np
      >>> scale, history, count = (np.zeros(s, np.float32) for s in (2, (2, 3), 2))
      >>> scale[1] = np.nan
      >>> [fault.what for fault in faults_of_values(scale, history, count)]
      ['it must be 0 (unset) or between 2^-126 and 2^126']
    """
    in_range = (scale == 0) | ((scale >= TINY) & (scale <= 1 / TINY))  # False for NaN
    finite = np.all(np.isfinite(history), axis=-1)
    whole = nonfinite_steps == np.floor(nonfinite_steps)
    counts = whole & (nonfinite_steps >= 0) & (nonfinite_steps < np.inf)
    return _found(
        Fault("scale", ~in_range, "it must be 0 (unset) or between 2^-126 and 2^126"),
        Fault("amax_history", ~finite, "every number in it must be finite"),
        Fault("nonfinite_steps", ~counts, "it must be a count of steps, 0 or more"),
    )


def faults_of_delayed(
    quantizer: DelayedPolicy, scale: np.ndarray, history: np.ndarray, nonfinite_steps: np.ndarray
) -> list[Fault]:
    """All faults of rows of delayed scaling. For the arrays see `faults_of_values`.

    Example:
      >>> import numpy as np, jaxfp8 as fp8
      >>> scale, history, count = (np.zeros(s, np.float32) for s in (2, (2, 3), 2))
      >>> history[1, 0] = 7  # the staging slot
      >>> delayed = fp8.quantizers.Delayed(format=fp8.E4M3, history_length=3)
      >>> [fault.what for fault in faults_of_delayed(delayed, scale, history, count)]
      ['slot 0, the staging slot, must be 0 between steps']
    """
    # The check of amaxes below is stricter than that of `faults_of_values`, and replaces it.
    found = [
        fault
        for fault in faults_of_values(scale, history, nonfinite_steps)
        if fault.leaf != "amax_history"
    ]
    amaxes = np.all((history == 0) | ((history >= TINY) & (history < np.inf)), axis=-1)
    staged = amaxes & (history[..., 0] != 0)
    found += _found(
        Fault("amax_history", ~amaxes, "every amax must be 0 or finite and at least 2^-126"),
        Fault("amax_history", staged, "slot 0, the staging slot, must be 0 between steps"),
    )
    if quantizer.history_length > 1:  # else there is only the staging slot
        sound = np.ones(scale.shape, bool)
        for fault in found:
            sound &= ~fault.rows
        found += _related(quantizer, scale, history, sound)
    return found


def _related(
    quantizer: DelayedPolicy, scale: np.ndarray, history: np.ndarray, sound: np.ndarray
) -> list[Fault]:
    """Histories with gaps, and scales that do not match them, in rows without another fault."""
    filled = history[..., 1:] > 0
    gap = sound & np.any(filled[..., :-1] & ~filled[..., 1:], axis=-1)
    empty = ~filled[..., -1]
    unset = sound & ~gap & (empty != (scale == 0))
    last = quantizer.algorithm == "most_recent"
    reference = history[..., -1] if last else np.max(history, axis=-1)
    asked = np.asarray(inverse(quantizer.multiplier(jnp.asarray(reference))), np.float64)
    # `update` computes the scale before it rotates. So in a full history the entry that gave the
    # scale may have been rotated out just now. Then the scale is larger than the entries give.
    fall = np.where(filled[..., 0] & (not last), LARGEST_FALL, 1 + _ROUNDING)
    far = (
        sound
        & ~gap
        & ~empty
        & ~unset
        & ((scale < asked * (1 - _ROUNDING)) | (scale > asked * fall))
    )
    return _found(
        Fault(
            "amax_history",
            gap,
            "entries must fill the slots up to the last one, the newest, without a gap",
        ),
        Fault("scale", unset, "it must be 0 (unset) exactly if the history is empty"),
        Fault("scale", far, "it is not the scale that the amaxes of its history ask for"),
    )


def _found(*faults: Fault) -> list[Fault]:
    return [fault for fault in faults if fault.rows.any()]
