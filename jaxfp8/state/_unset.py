"""States before their first step, and the fingerprints of their rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8.quantizers._base import RowState
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe, Row
from jaxfp8.state._state import MatmulState


def init_state(recipe: Recipe) -> MatmulState | tuple[()]:
    """The state of one matmul before its first step. All scales are unset.

    For L stacked layers or experts, give the leaves a leading axis: `jax.vmap(lambda _:
    init_state(recipe))(jnp.zeros(L))`.

    Args:
      recipe: the recipe of the matmul.

    Returns:
      A `MatmulState`, or `()` for a recipe without state.

    Raises:
      TypeError: if `recipe` is no recipe.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.init_state(fp8.recipes.current())
      ()
    """
    check_recipe(recipe)
    if not recipe.rows:
        return ()
    return unset_state(recipe.rows)


def history_length(rows: tuple[Row, ...]) -> int:
    """H, the history length, which is the same for all rows of a state.

    Example:
      >>> import jaxfp8 as fp8
      >>> history_length(fp8.recipes.delayed().rows)
      16
    """
    return rows[0].quantizer.history_length


def unset_state(rows: tuple[Row, ...], stacked: tuple[int, ...] = ()) -> MatmulState:
    """The state of matmuls before their first step.

    `stacked` are the sizes of the leading axes, which stack layers or experts.

    Example:
      >>> import jaxfp8 as fp8
      >>> unset_state(fp8.recipes.delayed().rows, (4,)).amax_history.shape
      (4, 3, 16)
    """
    shape = *stacked, len(rows)
    # Each leaf gets its own array, because a donated buffer must not appear twice.
    scale, history, nonfinite_steps = map(jnp.asarray, unset_leaves(rows, shape))
    return MatmulState(
        scale, history, nonfinite_steps, jnp.asarray(fingerprints(rows, shape)), None, rows
    )


@functools.lru_cache(maxsize=1024)
def unset_leaves(rows: tuple[Row, ...], shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """scale, amax_history and nonfinite_steps before the first step, for a state of this shape.

    Example:
      >>> import jaxfp8 as fp8
      >>> [leaf.shape for leaf in unset_leaves(fp8.recipes.delayed().rows, (4, 3))]
      [(4, 3), (4, 3, 16), (4, 3)]
    """
    # A step may be traced here, and an `init` may compute with jax. Its results must be values.
    with jax.ensure_compile_time_eval():
        leaves = [np.stack(each) for each in zip(*map(_first, rows), strict=True)]
    return tuple(np.broadcast_to(leaf, (*shape, *leaf.shape[1:])) for leaf in leaves)


def _first(row: Row) -> RowState:
    """The row before its first step.

    Raises:
      ValueError: if a quantizer's `init` makes arrays of other shapes than one row has.
    """
    first = row.quantizer.init()
    shapes = tuple(np.shape(leaf) for leaf in first) if isinstance(first, tuple) else first
    if shapes != ((), (row.quantizer.history_length,), ()):
        raise ValueError(
            f"{type(row.quantizer).__name__}.init() makes arrays of shapes {shapes} for scale, "
            f"amax_history and nonfinite_steps. With history_length={row.quantizer.history_length} "
            f"the shapes must be (), ({row.quantizer.history_length},) and ()."
        )
    leaves: Any = (np.asarray(leaf, np.float32) for leaf in first)
    return RowState(*leaves)


@functools.lru_cache(maxsize=1024)
def fingerprints(rows: tuple[Row, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The fingerprints of rows, f32[..., R], for a state of this shape.

    Example:
      >>> import jaxfp8 as fp8
      >>> fingerprints(fp8.recipes.delayed().rows, (4, 3)).shape
      (4, 3)
    """
    return np.broadcast_to(np.array([row.fingerprint for row in rows], np.float32), shape)


def same_rows(first: tuple[Row, ...], second: tuple[Row, ...]) -> bool:
    """Whether a state with the first rows may be used with the second.

    Their quantizers may round differently, because a state does not depend on the rounding.

    Example:
      >>> import jaxfp8 as fp8
      >>> delayed = fp8.recipes.delayed
      >>> same_rows(delayed().rows, delayed(gradient_rounding="stochastic").rows)
      True
    """
    if first == second:
        return True
    prints = [[(row.tensor, row.fingerprint) for row in rows] for rows in (first, second)]
    return prints[0] == prints[1]
