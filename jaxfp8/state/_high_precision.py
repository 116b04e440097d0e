"""Whether the matmuls of a recipe run in high precision, so that a step can be compared.

The switch is a context that JAX knows (`jax.make_user_context`). Every cache of JAX has it in its
key: those of traces, of loops and of programs. So a step that was traced before is traced once more
in the context, also its inner `jax.jit` functions. Afterwards the old programs are used again.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxfp8.recipes._presets import identity
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._state import MatmulState

_switch: Any = jax.make_user_context(False)


@contextlib.contextmanager
def high_precision() -> Iterator[None]:
    """Run all matmuls that are traced in this context as with `recipes.identity()`.

    Quantizer state stays in the trees of the step. No matmul reads it.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, w = jnp.full((1, 1), 0.7), jnp.ones((1, 1))
      >>> with high_precision():
      ...     fp8.dot(x, w, recipe=fp8.recipes.current(power_of_two=True))
      Array([[0.7]], dtype=float32)
      >>> fp8.dot(x, w, recipe=fp8.recipes.current(power_of_two=True))
      Array([[0.6875]], dtype=float32)
    """
    with _switch(True):
        yield


def in_high_precision() -> bool:
    """Whether matmuls run in high precision here.

    Example:
      >>> in_high_precision()
      False
    """
    return bool(_switch.value)


def as_traced(
    recipe: Recipe, state: MatmulState | tuple[()] | None
) -> tuple[Recipe, MatmulState | tuple[()] | None]:
    """The recipe and the state that a matmul uses here: its own, or none in high precision.

    Example:
      >>> import jaxfp8 as fp8
      >>> with high_precision():
      ...     recipe, state = as_traced(fp8.recipes.current(), None)
      >>> recipe.is_identity
      True
    """
    return (identity(), None) if in_high_precision() else (recipe, state)
