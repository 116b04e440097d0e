"""Checks at each use that a state belongs to its matmul.

`check_layout` reads shapes and dtypes while a function is traced. `known` compares fingerprints. It
raises an error if the values can be read. A compiled step cannot raise an error, so it unsets a row
with a wrong fingerprint.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._errors import FP8StateError
from jaxfp8.ops._ledger import BINS
from jaxfp8.ops._state import LEAVES, MatmulState, fingerprints, history_length

STACKING = (
    "States of several layers or experts must be stacked along leading axes, before the axis of rows. Write "
    "in_axes=0, out_axes=0, variable_axes={COLLECTION: 0} or nnx.StateAxes({FP8State: 0})."
)


def check_layout(state: MatmulState) -> None:
    """Raise FP8StateError unless all arrays have the shapes and the dtype of a state, with rows last.

    Shapes cannot distinguish 3 layers from 3 rows. The ledger does: see `_ledger.py`, and `explained`
    below.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_layout(fp8.init_state(fp8.recipes.delayed()))
    """
    for name in LEAVES:
        leaf = getattr(state, name)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise FP8StateError(
                f"{name} is {leaf}, which has no values. Make the state with fp8.init_state or the model's init, or "
                "restore it."
            )
        if leaf.dtype != jnp.float32:
            raise FP8StateError(
                f"{name} has dtype {leaf.dtype}, it must be float32; cast parameters only, not the state."
            )
    if state.scale.shape[-1:] != (len(state.rows),):
        raise FP8StateError(
            f"scale has shape {list(state.scale.shape)}, but its last axis must hold the {len(state.rows)} rows "
            f"{', '.join(row.tensor for row in state.rows)}. {STACKING}"
        )
    for name, want in layout(state).items():
        if (shape := getattr(state, name).shape) != want:
            raise FP8StateError(
                f"{name} has shape {list(shape)}. It must have {list(want)}, because scale has shape "
                f"{list(state.scale.shape)} and history_length={history_length(state.rows)}. For another history_length "
                f"start from fp8.init_state(recipe). {STACKING}"
            )


@contextlib.contextmanager
def explained(states: Iterable[MatmulState]) -> Iterator[None]:
    """Adds a note to JAX's error about an axis of 1024, if a state has as many layers as rows.

    Example:
      >>> with explained([]):
      ...     pass
    """
    try:
        yield
    except ValueError as error:
        if str(BINS) in str(error) and any(len(s.rows) in s.scale.shape[:-1] for s in states):
            error.add_note(f"jaxfp8: the axis of size {BINS} belongs to the ledger of a quantizer state. {STACKING}")
        raise


def layout(state: MatmulState) -> dict[str, tuple[int, ...]]:
    """The shape that each array of a state must have, given the leading axes of its scale.

    Example:
      >>> import jaxfp8 as fp8
      >>> layout(fp8.init_state(fp8.recipes.delayed()))["amax_history"]
      (3, 16)
    """
    shape = *state.scale.shape[:-1], len(state.rows)
    return {name: (*shape, history_length(state.rows)) if name == "amax_history" else shape for name in LEAVES}


def known(state: MatmulState) -> MatmulState:
    """The state, after a check that each row belongs to the tensor and the quantizer of its static fields.

    If a fingerprint differs, the row was saved with another recipe, or arithmetic changed it. An
    optimizer whose parameters held the state does so. In a tracer such a row becomes unset.

    Raises:
      FP8StateError: if a fingerprint differs and its values can be read.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> known(state) is state
      True
    """
    want = fingerprints(state.rows, state.fingerprint.shape)
    if _at_hand(state.fingerprint):
        unknown = np.argwhere(np.asarray(state.fingerprint) != want)
        if len(unknown):
            row = state.rows[unknown[0][-1]]
            raise FP8StateError(
                f"fingerprint{unknown[0].tolist()}={np.asarray(state.fingerprint)[tuple(unknown[0])]} is not the "
                f"fingerprint of {row.tensor} by {row.quantizer}: the state was saved with another recipe, or an optimizer "
                "changed it. Keep the state out of optax's trees. Unset such rows with fp8.check_state(state, like, "
                "repair=True)."
            )
        return state
    same = state.fingerprint == want
    scale, nonfinite_steps = (jnp.where(same, leaf, 0) for leaf in (state.scale, state.nonfinite_steps))
    return dataclasses.replace(
        state,
        scale=scale,
        amax_history=jnp.where(same[..., None], state.amax_history, 0),
        nonfinite_steps=nonfinite_steps,
        fingerprint=jnp.where(same, state.fingerprint, want),
    )


def _at_hand(leaf: jax.Array | np.ndarray) -> bool:
    """Whether this process can read the values of an array."""
    if isinstance(leaf, jax.core.Tracer):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
