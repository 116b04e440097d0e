"""A state as separate arrays, for frameworks whose variables are arrays with names."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxfp8._typing import Array
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._state import LEAVES, MatmulState
from jaxfp8.state._unset import init_state

PREFIX = "fp8_"


def leaf_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a state, by the name of its variable. All are float32.

    An array begins as zeros: a state that is 0 everywhere is unset.

    Example:
      >>> import jaxfp8 as fp8
      >>> leaf_shapes(fp8.recipes.delayed())["fp8_scale"]
      (3,)
      >>> leaf_shapes(fp8.recipes.current())
      {}
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return {}
    return {PREFIX + name: jnp.shape(getattr(state, name)) for name in LEAVES}


def state_of(recipe: Recipe, variable: Callable[[str], Array]) -> Any:
    """The state whose arrays are variables.

    Args:
      recipe: the recipe of the state.
      variable: returns the variable of a name.

    Returns:
      A state; () for recipes without state.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> zeros = {name: jnp.zeros(shape) for name, shape in leaf_shapes(recipe).items()}
      >>> state_of(recipe, zeros.get).scale.shape
      (3,)
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return ()
    leaves: dict[str, Any] = {name: variable(PREFIX + name) for name in LEAVES}
    return dataclasses.replace(state, **leaves)
