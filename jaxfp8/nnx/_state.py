"""Quantizer state in flax.nnx: the variable that holds it, and functions of whole models.

The type of the variable is not `nnx.Param`, so an optimizer of parameters does not change them.
"""

import types
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxfp8._typing import PyTree
from jaxfp8.state._commit import settle as settle_states
from jaxfp8.state._init import fresh_like, make_concrete, placement
from jaxfp8.state._saved import Path, match_leaves, names_of, saved_leaves
from jaxfp8.state._state import MatmulState, describe_node, is_state
from jaxfp8.state._state import freeze as freeze_states

# The Variables in which nnx layers keep their quantizer state.

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
        return super()._new(make_concrete(value), metadata)


def holds_state(path: tuple[Any, ...], value: Any) -> bool:
    """A filter of nnx for the Variables that hold the state of a matmul.

    The filter looks at values, not at types. `nnx.bridge.ToNNX` keeps the states of a linen model
    in a type that flax makes from the name of their collection.
    """
    del path
    return isinstance(value, nnx.Variable) and isinstance(value.get_raw_value(), MatmulState)


def states_of(model: Any) -> PyTree:
    """The quantizer states of a model. Abstract states become fresh states."""
    return make_concrete(nnx.state(model, holds_state))


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
    frozen: M = nnx.merge(graphdef, freeze_states(make_concrete(states)), rest)
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


# `add_state`: an nnx model's Variables from a checkpoint without quantizer state.

# Checkpoints of parameters leave these out. A model that was not made by nnx.eval_shape has values.
_OPTIONAL = (nnx.RngState, nnx.Cache, nnx.Intermediate)


def add_state(
    model: nnx.Module, saved: PyTree, *, rename: Mapping[str, str] = types.MappingProxyType({})
) -> None:
    r"""Give an FP8 model the Variables of a checkpoint without quantizer state, in place.

    `nnx.update(model, saved)` does the same without a check, and needs integer keys for lists. A
    model that `fp8.convert` made shares its Variables with the model that it was made from, which
    changes, too. The quantizer states of the model become fresh, also if it has trained before.

    An array of a narrower dtype is converted to that of the model, for instance from bfloat16 to
    float32. A conversion that would round is an error. If an error is raised, the model has not
    changed.

    Args:
      model: an nnx module with FP8 layers, or from `fp8.convert`. It may be abstract, from
        `nnx.eval_shape`.
      saved: the `nnx.State` or the pure dict of a model without quantizer state, for instance
        `nnx.state(old)`. It may be restored without a target, where lists have keys "0", "1". All
        Variables are needed, except for caches, intermediates and keys of random numbers, if the
        model is not abstract. NumPy arrays become jax arrays, sharded like those of the model.
      rename: regular expressions of names, and what replaces them. A name is one part of a path.
        The whole name must match, and the first pattern that matches decides.

    Raises:
      TypeError: if `model` is no nnx module, or `rename` is no dict of strings.
      FP8StateError: if `saved` holds quantizer state.
      ValueError: if `saved` lacks an array of the model, holds another one, or holds one of another
        shape or a wider dtype. Also if a pattern of `rename` matches no name, or makes one name of
        two.

    Example:
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> old = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
      >>> layer = nnx.eval_shape(lambda: fp8.nnx.FP8Linear(8, 4, rngs=nnx.Rngs(1)))
      >>> fp8.nnx.add_state(layer, nnx.state(old))
      >>> bool((layer.kernel == old.kernel).all())
      True
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model is {describe_node(model)}, but a flax.nnx.Module is needed. Write "
            "add_state(model, saved). For linen see fp8.linen.add_state."
        )
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"saved is {describe_node(saved)}, but an nnx.State or a dict is needed. Write "
            "nnx.state(old_model)."
        )
    rest = nnx.to_flat_state(nnx.state(model, nnx.Not(holds_state)))
    wanted: dict[Path, Any] = {}
    optional: set[Path] = set()
    for path, variable in rest:
        for below, leaf in jax.tree_util.tree_leaves_with_path(_raw(variable)):
            names = _names(path, below)
            wanted[names] = leaf
            if isinstance(variable, _OPTIONAL) and not isinstance(leaf, jax.ShapeDtypeStruct):
                optional.add(names)
    given = saved_leaves(saved, rename, called="saved", read=_raw)
    found = match_leaves(wanted, given, called="saved", optional=optional)

    def joined(path: tuple[Any, ...], variable: Any) -> Any:
        def one(below: tuple[Any, ...], like: Any) -> Any:
            return _placed(found.get(_names(path, below), like), like)

        value = jax.tree_util.tree_map_with_path(one, _raw(variable))
        return variable.replace(value) if isinstance(variable, nnx.Variable) else value

    new = nnx.from_flat_state([(path, joined(path, variable)) for path, variable in rest])
    states = nnx.state(model, holds_state)
    nnx.update(model, new, jax.tree.map(fresh_like, states, is_leaf=is_state))


def _names(path: tuple[Any, ...], below: tuple[Any, ...]) -> Path:
    return tuple(map(str, path)) + names_of(below)


def _raw(node: Any) -> Any:
    return node.get_raw_value() if isinstance(node, nnx.Variable) else node


def _placed(array: Any, like: Any) -> Any:
    """A NumPy array as a jax array. Layers of nnx update parts of arrays in place."""
    if not isinstance(array, np.ndarray | np.generic):
        return array
    sharding = placement(like)
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
