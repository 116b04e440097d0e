"""Checks at each use that a state belongs to its matmul.

`check_layout` reads shapes and dtypes while a function is traced. `known` compares fingerprints. If
it can read the values, it raises an error for a wrong fingerprint. A compiled step cannot raise an
error, so it unsets the row.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, FP8StateError
from jaxfp8.numerics._exact import TINY
from jaxfp8.quantizers._base import stored_multiplier
from jaxfp8.state._ledger import BINS
from jaxfp8.state._state import LEAVES, MatmulState
from jaxfp8.state._tags import same_fingerprint, tag_fits, why_not
from jaxfp8.state._trees import shown
from jaxfp8.state._unset import fingerprints, history_length, unset_leaves

STACKING = (
    "States of several layers or experts must be stacked along leading axes, before the axis of "
    "rows. Write in_axes=0, out_axes=0, variable_axes={COLLECTION: 0} or nnx.StateAxes({FP8State: "
    "0})."
)


def check_layout(state: MatmulState) -> None:
    """Raise FP8StateError unless all arrays have the shapes and the dtype of a state.

    Rows are the last axis. Shapes cannot distinguish 3 layers from 3 rows, but the ledger can: see
    `_ledger.py`, and `explained` below.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_layout(fp8.init_state(fp8.recipes.delayed()))
    """
    for name in LEAVES:
        leaf = getattr(state, name)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise FP8StateError(
                f"{name} is {leaf}, which has no values. Make the state with fp8.init_state or the "
                "model's init, or restore it."
            )
        if not hasattr(leaf, "dtype"):
            raise FP8StateError(
                f"{name} is {shown(leaf)}, but it must be an array of float32. Pass a state of "
                "lists, for instance from JSON, through fp8.check_state(state, like=fresh_state) "
                "first."
            )
        if leaf.dtype != jnp.float32:
            raise FP8StateError(
                f"{name} has dtype {leaf.dtype}, but it must be float32. Cast parameters only, not "
                "the state."
            )
    if state.scale.shape[-1:] != (len(state.rows),):
        raise FP8StateError(
            f"scale has shape {list(state.scale.shape)}, but its last axis must hold the "
            f"{len(state.rows)} rows {', '.join(row.tensor for row in state.rows)}. {STACKING}"
        )
    for name, want in layout(state).items():
        if (shape := getattr(state, name).shape) != want:
            raise FP8StateError(
                f"{name} has shape {list(shape)}. It must have {list(want)}, because scale has "
                f"shape {list(state.scale.shape)} and history_length={history_length(state.rows)}. "
                f"For another history_length start from fp8.init_state(recipe). {STACKING}"
            )


@contextlib.contextmanager
def explained(states: Iterable[MatmulState]) -> Iterator[None]:
    """Adds a note to JAX's error about an axis of 1024, if a state has as many layers as rows.

    JAX's error does not name the cause: the states were mapped over another axis than their layers.

    Example:
      >>> with explained([]):
      ...     pass
    """
    try:
        yield
    except ValueError as error:
        if str(BINS) in str(error) and any(len(s.rows) in s.scale.shape[:-1] for s in states):
            error.add_note(
                f"jaxfp8: the axis of size {BINS} belongs to the ledger of a quantizer state. "
                f"{STACKING}"
            )
        raise


def layout(state: MatmulState) -> dict[str, tuple[int, ...]]:
    """The shape that each array of a state must have, given the leading axes of its scale.

    Example:
      >>> import jaxfp8 as fp8
      >>> layout(fp8.init_state(fp8.recipes.delayed()))["amax_history"]
      (3, 16)
    """
    shape = *state.scale.shape[:-1], len(state.rows)
    return {
        name: (*shape, history_length(state.rows)) if name == "amax_history" else shape
        for name in LEAVES
    }


def known(state: MatmulState) -> MatmulState:
    """The state, after a check of each row's fingerprint and scale.

    A row passes if two things are true. Its fingerprint is that of its tensor and quantizer. Its
    scale is 0 or in the range of scales.

    A row that does not pass was saved with another recipe, or arithmetic changed it. Examples are
    an optimizer whose parameters held the state, and an average over steps. In a traced state such
    a row becomes unset. A state that is 0 everywhere becomes unset, too. If the values can be read,
    the tag of a row is checked as well (`_tags.py`).

    Raises:
      FP8StateError: for a row that does not pass, if its values can be read.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> known(state) is state
      True
    """
    want = fingerprints(state.rows, state.fingerprint.shape)
    if _readable(state.fingerprint) and _readable(state.scale):
        leaves = {name: np.asarray(getattr(state, name)) for name in LEAVES}
        passes = _passes(leaves["fingerprint"], want, leaves["scale"]) & tag_fits(
            leaves["fingerprint"], want, leaves["scale"], leaves["amax_history"]
        )
        if passes.all() and not (leaves["fingerprint"] - want).any():
            return state
        if not passes.all() and any(leaf.any() for leaf in leaves.values()):
            _refuse(state, leaves, want, np.argwhere(~passes)[0])
    passes = _passes(state.fingerprint, want, state.scale)
    scale, history, nonfinite_steps = unset_leaves(state.rows, state.scale.shape)
    return dataclasses.replace(
        state,
        scale=jnp.where(passes, state.scale, scale),
        amax_history=jnp.where(passes[..., None], state.amax_history, history),
        nonfinite_steps=jnp.where(passes, state.nonfinite_steps, nonfinite_steps),
        # Each mean over devices adds a rounding error to a fingerprint, and the errors of many
        # steps would exceed MEAN_ROUNDING. A tag is not that of the next state. So the exact
        # fingerprint is written, without a tag. The select keeps the mesh axes that the state
        # varies over, and XLA removes it.
        fingerprint=jnp.where(passes, want, want),
    )


@jax.jit  # traced and lowered once for all equal layers
def known_scales(state: MatmulState) -> Array:
    """The encoding multiplier and the scale of each row, f32[..., 2, R].

    The multiplier is 0 for a row that is unset, and NaN if the state is settled. A row that does
    not pass `known` counts as unset.

    Example:
      >>> import jaxfp8 as fp8
      >>> known_scales(fp8.init_state(fp8.recipes.delayed()))
      Array([[0., 0., 0.],
             [0., 0., 0.]], dtype=float32)
    """
    want = fingerprints(state.rows, state.fingerprint.shape)
    is_set = _passes(state.fingerprint, want, state.scale) & (state.scale > 0)
    multipliers = stored_multiplier(state.scale, is_set, state.settled)
    # Rows are the last axis, as in all arrays of a state: see `explained`.
    return jnp.stack([multipliers, state.scale], axis=-2)


def checked(state: MatmulState) -> MatmulState:
    """The state, after the checks that are possible here, for a function that gives it a probe.

    In a traced state `known_scales` finds rows that are not known, and `commit_one` unsets them.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> checked(state) is state
      True
    """
    check_layout(state)
    return state if isinstance(state.fingerprint, jax.core.Tracer) else known(state)


def identified(state: MatmulState) -> Array:
    """bool[..., R], which rows pass `known`, without their tags.

    Example:
      >>> import jaxfp8 as fp8
      >>> identified(fp8.init_state(fp8.recipes.delayed()))
      Array([ True,  True,  True], dtype=bool)
    """
    want = fingerprints(state.rows, state.fingerprint.shape)
    return jnp.asarray(_passes(state.fingerprint, want, state.scale))


def _passes(fingerprint: Any, want: np.ndarray, scale: Any) -> Any:
    return same_fingerprint(fingerprint, want) & (scale >= 0) & (scale <= 1 / TINY)  # False for NaN


def _refuse(
    state: MatmulState, leaves: dict[str, np.ndarray], want: np.ndarray, index: np.ndarray
) -> NoReturn:
    row, at = state.rows[index[-1]], tuple(index)
    arithmetic = why_not(leaves["fingerprint"][at], want[at])
    raise FP8StateError(
        f"row {index.tolist()} of a state has fingerprint {leaves['fingerprint'][at]} and scale "
        f"{leaves['scale'][at]}, which {row.tensor} by {row.quantizer} cannot have. "
        + (
            arithmetic
            or "The state was saved with another recipe, or an optimizer or an average (EMA) "
            "changed it. Keep the state out of the trees of optimizers and averages, and evaluate "
            "with the state of the run. Stack states along axis 0 only."
        )
        + " To unset such rows, use fp8.check_state(state, like, repair=True)."
    )


def _readable(leaf: Array | np.ndarray) -> bool:
    """Whether this process can read all values of an array."""
    if isinstance(leaf, jax.core.Tracer):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
