"""Where nnx layers keep quantizer state: Variables of a type of their own, which optimizers over Param leave alone."""

from flax import nnx

from jaxfp8.ops._state import MatmulState, init_state
from jaxfp8.recipes._recipe import Recipe


class FP8State(nnx.Variable[MatmulState]):
    """The quantizer state of one matmul.

    Example:
      >>> from flax import nnx
      >>> from jaxfp8 import recipes
      >>> from jaxfp8.nnx import FP8Linear, FP8State
      >>> layer = FP8Linear(8, 4, recipe=recipes.delayed(), rngs=nnx.Rngs(0))
      >>> states = nnx.state(layer, FP8State)
    """


def new_state(recipe: Recipe) -> FP8State | None:
    """A Variable with the unset state of one matmul; None for a recipe without state."""
    state = init_state(recipe)
    return FP8State(state) if isinstance(state, MatmulState) else None
