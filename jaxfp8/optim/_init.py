"""From float32 parameters to low-precision weights with master weights, and back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.ops._weight_states import path_name
from jaxfp8.optim._master_weights import MasterWeightsState
from jaxfp8.optim._stored import is_empty, kind_of, loaded, states_of, trees_of
from jaxfp8.optim._weights import (
    Parameters,
    dtype_of,
    has_master,
    rounded,
    start_of,
    with_originals,
)


def init_master_weights(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    dtype: DType = jnp.bfloat16,
    keep_float32: Callable[[str, Array], bool] | None = None,
    weights: PyTree | None = None,
    state: PyTree | None = None,
) -> tuple[PyTree, Any]:
    """Start training at float32 parameters: weights to train with, and the optimizer state.

    The master weights start at the values of `params`. So does the state of the wrapped optimizer.

    Args:
      tx: an optimizer that `with_master_weights` made, or one that contains it.
      params: float32 arrays. Other arrays stay as they are.
      dtype: of the weights, bfloat16 or float16.
      keep_float32: `keep_float32(path, x)` is True for each array x that stays in float32, and has
        no master weight. A path is written as in "block/norm/scale".
      weights: a tree that says what each weight will be, in place of `dtype` and `keep_float32`:
        arrays of their dtypes, and weights in FP8, which `fp8.quantize_params(params, recipe,
        primary=True, dtype=jnp.bfloat16)` makes. Its values are not used, so `jax.eval_shape` of
        the call is enough.
      state: the quantizer state of the model, for weights in FP8 of recipes with state.

    Returns:
      The weights, and the optimizer state.

    Raises:
      ValueError: if `dtype` is no low precision, or the optimizer has no master weights.

    Example:
      >>> from jaxfp8.optim import BFloat16Plus, with_master_weights
      >>> params = {"kernel": jnp.full((2, 2), 0.1), "scale": jnp.ones(2)}
      >>> tx = with_master_weights(optax.adamw(1e-3), master=BFloat16Plus())
      >>> keep = lambda path, x: "scale" in path
      >>> weights, opt_state = init_master_weights(tx, params, keep_float32=keep)
      >>> jax.tree.map(lambda x: str(x.dtype), weights)
      {'kernel': 'bfloat16', 'scale': 'float32'}
      >>> master_weights(opt_state, weights)["kernel"][0, 0] == jnp.float32(0.1)
      Array(True, dtype=bool)
    """
    if weights is None:
        weights = _as_weights(params, dtype, keep_float32)
    abstract = _state_of(jax.eval_shape(tx.init, with_originals(weights)))
    opt_state = tx.init(params)  # The wrapped optimizer sees float32 parameters.
    parameters = Parameters.of(weights)
    master, states, leaves = kind_of(abstract.masters), [], []
    for path, leaf, x, made, own in zip(
        parameters.paths,
        parameters.leaves,
        parameters.like(params),
        states_of(abstract.masters, parameters),
        parameters.states(state),
        strict=True,
    ):
        value = start_of(x) if has_master(leaf, path) else x
        if not is_empty(made):
            made, value = master.store(value, dtype_of(leaf))
        states.append(made)
        leaves.append(rounded(value, leaf, own) if has_master(leaf, path) else value)
    masters = trees_of(master, states, parameters)
    replaced = jax.tree.map(
        lambda node: node._replace(masters=masters) if _is_state(node) else node,
        opt_state,
        is_leaf=_is_state,
    )
    return parameters.tree(leaves), replaced


def _as_weights(
    params: PyTree, dtype: DType, keep_float32: Callable[[str, Array], bool] | None
) -> PyTree:
    """The shapes and dtypes of the weights."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"dtype={jnp.dtype(dtype)} has no master weights; use jnp.bfloat16 or jnp.float16."
        )

    def weight(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        name = path_name(path)
        found = jnp.result_type(x)
        is_cast = found == jnp.float32 and not (keep_float32 and keep_float32(name, x))
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype if is_cast else found)

    return jax.tree_util.tree_map_with_path(weight, params)


def master_weights(opt_state: Any, params: PyTree) -> PyTree:
    """The float32 master weights of a training run: to evaluate, to export, to save.

    Args:
      opt_state: the state of an optimizer that `with_master_weights` made, or one that contains it.
      params: the weights that belong to it.

    Returns:
      A tree like `params`. A parameter without a master weight is in it as it is.

    Raises:
      ValueError: if the state has no master weights, or if they do not belong to `params`.

    Example:
      >>> from jaxfp8.optim import Float32, with_master_weights
      >>> params = {"w": jnp.ones(2, jnp.bfloat16), "step": 3}
      >>> tx = with_master_weights(optax.sgd(0.1), master=Float32())
      >>> master_weights(tx.init(params), params)
      {'step': 3, 'w': Array([1., 1.], dtype=float32)}
    """
    masters, parameters = _state_of(opt_state).masters, Parameters.of(params)
    states = states_of(masters, parameters)
    return parameters.tree(loaded(kind_of(masters), states, parameters))


def _is_state(node: Any) -> bool:
    return isinstance(node, MasterWeightsState)


def _state_of(opt_state: Any) -> MasterWeightsState:
    """The state of `with_master_weights` inside of an optimizer state."""
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(node)]
    if len(found) != 1:
        raise ValueError(
            f"the optimizer state has {len(found)} states of with_master_weights; exactly one is "
            "needed. Make the optimizer by with_master_weights(tx, master=...)."
        )
    return found[0]
