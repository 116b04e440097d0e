"""The state of the master weights of a whole tree, and of each parameter in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfp8._typing import Array
from jaxfp8.numerics._formats import E4M3, E5M2
from jaxfp8.optim._fp8_format import FP8
from jaxfp8.optim._masters import (
    AbstractMaster,
    BFloat16Plus,
    BFloat16PlusState,
    Float16,
    Float16State,
    Float32,
    Float32State,
    FP8State,
    MasterState,
)
from jaxfp8.optim._weights import Parameters, dtype_of, has_master


def is_empty(state: MasterState) -> bool:
    """Whether nothing is stored for a parameter."""
    return not jax.tree.leaves(state)


def nothing(master: AbstractMaster) -> MasterState:
    """The state of a parameter without a master weight."""
    return master.state(*[None] * len(master.state._fields))


def trees_of(
    master: AbstractMaster, states: list[MasterState], parameters: Parameters
) -> MasterState:
    """The state of all parameters, as trees, from the state of each. `states_of` is its inverse."""
    columns = ([getattr(state, field) for state in states] for field in master.state._fields)
    return master.state(*map(parameters.tree, columns))


def states_of(masters: MasterState, parameters: Parameters) -> list[MasterState]:
    """The state of each parameter, from the state of all.

    Raises:
      ValueError: if a parameter gets a master weight and has none, or the other way round.
    """
    columns = map(parameters.like, masters)
    states = [type(masters)(*each) for each in zip(*columns, strict=True)]
    for path, leaf, state in zip(parameters.paths, parameters.leaves, states, strict=True):
        _check(path, leaf, state)
    return states


def _check(path: str, leaf: Any, state: MasterState) -> None:
    """Raise ValueError if a state does not belong to a parameter."""
    if any(isinstance(field, optax.MaskedNode) for field in state):
        return  # optax.masked hides this parameter from with_master_weights
    arrays, dtype, shape = jax.tree.leaves(state), dtype_of(leaf), np.shape(leaf)
    fits = has_master(leaf, path) == bool(arrays)
    if arrays:
        fits &= arrays[0].shape == shape
    if arrays and isinstance(state, BFloat16PlusState):
        fits &= (state.high is None) == (dtype == jnp.bfloat16)
    if not fits:
        stored = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise ValueError(
            f"params{path} is {dtype or type(leaf).__name__}{list(shape)}, but the optimizer state "
            f"was made for another parameter: it stores {stored or 'nothing'}. Call tx.init or "
            "init_master_weights for the parameters that you train."
        )


def loaded(
    master: AbstractMaster, states: list[MasterState], parameters: Parameters
) -> list[Array]:
    """The master weight of each parameter, float32 [...], or the parameter if it has none."""
    return [
        leaf if is_empty(state) else master.load(state, leaf)
        for state, leaf in zip(states, parameters.leaves, strict=True)
    ]


def kind_of(masters: MasterState) -> AbstractMaster:
    """The kind of master weights that a state stores. Its fields may be trees.

    Example:
      >>> kind_of(BFloat16PlusState(None, jnp.zeros(2, jnp.uint8)))
      BFloat16Plus(bits=8)
    """
    match masters:
        case Float32State():
            return Float32()
        case Float16State():
            return Float16()
        case FP8State(values=values):
            is_e5m2 = any(leaf.dtype == E5M2.dtype for leaf in jax.tree.leaves(values))
            return FP8(E5M2 if is_e5m2 else E4M3, force=True)
        case BFloat16PlusState(low=low):
            bytes_of_low = {leaf.dtype.itemsize for leaf in jax.tree.leaves(low)}
            return BFloat16Plus(bits=8 * max(bytes_of_low, default=2))
