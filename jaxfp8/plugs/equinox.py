"""FP8 for equinox: `eqx.nn.Linear` layers that multiply in FP8, with their state in the model."""

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import jax
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array, PyTree, UncollectedStateError
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.ops._dot_general import dot
from jaxfp8.plugs._policy import Policy, import_guest
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._init import init_state
from jaxfp8.state._state import is_state
from jaxfp8.state._value_and_grad import value_and_grad as value_and_grad_of_trees

M = TypeVar("M")


def convert(model: M, recipe: Recipe, paths: str = ".*", **options: Unpack[LayerOptions]) -> M:
    """A model whose `eqx.nn.Linear` layers multiply in FP8.

    Args:
      model: an equinox model.
      recipe: which quantizer for which operand.
      paths: which layers, as a regular expression for the whole path ("layers.0", "mlp.up").
      **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`, `state_channel`,
        `save_original`; see `fp8.dot_general`. w has the shape [in, out]: the transposed weight of
        the layer.

    Returns:
      A model that shares all arrays with `model`. `jax.vmap` of its layers computes one matmul.

    Raises:
      ImportError: if equinox is not installed.
      TypeError: if `recipe` is not a Recipe, or if an option is unknown.
      ValueError: if no layer matches, or if the recipe needs keys.

    Example:
      .. code-block:: python

        from jaxfp8.plugs import equinox as fp8_eqx

        model = eqx.nn.MLP(128, 128, 512, depth=3, key=key)
        model = fp8_eqx.convert(model, fp8.recipes.delayed(), paths="(?!layers.3$).*")
        opt_state = tx.init(fp8_eqx.params(model))

        @eqx.filter_jit
        def train_step(model, opt_state, x, y):
            loss, grads, model = fp8_eqx.value_and_grad(loss_fn)(model, x, y)
            updates, opt_state = tx.update(grads, opt_state, fp8_eqx.params(model))
            return eqx.apply_updates(model, updates), opt_state, loss
    """
    linear = import_guest("equinox.nn", "equinox").Linear
    policy = Policy.of("jaxfp8.plugs.equinox.convert", recipe, options)
    seen: list[str] = []
    changed = 0

    def replace(path: Any, module: Any) -> Any:
        nonlocal changed
        if not isinstance(module, linear) or isinstance(module, _layer()):
            return module
        seen.append(jax.tree_util.keystr(path, simple=True, separator="."))
        if not re.fullmatch(paths, seen[-1]):
            return module
        changed += 1
        return _layer()(module, policy)

    converted = jax.tree_util.tree_map_with_path(
        replace, model, is_leaf=lambda node: isinstance(node, linear)
    )
    if not changed:
        raise ValueError(
            f"paths={paths!r} matches no eqx.nn.Linear of the model. Its layers are {seen}."
        )
    return converted


def params(model: M) -> M:
    """The model with None in the place of all that an optimizer must not change.

    Args:
      model: an equinox model, or its gradients.

    Returns:
      Its floating-point arrays without the quantizer states, for `tx.init` and `tx.update`.

    Example:
      .. code-block:: python

        opt_state = tx.init(fp8_eqx.params(model))
    """
    inexact = import_guest("equinox", "equinox").is_inexact_array
    return jax.tree.map(
        lambda node: node if not is_state(node) and inexact(node) else None,
        model,
        is_leaf=is_state,
    )


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any, Any]]:
    """`eqx.filter_value_and_grad` that also returns the model with its next quantizer states.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs) -> loss` (or `(loss, aux)`).
      has_aux: as in `jax.value_and_grad`.
      **options: those of `fp8.value_and_grad`: `reduce_axes`.

    Returns:
      A function `(model, *args, **kwargs) -> (loss, grads, model)`. The gradients have None for
      quantizer states. Only the states of the new model differ from those of the old one.

    Raises:
      TypeError: for `commit=`: call `fp8.value_and_grad` itself to accumulate gradients.
      FP8StateError: see `fp8.value_and_grad`.

    Example:
      .. code-block:: python

        loss, grads, model = fp8_eqx.value_and_grad(loss_fn)(model, x, y)
    """
    if "commit" in options:
        raise TypeError(
            "commit= would return amaxes, but a model has states. To accumulate gradients, "
            "take the mean of the loss over microbatches in loss_fn."
        )
    eqx = import_guest("equinox", "equinox")

    @functools.wraps(loss_fn)
    def wrapped(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        states, rest = eqx.partition(model, is_state, is_leaf=is_state)
        inexact, fixed = eqx.partition(rest, eqx.is_inexact_array)
        nodes, flat = jax.tree.flatten(states, is_leaf=is_state)
        structure: Any = flat

        def loss(inexact: PyTree, nodes: Any) -> Any:
            whole = eqx.combine(inexact, fixed, structure.unflatten(nodes), is_leaf=is_state)
            return loss_fn(whole, *args, **kwargs)

        value, grads, new = value_and_grad_of_trees(loss, has_aux=has_aux, **options)(
            inexact, nodes
        )
        return value, grads, eqx.combine(structure.unflatten(new), rest, is_leaf=is_state)

    return wrapped


@functools.cache
def _layer() -> type:
    """The class of FP8 layers. equinox defines its base, so it is made by its first use."""
    eqx = import_guest("equinox", "equinox")

    class FP8Linear(eqx.nn.Linear):  # type: ignore[name-defined]
        state: Any
        policy: Policy = eqx.field(static=True)

        def __init__(self, linear: Any, policy: Policy) -> None:
            for name in ("weight", "bias", "in_features", "out_features", "use_bias"):
                setattr(self, name, getattr(linear, name))
            self.state, self.policy = init_state(policy.recipe), policy

        def __call__(self, x: Array, *, key: Any = None) -> Array:
            del key
            if self.in_features == "scalar":
                x = x[None]
            if x.ndim != 1:
                raise ValueError(
                    f"x has shape {list(x.shape)}, but eqx.nn.Linear takes one example "
                    f"[{self.weight.shape[1]}]. Write jax.vmap(layer)(x)."
                )
            y = _per_example_dot(self.policy, x, self.weight.T, self.state)
            y = y if self.bias is None else y + self.bias
            return y[0] if self.out_features == "scalar" else y

    return FP8Linear


# A matmul of a layer that is written for one example, and mapped over the batch by `jax.vmap`.
#
# `jax.vmap` of an FP8 matmul would quantize each example alone. It would compute the gradient of
# the weight as one outer product for each example. Here `jax.vmap` gives all examples to one
# matmul. A tensor has one amax for all examples, and tiles along tokens have the tokens of all
# examples.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_example_dot(policy: Policy, x: Array, w: Array, state: PyTree) -> Array:
    """The FP8 matmul of x [..., K] and w [K, N], which `jax.vmap` maps as one matmul.

    All examples share w. If it is mapped, there is one matmul for each of its slices.
    UncollectedStateError in the backward pass, if the state is not collected.
    """
    return _for_all(_matmul, policy)(x, w, state)


def _forward_rule(policy: Policy, x: Array, w: Array, state: PyTree) -> tuple[Array, Any]:
    return _for_all(_matmul, policy)(x, w, state), (x, w, state)


def _backward_rule(policy: Policy, residuals: Any, g: Array) -> Any:
    # The casts of x and w are written twice. XLA computes them once if both are in one program.
    return _for_all(_gradients, policy)(*residuals, g)


_per_example_dot.defvjp(_forward_rule, _backward_rule)


def _matmul(policy: Policy, x: Array, w: Array, state: PyTree) -> Array:
    return dot(x, w, recipe=policy.recipe, state=state, **policy.options)


def _gradients(policy: Policy, x: Array, w: Array, state: PyTree, g: Array) -> Any:
    try:
        return jax.vjp(functools.partial(_matmul, policy), x, w, state)[1](g)
    except UncollectedStateError as error:  # its message names functions for other models
        raise UncollectedStateError(
            f"a layer [{w.shape[0]}, {w.shape[1]}] of a model by jaxfp8.plugs.equinox.convert is "
            "being differentiated, but its quantizer state is not collected. Write "
            "jaxfp8.plugs.equinox.value_and_grad(loss)(model, ...) in place of jax.grad, "
            "eqx.filter_grad or eqx.filter_value_and_grad. It returns the loss, the gradients and "
            "the model with its next state. If this loss does not train the layer, pass its state "
            "through fp8.freeze."
        ) from error


@functools.cache
def _for_all(function: Callable[..., Any], policy: Policy) -> Any:
    """`_matmul` or `_gradients`. `jax.vmap` calls it once, with all examples.

    The result of the matmul has the axes of x. The gradients of w and of the state are sums or
    maxima over all examples.
    """
    function = functools.partial(function, policy)
    of_all = custom_vmap(function)

    @of_all.def_vmap
    def _rule(size: int, mapped: Any, x: Array, w: Array, state: PyTree, *g: Array) -> Any:
        x_mapped, w_mapped, state_mapped, *g_mapped = mapped
        if not all((x_mapped, *g_mapped)) or any(jax.tree.leaves((w_mapped, state_mapped))):
            # One call for each slice, as for the members of an ensemble.
            axes = jax.tree.map(lambda each: 0 if each else None, mapped)
            out = jax.vmap(function, in_axes=tuple(axes), axis_size=size)(x, w, state, *g)
            return out, jax.tree.map(lambda _: True, out)
        out = of_all(x, w, state, *g)
        return out, (True, False, jax.tree.map(lambda _: False, state)) if g else True

    return of_all
