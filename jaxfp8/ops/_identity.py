"""Whether a state is what a matmul takes it for, where it is used.

`check_layout` reads shapes and dtypes while a function is traced. `known` compares fingerprints. If
the values can be read, it raises. A compiled step cannot raise, so there a row with a wrong
fingerprint becomes unset.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array
from jaxfp8.numerics._float32 import TINY
from jaxfp8.ops._ledger import BINS
from jaxfp8.ops._state import LEAVES, MatmulState, fingerprints, history_length

MEAN_ROUNDING = 2.0**-21
"""By how much a mean of equal fingerprints over devices may miss them: 4 units in the last place."""

STACKING = (
    "States of several layers or experts are stacked along leading axes, before their rows: in_axes=0, out_axes=0, "
    "variable_axes={COLLECTION: 0}, nnx.StateAxes({FP8State: 0})."
)


def check_layout(state: MatmulState) -> None:
    """Raise FP8StateError unless all arrays have the shapes and the dtype of a state, with rows last.

    No shape tells 3 layers from 3 rows. There the ledger tells: see `_ledger.py`, and `explained`
    below.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_layout(fp8.init_state(fp8.recipes.delayed()))
    """
    for name in LEAVES:
        leaf = getattr(state, name)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise FP8StateError(
                f"{name} is {leaf}, which has no values; make the state with fp8.init_state or the model's init, or "
                "restore it."
            )
        if leaf.dtype != jnp.float32:
            raise FP8StateError(
                f"{name} has dtype {leaf.dtype}, it must be float32; cast parameters only, not the state."
            )
    if state.scale.shape[-1:] != (len(state.rows),):
        raise FP8StateError(
            f"scale has shape {list(state.scale.shape)}, but its last axis must hold the {len(state.rows)} rows, "
            f"{', '.join(row.tensor for row in state.rows)}. {STACKING}"
        )
    for name, want in layout(state).items():
        if (shape := getattr(state, name).shape) != want:
            raise FP8StateError(
                f"{name} has shape {list(shape)}, but beside a scale of {list(state.scale.shape)} and with "
                f"history_length={history_length(state.rows)} it must have {list(want)}. A state of another "
                f"history_length starts from fp8.init_state(recipe). {STACKING}"
            )


@contextlib.contextmanager
def explained(states: Iterable[MatmulState]) -> Iterator[None]:
    """Says in a note what JAX's error about an axis of 1024 may mean, where layers and rows are equally many.

    Example:
      >>> with explained([]):
      ...     pass
    """
    try:
        yield
    except ValueError as error:
        if str(BINS) in str(error) and any(len(s.rows) in s.scale.shape[:-1] for s in states):
            error.add_note(f"jaxfp8: the axis of {BINS} is that of a state's ledger. {STACKING}")
        raise


def layout(state: MatmulState) -> dict[str, tuple[int, ...]]:
    """The shapes that the arrays of a state must have, by its scale's leading axes.

    Example:
      >>> import jaxfp8 as fp8
      >>> layout(fp8.init_state(fp8.recipes.delayed()))["amax_history"]
      (3, 16)
    """
    shape = *state.scale.shape[:-1], len(state.rows)
    return {name: (*shape, history_length(state.rows)) if name == "amax_history" else shape for name in LEAVES}


def known(state: MatmulState) -> MatmulState:
    """The state, with every row that cannot be believed unset.

    A row is believed if its fingerprint is that of its tensor and quantizer, and its scale is one
    that a step can leave. Other rows were saved with another recipe, or changed by arithmetic: by an
    optimizer whose parameters held the state, or by an average over steps. A state that is 0
    everywhere is unset as a whole.

    Raises:
      FP8StateError: for a row that is not believed, if its values can be read. Tracers cannot.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> known(state) is state
      True
    """
    want = fingerprints(state.rows, state.fingerprint.shape)
    if _readable(state.fingerprint) and _readable(state.scale):
        leaves = {name: np.asarray(getattr(state, name)) for name in LEAVES}
        believed = _believed(leaves["fingerprint"], want, leaves["scale"])
        if believed.all():
            return state
        if any(leaf.any() for leaf in leaves.values()):
            _refuse(state, leaves, np.argwhere(~believed)[0])
    believed = _believed(state.fingerprint, want, state.scale)
    scale, nonfinite_steps = (jnp.where(believed, leaf, 0) for leaf in (state.scale, state.nonfinite_steps))
    return dataclasses.replace(
        state,
        scale=scale,
        amax_history=jnp.where(believed[..., None], state.amax_history, 0),
        nonfinite_steps=nonfinite_steps,
        fingerprint=jnp.where(believed, state.fingerprint, want),
    )


def same_fingerprint(found: Array, want: np.ndarray) -> Array:
    """Whether fingerprints are equal, but for the rounding of a mean over devices.

    Example:
      >>> import numpy as np
      >>> same_fingerprint(np.float32([1.5, 1.75]), np.float32([1.5, 1.5]))
      array([ True, False])
    """
    return abs(found - want) < MEAN_ROUNDING


def _believed(fingerprint: Array, want: np.ndarray, scale: Array) -> Array:
    return same_fingerprint(fingerprint, want) & (scale >= 0) & (scale <= 1 / TINY)  # False for NaN


def _refuse(state: MatmulState, leaves: dict[str, np.ndarray], index: np.ndarray) -> NoReturn:
    row, at = state.rows[index[-1]], tuple(index)
    raise FP8StateError(
        f"row {index.tolist()} of a state has fingerprint {leaves['fingerprint'][at]} and scale "
        f"{leaves['scale'][at]}, which {row.tensor} by {row.quantizer} cannot have. The state was saved with another "
        "recipe, or an optimizer or an average (EMA) changed it. Keep the state out of their trees and pass that of "
        "the run; fp8.check_state(state, like, repair=True) unsets such rows."
    )


def _readable(leaf: Array | np.ndarray) -> bool:
    """Whether this process can read all values of an array."""
    if isinstance(leaf, jax.core.Tracer):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
