"""Checks at each use that a state belongs to its matmul.

`check_layout` reads shapes and dtypes while a function is traced. `unset_foreign_rows` compares
fingerprints. If it can read the values, it raises an error for a wrong fingerprint. A compiled step
cannot raise an error, so it unsets the row.
`match_state` does both for the state of one matmul, and compares it with the recipe.
"""

import dataclasses
import functools
import operator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array, FP8StateError
from jaxfp8.numerics._exact import TINY
from jaxfp8.quantizers._base import stored_multiplier
from jaxfp8.recipes._recipe import Recipe, Row
from jaxfp8.state._init import fingerprints, same_rows, unset_leaves
from jaxfp8.state._ledger import BINS
from jaxfp8.state._state import LEAVES, RESTORED, MatmulState, describe_node

# Tags: how a state shows that it is a mean of states, and not one of them.
#
# With `state_channel="gradient"` JAX treats a state as a gradient. A training loop may then add or
# average the states of several backward passes. A sum changes the checksum in the fingerprint. A
# mean does not, because the checksum is the same in all of them.
#
# A float32 in [1, 2) has 23 bits after the point, and the checksum takes 16. The channel writes a
# tag into the other 7:
#
#         fingerprint = checksum + tag * 2^-23,  8 <= tag <= 57,  or tag = 0: not tagged
#
# The tag is one of 8 levels: a hash of the newest amax and the scale of the row. A mean of states
# has the mean of their tags, but needs the tag of its own amax and scale. It has that by chance in
# about 1 of 8 rows. The states of one step differ in the rows of x and g, and all rows must pass.
# So one matmul hides a mean in about 1 of 50 steps, two matmuls in 1 of 2500.

_UNIT = 2.0**-23
"""What a tag of 1 adds to a fingerprint: the last bit of a float32 in [1, 2)."""

_TAGS = 64 * _UNIT
"""Tags are below it: the fingerprints of other rows are at least twice as far away."""

_ROUNDING = 3.5 * _UNIT
"""Above the largest error of a mean over devices of equal fingerprints.

A mean over 7 devices can be 1 unit off, or 2 if the devices are added one after the other. The
error grows with the number of devices that are added so: 3 for 12 of them, 16 for 64.
"""


def tag_state(state: MatmulState) -> MatmulState:
    """The state, with its exact fingerprints and the tags of its arrays."""
    want = fingerprints(state.rows, state.fingerprint.shape)
    tag = _tag(_amax_bits(state.scale, state.amax_history))
    # The select keeps the mesh axes that the state varies over, and XLA removes it.
    exact = jnp.where(state.fingerprint > 0, want, want)
    return dataclasses.replace(state, fingerprint=exact + tag * np.float32(_UNIT))


def tag_fits(state: MatmulState) -> Any:
    """bool[..., R], whether rows have their fingerprint, with the tag of their arrays or without.

    All arrays are NumPy's, or all are JAX's.
    """
    found = state.fingerprint - fingerprints(state.rows, state.fingerprint.shape)
    bits = _amax_bits(state.scale, state.amax_history)
    # A mean over devices of equal states rounds their amaxes too, and may bring one to the next
    # bucket of `_tag`. 16 is more than that error.
    tags = 0, _tag(bits - np.uint32(16)), _tag(bits + np.uint32(16))
    fits = [abs(found - tag * np.float32(_UNIT)) < _ROUNDING for tag in tags]
    return functools.reduce(operator.or_, fits)


def same_fingerprint(found: Any, want: np.ndarray) -> Any:
    """Whether fingerprints are equal, up to a tag and the rounding of a mean over devices."""
    return (found - want > -_ROUNDING) & (found - want < _TAGS)


def explain_fingerprint(found: float, want: float) -> str:
    """What a sum or a mean of states is called in messages; "" for another wrong fingerprint."""
    if not np.isfinite(found):
        return ""
    count = max(1, round(float(found) / want))
    if not -_ROUNDING < found / count - want < _TAGS:
        return ""
    what = "a mean of states" if count == 1 else f"a sum of {count} states"
    return (
        f'This looks like {what}. state_channel="gradient" takes one backward pass per optimizer '
        "step, and one use of each state. For microbatches use fp8.value_and_grad(commit=False) "
        "and state_channel=None."
    )


def _amax_bits(scale: Any, history: Any) -> Any:
    """A number uint32[..., R] that differs where the arrays of two states differ.

    Without a history the scale is all that a row has of its newest amax.
    """
    if isinstance(scale, np.ndarray) and isinstance(history, np.ndarray):
        return history[..., -1].view(np.uint32) + scale.view(np.uint32)
    newest, scale = (lax.bitcast_convert_type(x, jnp.uint32) for x in (history[..., -1], scale))
    return newest + scale


def _tag(bits: Any) -> Any:
    """The tags f32[..., R], whole numbers: a hash of buckets of 256 neighbouring numbers.

    It is computed in whole numbers, so every device and every program gets the same tags.
    """
    bucket = bits >> np.uint32(8)
    factor = np.uint32(2_654_435_769)  # 2^32 divided by the golden ratio
    mixed = bucket * factor
    # With one product, the tag of a mean would often be the mean of the tags.
    mixed = (mixed ^ (mixed >> np.uint32(15))) * factor
    return (mixed >> np.uint32(29)).astype(np.float32) * np.float32(7) + np.float32(8)


# The checks: of shapes while a function is traced, and of values.

STACKING = (
    "States of several layers or experts must be stacked along leading axes, before the axis of "
    "rows. Write in_axes=0, out_axes=0, variable_axes={COLLECTION: 0} or nnx.StateAxes({FP8State: "
    "0})."
)


def check_layout(state: MatmulState) -> None:
    """Raise FP8StateError unless all arrays have the shapes and the dtype of a state.

    Rows are the last axis. Shapes cannot distinguish 3 layers from 3 rows, but the ledger can: see
    `_ledger.py`.
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
                f"{name} is {describe_node(leaf)}, but it must be an array of float32. Pass a "
                "state of lists, for instance from JSON, through fp8.check_state(state, "
                "like=fresh_state) first."
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
    for name, want in state_shapes(state).items():
        if (shape := getattr(state, name).shape) != want:
            raise FP8StateError(
                f"{name} has shape {list(shape)}. It must have {list(want)}, because scale has "
                f"shape {list(state.scale.shape)} and history_length={_history_length(state.rows)}."
                f" For another history_length start from fp8.init_state(recipe). {STACKING}"
            )


def state_shapes(state: MatmulState) -> dict[str, tuple[int, ...]]:
    """The shape that each array of a state must have, given the leading axes of its scale."""
    shape = *state.scale.shape[:-1], len(state.rows)
    return {
        name: (*shape, _history_length(state.rows)) if name == "amax_history" else shape
        for name in LEAVES
    }


def _history_length(rows: tuple[Row, ...]) -> int:
    """H, the history length, which is the same for all rows of a state."""
    return rows[0].quantizer.history_length


def unset_foreign_rows(state: MatmulState) -> MatmulState:
    """The state, after a check of each row's fingerprint and scale.

    A row that does not pass was saved with another recipe, or arithmetic changed it. Examples are
    an optimizer whose parameters held the state, and an average over steps. In a traced state such
    a row becomes unset. If its values can be read, FP8StateError is raised, also for a wrong tag.
    A state that is 0 everywhere becomes unset.
    """
    want = fingerprints(state.rows, state.fingerprint.shape)
    if _readable(state.fingerprint) and _readable(state.scale):
        leaves: Any = {name: np.asarray(getattr(state, name)) for name in LEAVES}
        host = dataclasses.replace(state, **leaves)
        known = is_known(host) & tag_fits(host)
        if known.all() and not (host.fingerprint - want).any():
            return state
        if not known.all() and any(getattr(host, name).any() for name in LEAVES):
            _refuse(host, want, np.argwhere(~known)[0])
    known = is_known(state)
    scale, history, nonfinite_steps = unset_leaves(state.rows, state.scale.shape)
    return dataclasses.replace(
        state,
        scale=jnp.where(known, state.scale, scale),
        amax_history=jnp.where(known[..., None], state.amax_history, history),
        nonfinite_steps=jnp.where(known, state.nonfinite_steps, nonfinite_steps),
        # Each mean over devices adds a rounding error to a fingerprint, and the errors of many
        # steps would exceed `_ROUNDING`. A tag is not that of the next state. So the exact
        # fingerprint is written, without a tag. The select keeps the mesh axes that the state
        # varies over, and XLA removes it.
        fingerprint=jnp.where(known, want, want),
    )


@jax.jit  # traced and lowered once for all equal layers
def known_scales(state: MatmulState) -> Array:
    """The encoding multipliers of all rows, then their scales, f32[..., 2R].

    A multiplier is 0 for a row that is unset, and NaN if the state is settled. A row that does
    not pass `unset_foreign_rows` counts as unset.
    """
    is_set = is_known(state) & (state.scale > 0)
    multipliers = stored_multiplier(state.scale, is_set, state.settled)
    # One axis: XLA replaces a slice of a concatenation by its operand. With two axes a reshape is
    # between them, and each scale would be copied.
    return jnp.concatenate([multipliers, state.scale], axis=-1)


def check_at_use(state: MatmulState) -> MatmulState:
    """The state, after the checks that are possible here, for a function that gives it a probe.

    In a traced state `known_scales` finds rows that are not known, and `commit_one` unsets them.
    """
    check_layout(state)
    return state if isinstance(state.fingerprint, jax.core.Tracer) else unset_foreign_rows(state)


def is_known(state: MatmulState) -> Any:
    """bool[..., R], whether rows have the fingerprint of their tensor and quantizer, without a look
    at tags, and a scale in range.
    """
    same = same_fingerprint(state.fingerprint, fingerprints(state.rows, state.fingerprint.shape))
    return same & (state.scale >= 0) & (state.scale <= 1 / TINY)  # False for NaN


def _refuse(state: MatmulState, want: np.ndarray, index: np.ndarray) -> NoReturn:
    row, at = state.rows[index[-1]], tuple(index)
    arithmetic = explain_fingerprint(float(state.fingerprint[at]), float(want[at]))
    raise FP8StateError(
        f"row {index.tolist()} of a state has fingerprint {state.fingerprint[at]} and scale "
        f"{state.scale[at]}, which {row.tensor} by {row.quantizer} cannot have. "
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


# The check of a state at each use: it must be the state of this matmul's recipe.

_OF_LAYERS = (
    "The states of several layers are stacked: use scan or vmap, or index stacked states before "
    "the call."
)
_OF_GROUPS = (
    "Stack the states of groups along axis 0. Inside jax.shard_map split them as the matrices."
)


def match_state(
    state: MatmulState | tuple[()] | None, recipe: Recipe, *, stacked: int | None = None
) -> MatmulState | None:
    """The state of one matmul, checked; None for a recipe without state.

    `stacked` is the number of groups of a grouped matmul. It also takes the states of all groups,
    stacked along axis 0.
    """
    if not recipe.rows:
        if state is None or (isinstance(state, tuple) and not state):
            return None
        raise FP8StateError(
            f"recipe {recipe.name!r} has no state, got {type(state).__name__}. Pass state=None."
        )
    if not isinstance(state, MatmulState):
        raise FP8StateError(
            f"recipe {recipe.name!r} needs the state of this matmul, got "
            f"state={describe_node(state)}. Make it with fp8.init_state(recipe). {RESTORED}"
        )
    if not same_rows(state.rows, recipe.rows):
        raise FP8StateError(
            f"state belongs to another recipe. It has rows {state.rows}. Recipe {recipe.name!r} "
            f"has {recipe.rows}. Start from fp8.init_state(recipe)."
        )
    check_layout(state)
    lead = state.scale.shape[:-1]
    if lead and lead != (stacked,):
        of_groups, cure = "", _OF_LAYERS
        if stacked is not None:
            of_groups = f", or [{stacked}, {len(recipe.rows)}] with a state for each group"
            cure = _OF_GROUPS
        raise FP8StateError(
            f"state.scale has shape {list(state.scale.shape)}, but one matmul has "
            f"[{len(recipe.rows)}]{of_groups}. {cure}"
        )
    if state.probe is None:
        # `value_and_grad` already checked a state that has a probe.
        return unset_foreign_rows(state)
    ledger = state.probe.ledger
    if ledger is not None and ledger.shape != (*lead, BINS, len(recipe.rows)):
        raise FP8StateError(
            f"state.probe.ledger has shape {list(ledger.shape)} in this call, not "
            f"{[*lead, BINS, len(recipe.rows)]}. The states were mapped over another axis than "
            f"that of their layers. {STACKING}"
        )
    return state
