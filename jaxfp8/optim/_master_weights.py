"""`with_master_weights`: an optimizer that holds the master weights of low-precision parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import PyTree
from jaxfp8.optim._masters import AbstractMaster, MasterState
from jaxfp8.optim._overwrite import Overwrite
from jaxfp8.optim._stored import is_empty, loaded, nothing, states_of, trees_of
from jaxfp8.optim._weights import Parameters, dtype_of, has_master, rounded, start_of


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
    if not isinstance(master, AbstractMaster):
        raise TypeError(
            f"master={master!r} is no kind of master weight; use Float32(), BFloat16Plus(bits=16), "
            "BFloat16Plus(bits=8) or Float16()."
        )
    master.check_master()
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> MasterWeightsState:
        parameters = Parameters.of(params)
        pairs = [
            master.store(start_of(leaf), dtype_of(leaf))
            if has_master(leaf, path)
            else (nothing(master), leaf)
            for path, leaf in zip(parameters.paths, parameters.leaves, strict=True)
        ]
        masters = trees_of(master, [state for state, _ in pairs], parameters)
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
        old = states_of(opt_state.masters, parameters)
        _check_some(parameters)
        masters = loaded(master, old, parameters)
        widened = map(_widened, parameters.like(grads), masters)
        updates, inner_state = inner.update(
            parameters.tree(list(widened)), opt_state.inner, parameters.tree(masters), **extra_args
        )
        states, written = [], []
        for leaf, value, step, each, own in zip(
            parameters.leaves, masters, parameters.like(updates), old,
            parameters.states(fp8_state), strict=True,
        ):  # fmt: skip
            if is_empty(each):
                states.append(each)
                written.append(step)
                continue
            new, value = master.store(value + step.astype(jnp.float32), dtype_of(leaf), each)
            states.append(new)
            written.append(jax.tree.map(Overwrite, rounded(value, leaf, own)))
        new_masters = trees_of(master, states, parameters)
        return parameters.tree(written), MasterWeightsState(new_masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_some(parameters: Parameters) -> None:
    """Raise ValueError if there are floats, but none in low precision."""
    if any(map(has_master, parameters.leaves, parameters.paths)):
        return
    if any(map(_is_float, parameters.leaves)):
        raise ValueError(
            "params are all in float32, so with_master_weights has nothing to do. Start with "
            "params, opt_state = init_master_weights(tx, params), which rounds them to bfloat16."
        )


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def _widened(grad: Any, master: Any) -> Any:
    """A gradient in float32, or in float64 where the parameter is float64."""
    if isinstance(grad, QuantizedTensor):
        return grad.dequantize(jnp.float32)
    if not _is_float(grad):
        return grad
    return jnp.asarray(grad).astype(jnp.promote_types(jnp.result_type(master), jnp.float32))
