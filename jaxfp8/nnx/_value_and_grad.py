"""`value_and_grad` for nnx models: it returns gradients and updates quantizer state in place."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from jaxfp8._typing import FP8StateError, PyTree, UncollectedStateError
from jaxfp8.nnx._state import holds_state, states_of
from jaxfp8.state._commit import commit as commit_seen
from jaxfp8.state._init import make_concrete
from jaxfp8.state._state import is_state
from jaxfp8.state._value_and_grad import value_and_grad as functional_value_and_grad

_differentiating = contextvars.ContextVar("_differentiating", default=False)


@contextlib.contextmanager
def _running_a_loss() -> Iterator[None]:
    """Mark that a loss is running. A layer that is made inside it would lose its state."""
    token = _differentiating.set(True)
    try:
        yield
    finally:
        _differentiating.reset(token)


def in_a_loss() -> bool:
    """Whether `fp8.nnx.value_and_grad` is running a loss now."""
    return _differentiating.get()


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    commit: bool = True,
    wrt: Any = nnx.Param,
    reduce_axes: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` for a model with FP8 layers, which it updates in place.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs) -> loss` (or `(loss, aux)`).
      has_aux: as in `nnx.value_and_grad`.
      commit: True updates the model's quantizer states. False returns the amaxes that the loss
        saw. Merge them by `fp8.merge_seen`, and call `fp8.nnx.commit` once per optimizer step.
      wrt: filter of the Variables to differentiate with respect to. Default: `nnx.Param`.
      reduce_axes: see `fp8.value_and_grad`.

    Returns:
      A function `(model, *args, **kwargs) -> (loss, grads)`, or `(loss, grads, seen)` with
      `commit=False`. With `has_aux=True` the first result is `(loss, aux)`. The function also
      updates other state that the loss changes: batch statistics, random streams, metrics. It does
      so in the model and in other nnx objects among the arguments. An object must not be in both
      the model and an argument.

    Raises:
      ValueError: if `wrt` matches quantizer states.
      FP8StateError: if the gradient passes through another network with quantizer states, as in a
        GAN. Pass `fp8.nnx.freeze(network)` instead. Also if a compiled function updates a model and
        does not return it: `jax.jit` gives its function a copy of the model. Use `nnx.jit`, or
        return the model or `nnx.state(model)`. jax raises this error when it compiles.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> layer = fp8.nnx.FP8Linear(8, 4, rngs=nnx.Rngs(0))
      >>> run = fp8.nnx.value_and_grad(lambda model, x: model(x).sum())
      >>> loss, grads = run(layer, jnp.ones((2, 8)))
      >>> float(layer.dot_general.state.get_value().amax_history[0, -1])
      1.0
    """

    @functools.wraps(loss_fn)
    def wrapped(model: Any, *args: Any, **kwargs: Any) -> Any:
        _check_wrt(model, wrt)
        graphdef, (params, states, rest) = _split(model, wrt)
        given, (objects, arrays) = _split_arguments(args, kwargs)

        def pure(params: PyTree, states: PyTree) -> Any:
            # copy=True makes Variables of this trace. Without it the loss would write tracers into
            # the caller's Variables.
            inner = nnx.merge(graphdef, params, states, rest, copy=True)
            inner_args, inner_kwargs = nnx.merge(given, objects, arrays, copy=True)
            with _running_a_loss():
                out = loss_fn(inner, *inner_args, **inner_kwargs)
            loss, aux = out if has_aux else (out, None)
            _, (changed_objects, _) = _split_arguments(inner_args, inner_kwargs)
            return loss, (aux, _split(inner, wrt)[1][2], changed_objects)

        run = functional_value_and_grad(pure, has_aux=True, commit=commit, reduce_axes=reduce_axes)
        try:
            (loss, (aux, changed, changed_objects)), grads, new = run(params, states)
        except UncollectedStateError as error:
            raise UncollectedStateError(f"{_whose(args, kwargs)} {error}") from error
        nnx.update(model, changed)
        nnx.update((args, kwargs), changed_objects)
        value = (loss, aux) if has_aux else loss
        if not commit:
            return value, grads, new
        nnx.update(model, _kept(new, "fp8.nnx.value_and_grad"))
        return value, grads

    return wrapped


def _check_wrt(model: Any, wrt: Any) -> None:
    """Raise ValueError if `wrt` matches quantizer states.

    An optimizer with this `wrt` would need gradients of the states, and they have none.
    """
    if caught := nnx.to_flat_state(nnx.state(model, nnx.All(holds_state, wrt))):
        place = ".".join(map(str, next(iter(caught))[0]))
        raise ValueError(
            f"wrt={wrt!r} matches {len(caught)} quantizer states, {place} for instance, which have "
            "no gradient. In value_and_grad write wrt=nnx.Param, or another filter that leaves "
            "them out. Give nnx.Optimizer the same wrt."
        )


def _whose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The first part of a message: which arguments have states that the loss does not train."""
    named = {f"positional argument {i}": each for i, each in enumerate(args, start=2)} | kwargs
    held = [
        f"{name} is a {type(each).__name__} with quantizer states"
        for name, each in named.items()
        if any(not node.frozen for node in jax.tree.leaves(states_of((each,)), is_leaf=is_state))
    ]
    return (
        f"The loss trains only its first argument; {', '.join(held) or 'no other has states'}. "
        "Pass fp8.nnx.freeze(network) for a network that a gradient passes through, also for one "
        "that the loss takes from outside. If the loss takes a gradient inside (a gradient "
        "penalty), use recipes.identity(), because FP8 matmuls have no second derivative. In "
        "detail:"
    )


def _split(model: Any, wrt: Any) -> tuple[Any, tuple[PyTree, PyTree, PyTree]]:
    """The graph of a model, and its parameters, quantizer states and other Variables."""
    graphdef, *parts = nnx.split(model, holds_state, wrt, ...)
    states, params, rest = parts
    return graphdef, (params, make_concrete(states), rest)


def _split_arguments(*arguments: Any) -> tuple[Any, tuple[PyTree, PyTree]]:
    """The graph of the arguments, their Variables, and their arrays.

    The Variables belong to random streams, metrics and other models.
    """
    graphdef, *parts = nnx.split(arguments, nnx.Variable, ...)
    variables, arrays = parts
    return graphdef, (variables, arrays)


def commit(model: Any, seen: PyTree) -> None:
    """Update the quantizer states of a model with the amaxes that its microbatches saw.

    Call it once per optimizer step.

    Args:
      model: an nnx module, updated in place.
      seen: from `fp8.nnx.value_and_grad(..., commit=False)`, merged with `fp8.merge_seen`.

    Raises:
      FP8StateError: if a compiled function drops the update; see `fp8.nnx.value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> layer = fp8.nnx.FP8Linear(8, 4, rngs=nnx.Rngs(0))
      >>> run = fp8.nnx.value_and_grad(lambda model, x: model(x).sum(), commit=False)
      >>> _, _, first = run(layer, jnp.ones((2, 8)))
      >>> _, _, second = run(layer, 3 * jnp.ones((2, 8)))
      >>> fp8.nnx.commit(layer, fp8.merge_seen(first, second))
      >>> float(layer.dot_general.state.get_value().amax_history[0, -1])
      3.0
    """
    nnx.update(model, _kept(commit_seen(states_of(model), seen), "fp8.nnx.commit"))


# An error for quantizer state that a compiled function computes and then drops.
#
# Modules of nnx are pytrees, so `jax.jit` takes a model and gives its function a copy. An update of
# the copy is lost, unless the function returns it. While jax traces the function, it does not know
# yet what the function will return. The finished program shows it:
#
# - `_kept` marks an update with an operation of its own.
# - jax removes each operation of the finished program whose results are not used.
# - A mark that jax would remove becomes an operation that cannot be compiled.

_kept_p = Primitive("fp8_kept")  # the identity
_kept_p.multiple_results = True
_lost_p = Primitive("fp8_lost")  # replaces a mark whose results are not used
_lost_p.multiple_results = True


def _kept(states: PyTree, call: str) -> PyTree:
    """The same states, marked. When a compiled function drops all their histories, jax raises.

    Only histories count, because an evaluation after the step reads scales. Frozen states do not
    count, because no update changes them. `call` is the function that committed, for the message.
    """
    nodes, structure = jax.tree.flatten(states, is_leaf=is_state)
    learning = [i for i, node in enumerate(nodes) if is_state(node) and not node.frozen]
    histories = [nodes[i].amax_history for i in learning]
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in histories):
        return states  # nothing is traced, so nothing can be dropped by a compiled function
    for i, history in zip(learning, _kept_p.bind(*histories, call=call), strict=True):
        nodes[i] = dataclasses.replace(nodes[i], amax_history=history)
    return jax.tree.unflatten(structure, nodes)


def _keep_or_mark_as_lost(used: list[bool], *arguments: Any) -> tuple[list[bool], Any]:
    eqn = arguments[-1]  # newer jax passes one more argument before the equation
    if any(used):
        return [True] * len(eqn.invars), eqn
    return [False] * len(eqn.invars), eqn.replace(primitive=_lost_p, invars=[], outvars=[])


def _refuse(*_: Any, call: str) -> Sequence[Any]:
    raise FP8StateError(
        f"{call} updated the quantizer state of a model inside a function that jax compiles. The "
        "function does not return the update, so it would be lost. jax.jit and other "
        "transformations of jax give the function a copy of the model. Use the transformations of "
        "nnx (nnx.jit), or return the model or nnx.state(model). Or use "
        "value_and_grad(..., commit=False), return the amaxes that were seen, and call "
        "fp8.nnx.commit(model, seen) outside."
    )


_kept_p.def_impl(lambda *leaves, call: list(leaves))
_kept_p.def_abstract_eval(lambda *leaves, call: list(leaves))
mlir.register_lowering(_kept_p, lambda ctx, *leaves, call: list(leaves))
batching.primitive_batchers[_kept_p] = lambda leaves, axes, call: (
    _kept_p.bind(*leaves, call=call),
    axes,
)
partial_eval.dce_rules[_kept_p] = _keep_or_mark_as_lost

_lost_p.def_impl(_refuse)
_lost_p.def_abstract_eval(lambda *, call: [])
mlir.register_lowering(_lost_p, _refuse)
# It has no results. Without this rule a later dead-code pass would remove it, and the error too.
partial_eval.dce_rules[_lost_p] = lambda used, *arguments: ([], arguments[-1])
