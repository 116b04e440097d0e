"""`with_master_weights`: an optimizer that holds the precise copies of weights."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfp8._check import check_type
from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.numerics._formats import E4M3, E5M2
from jaxfp8.ops._quantize_params import path_name, requantize
from jaxfp8.optim._eight_bit_formats import FP8
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
    round_to_bfloat16,
)
from jaxfp8.optim._weights import Overwrite, Parameters, dtype_of, is_float, widened
from jaxfp8.state._state import MatmulState
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight

# The master weight of one parameter: where it starts, and what it is rounded to.


def _has_master(leaf: Any, path: str) -> bool:
    """Whether a parameter gets a master weight: one in few bits does."""
    dtype = dtype_of(leaf)
    if dtype is None or dtype in (jnp.bfloat16, jnp.float16):
        return True
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"params{path} is an array of {dtype}, which has no scale. Use bfloat16, float16, "
            "float32 or a quantized weight."
        )
    return False


def _start_of(leaf: Any) -> Array:
    """The float32 value [...] of a parameter, at which its master weight starts."""
    if is_weight(leaf):
        if leaf.original is None:
            raise ValueError(
                f"params has {leaf}, from which no master weight can start. Start at the values "
                "before the cast: params, opt_state = init_master_weights(tx, values, "
                "weights=params)."
            )
        leaf = leaf.original
    # Without the copy, a donated optimizer state would take a float32 parameter with it.
    return jnp.array(leaf, jnp.float32, copy=True)


def _with_originals(weights: PyTree) -> PyTree:
    """Weights in FP8 with the type of an original array, for `jax.eval_shape`."""

    def one(node: Any) -> Any:
        if not isinstance(node, QuantizedWeight):
            return node
        original: Any = jax.ShapeDtypeStruct(node.shape, node.dtype)
        return dataclasses.replace(node, original=original)

    return jax.tree.map(one, weights, is_leaf=is_weight)


def _rounded(master: Array, like: Any, state: MatmulState | None) -> Any:
    """The parameter in the place of `like`, for a master weight float32 [...]."""
    if dtype_of(like) == jnp.float16:
        return master.astype(jnp.float16)
    w = round_to_bfloat16(master)
    if not isinstance(like, QuantizedWeight):
        return w
    if like.dtype != jnp.bfloat16:
        raise ValueError(
            f"params has {like}. Its master weight is rounded to bfloat16 before the cast. Make "
            "the weight of bfloat16, too: fp8.quantize_params(..., dtype=jnp.bfloat16)."
        )
    return requantize(like, w, state=state)


# The state of the master weights of a whole tree, and of each parameter in it.


def _is_empty(state: MasterState) -> bool:
    """Whether nothing is stored for a parameter."""
    return not jax.tree.leaves(state)


def _nothing(master: AbstractMaster) -> MasterState:
    """The state of a parameter without a master weight."""
    return master.state(*[None] * len(master.state._fields))


def _trees_of(
    master: AbstractMaster, states: list[MasterState], parameters: Parameters
) -> MasterState:
    """The state of all parameters, as trees, from that of each. Inverse of `_states_of`."""
    columns = ([getattr(state, field) for state in states] for field in master.state._fields)
    return master.state(*map(parameters.tree, columns))


def _states_of(masters: MasterState, parameters: Parameters) -> list[MasterState]:
    """The state of each parameter, from the state of all. It is checked."""
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
    fits = _has_master(leaf, path) == bool(arrays)
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


def _loaded(
    master: AbstractMaster, states: list[MasterState], parameters: Parameters
) -> list[Array]:
    """The master weight of each parameter, float32 [...], or the parameter if it has none."""
    return [
        leaf if _is_empty(state) else master.load(state, leaf)
        for state, leaf in zip(states, parameters.leaves, strict=True)
    ]


def _kind_of(masters: MasterState) -> AbstractMaster:
    """The kind of master weights that a state stores. Its fields may be trees."""
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


# The optimizer that holds them.


@register_node
class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`. `master_weights` reads it.

    Example:
      >>> from jaxfp8.optim import Float32
      >>> tx = with_master_weights(optax.sgd(0.1), master=Float32())
      >>> tx.init({"w": jnp.ones(2, jnp.bfloat16)}).masters.values["w"].dtype.name
      'float32'
    """

    masters: MasterState  # trees like params; None where a parameter has no master weight
    inner: optax.OptState  # of the wrapped optimizer


def with_master_weights(
    tx: optax.GradientTransformation, *, master: AbstractMaster
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of float32 master weights, for parameters in lower precision.

    The wrapped optimizer gets float32 gradients, and the float32 master weights as its parameters.
    So weight decay, for example, acts on master weights. The new weights are rounded to nearest,
    ties away from zero. They leave `update` as `Overwrite`s, which `optax.apply_updates` writes
    exactly.

    | parameter | master weight |
    |---|---|
    | bfloat16 or float16 array, weight in FP8 | stored as `master` says |
    | float32 array | none: the parameter itself |
    | other array | none: the wrapped optimizer gets it as it is |

    `init` starts the master weights at the values of the parameters. To start at float32 values,
    use `init_master_weights`.

    This must be the outermost transformation that changes updates. What clips or scales belongs
    inside: `with_master_weights(optax.chain(optax.clip_by_global_norm(1.0), adamw), ...)`.

    With `BFloat16Plus` a bfloat16 parameter is a part of its own master weight. Do not change
    parameters between updates: a change replaces the high part only, and nothing detects it. After
    loading other parameters, call `init` again.

    Args:
      tx: the wrapped optimizer.
      master: how master weights are stored: `Float32()`, `BFloat16Plus(bits=16)`,
        `BFloat16Plus(bits=8)` or `Float16()`.

    Returns:
      An optimizer. Its `update(grads, opt_state, params, *, fp8_state=None, **extra_args)` needs
      params. `fp8_state` is the quantizer state of the model after this step. Weights in FP8 of
      recipes with state need it, because their next cast takes its scales. The wrapped optimizer
      gets `extra_args`.

    Raises:
      TypeError: if `master` is no kind of master weight.
      ValueError: if `master` is `FP8()` without `force=True`. By `update`, if the state does not
        belong to params.

    Example:
      >>> from jaxfp8.optim import BFloat16Plus
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> tx = with_master_weights(optax.sgd(2.0**-10), master=BFloat16Plus())
      >>> opt_state = tx.init(params)
      >>> for _ in range(4):  # each step is a quarter of the spacing of bfloat16 below 1
      ...     updates, opt_state = tx.update({"w": jnp.ones(2)}, opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params["w"]
      Array([0.996094, 0.996094], dtype=bfloat16)
    """
    kinds = "one of Float32(), BFloat16Plus(bits=16), BFloat16Plus(bits=8) and Float16()"
    check_type("master", master, AbstractMaster, kinds)
    master.check_master()
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> MasterWeightsState:
        parameters = Parameters.of(params)
        pairs = [
            master.store(_start_of(leaf), dtype_of(leaf))
            if _has_master(leaf, path)
            else (_nothing(master), leaf)
            for path, leaf in zip(parameters.paths, parameters.leaves, strict=True)
        ]
        masters = _trees_of(master, [state for state, _ in pairs], parameters)
        values = parameters.tree([value for _, value in pairs])
        return MasterWeightsState(masters, inner.init(values))

    def update(
        grads: PyTree,
        opt_state: MasterWeightsState,
        params: PyTree | None = None,
        *,
        fp8_state: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "params=None: with_master_weights needs the parameters. Call "
                "tx.update(grads, opt_state, params)."
            )
        parameters = Parameters.of(params)
        old = _states_of(opt_state.masters, parameters)
        _check_some(parameters)
        masters = _loaded(master, old, parameters)
        wide = list(map(widened, parameters.like(grads), masters))
        updates, inner_state = inner.update(
            parameters.tree(wide), opt_state.inner, parameters.tree(masters), **extra_args
        )
        states, written = [], []
        for leaf, value, step, each, own in zip(
            parameters.leaves, masters, parameters.like(updates), old,
            parameters.states(fp8_state), strict=True,
        ):  # fmt: skip
            if _is_empty(each):
                states.append(each)
                written.append(step)
                continue
            new, value = master.store(value + step.astype(jnp.float32), dtype_of(leaf), each)
            states.append(new)
            written.append(jax.tree.map(Overwrite, _rounded(value, leaf, own)))
        new_masters = _trees_of(master, states, parameters)
        return parameters.tree(written), MasterWeightsState(new_masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_some(parameters: Parameters) -> None:
    """Raise ValueError if there are floats, but none in low precision."""
    if any(map(_has_master, parameters.leaves, parameters.paths)):
        return
    if any(map(is_float, parameters.leaves)):
        raise ValueError(
            "params are all in float32, so with_master_weights has nothing to do. Start with "
            "params, opt_state = init_master_weights(tx, params), which rounds them to bfloat16."
        )


# From float32 parameters to low-precision weights with master weights, and back.


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
    abstract = _state_of(jax.eval_shape(tx.init, _with_originals(weights)))
    opt_state = tx.init(params)  # The wrapped optimizer sees float32 parameters.
    parameters = Parameters.of(weights)
    master, states, leaves = _kind_of(abstract.masters), [], []
    for path, leaf, x, made, own in zip(
        parameters.paths,
        parameters.leaves,
        parameters.like(params),
        _states_of(abstract.masters, parameters),
        parameters.states(state),
        strict=True,
    ):
        value = _start_of(x) if _has_master(leaf, path) else x
        if not _is_empty(made):
            made, value = master.store(value, dtype_of(leaf))
        states.append(made)
        leaves.append(_rounded(value, leaf, own) if _has_master(leaf, path) else value)
    masters = _trees_of(master, states, parameters)
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
    states = _states_of(masters, parameters)
    return parameters.tree(_loaded(_kind_of(masters), states, parameters))


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
