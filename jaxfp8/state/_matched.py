"""The check of a state at each use: it must be the state of this matmul's recipe."""

from jaxfp8._typing import FP8StateError
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._identity import STACKING, check_layout, known
from jaxfp8.state._ledger import BINS
from jaxfp8.state._state import MatmulState
from jaxfp8.state._trees import RESTORED, shown
from jaxfp8.state._unset import same_rows

_OF_LAYERS = (
    "The states of several layers are stacked: use scan or vmap, or index stacked states before "
    "the call."
)
_OF_GROUPS = (
    "Stack the states of groups along axis 0. Inside jax.shard_map split them as the matrices."
)


def matched(
    state: MatmulState | tuple[()] | None, recipe: Recipe, *, stacked: int | None = None
) -> MatmulState | None:
    """The state of one matmul, checked; None for a recipe without state.

    Args:
      state: what the user passed.
      recipe: the recipe of the matmul.
      stacked: the number of groups of a grouped matmul. It also takes the states of all groups,
        stacked along axis 0.

    Raises:
      FP8StateError: if the state is missing, stacked, was changed, or belongs to another recipe.

    Example:
      >>> import jaxfp8 as fp8
      >>> matched((), fp8.recipes.current()) is None
      True
    """
    if not recipe.rows:
        if state is None or (isinstance(state, tuple) and not state):
            return None
        raise FP8StateError(
            f"recipe {recipe.name!r} has no state, got {type(state).__name__}. Pass state=None."
        )
    if not isinstance(state, MatmulState):
        raise FP8StateError(
            f"recipe {recipe.name!r} needs the state of this matmul, got state={shown(state)}. "
            f"Make it with fp8.init_state(recipe). {RESTORED}"
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
        return known(state)  # `value_and_grad` already checked a state that has a probe
    ledger = state.probe.ledger
    if ledger is not None and ledger.shape != (*lead, BINS, len(recipe.rows)):
        raise FP8StateError(
            f"state.probe.ledger has shape {list(ledger.shape)} in this call, not "
            f"{[*lead, BINS, len(recipe.rows)]}. The states were mapped over another axis than "
            f"that of their layers. {STACKING}"
        )
    return state
