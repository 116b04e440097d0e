"""The Variables in which nnx layers keep their quantizer state.

Their type is not `nnx.Param`, so an optimizer of parameters does not change them.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeVar

from flax import nnx

from jaxfp8._typing import PyTree
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._fresh_state import concrete
from jaxfp8.state._settle import settle as settle_states
from jaxfp8.state._state import MatmulState
from jaxfp8.state._trees import freeze as freeze_states
from jaxfp8.state._unset import init_state

M = TypeVar("M")


class FP8State(nnx.Variable[MatmulState]):
    """The quantizer state of one matmul.

    `nnx.eval_shape` makes an abstract state, and this class turns it into a fresh state. So a
    checkpoint that holds only parameters can be restored into the model.

    Example:
      >>> from flax import nnx
      >>> from jaxfp8 import recipes
      >>> from jaxfp8.nnx import FP8Linear, FP8State
      >>> layer = FP8Linear(8, 4, recipe=recipes.delayed(), rngs=nnx.Rngs(0))
      >>> states = nnx.state(layer, FP8State)
    """

    @classmethod
    def _new(cls, value: Any, metadata: dict[str, Any]) -> Any:
        # flax calls this method for each Variable that it makes without the constructor. nnx.jit
        # would raise an error for an abstract state.
        return super()._new(concrete(value), metadata)


def new_state(recipe: Recipe) -> FP8State | None:
    """A Variable with the unset state of one matmul. None for a recipe without state."""
    state = init_state(recipe)
    return FP8State(state) if isinstance(state, MatmulState) else None


def holds_state(path: tuple[Any, ...], value: Any) -> bool:
    """A filter of nnx for the Variables that hold the state of a matmul.

    The filter looks at values, not at types. `nnx.bridge.ToNNX` keeps the states of a linen model
    in a type that flax makes from the name of their collection.
    """
    del path
    return isinstance(value, nnx.Variable) and isinstance(value.get_raw_value(), MatmulState)


def states_of(model: Any) -> PyTree:
    """The quantizer states of a model. Abstract states become fresh states."""
    return concrete(nnx.state(model, holds_state))


def freeze(model: M) -> M:
    """The same model with fixed scales. Its matmuls record no amax, and no step changes its scales.

    Use it for a network that the gradient passes through, but that the loss does not train. One
    example is the discriminator in the loss of a GAN's generator. A row of a state belongs to one
    tensor. If a row is unset, its tensor is quantized with the tensor's current amax.

    Args:
      model: an nnx module. It does not change.

    Returns:
      A model that shares all Variables with `model`, except for the quantizer states, which it
      copies. Call `freeze` inside the train step, so that it copies the newest states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> generator = fp8.nnx.FP8Linear(8, 8, rngs=nnx.Rngs(0))
      >>> critic = fp8.nnx.FP8Linear(8, 1, rngs=nnx.Rngs(1))
      >>> run = fp8.nnx.value_and_grad(lambda generator, critic, x: critic(generator(x)).sum())
      >>> loss, grads = run(generator, fp8.nnx.freeze(critic), jnp.ones((2, 8)))
      >>> critic.dot_general.state.get_value().frozen
      False
    """
    graphdef, *parts = nnx.split(model, holds_state, ...)
    states, rest = parts
    frozen: M = nnx.merge(graphdef, freeze_states(concrete(states)), rest)
    return frozen


def settle(model: Any) -> None:
    """Mark the matmuls of a model whose scales are all set, in place. See `fp8.settle`.

    Call it once, outside of `nnx.jit`: after the first step, or after a checkpoint is restored. The
    next step compiles once more, and reads x, w and g of each matmul once less.

    Args:
      model: an nnx module.

    Raises:
      FP8StateError: inside of `nnx.jit`, where no value can be read.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> layer = fp8.nnx.FP8Linear(8, 4, rngs=nnx.Rngs(0))
      >>> run = fp8.nnx.value_and_grad(lambda model, x: model(x).sum())
      >>> _ = run(layer, jnp.ones((2, 8)))
      >>> fp8.nnx.settle(layer)
      >>> layer.dot_general.state.get_value().settled
      True
    """
    nnx.update(model, settle_states(states_of(model)))


_differentiating = contextvars.ContextVar("_differentiating", default=False)


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Mark that a loss is running. A layer that is made inside it would lose its state."""
    token = _differentiating.set(True)
    try:
        yield
    finally:
        _differentiating.reset(token)


def in_a_loss() -> bool:
    """Whether `fp8.nnx.value_and_grad` is running a loss now."""
    return _differentiating.get()
