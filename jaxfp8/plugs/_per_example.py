"""A matmul of a layer that is written for one example, and mapped over the batch by `jax.vmap`.

`jax.vmap` of an FP8 matmul would quantize each example alone, and would compute the gradient of the
weight as one outer product for each example. Here `jax.vmap` gives all examples to one matmul. A
tensor has one amax for all examples, and tiles along tokens have the tokens of all examples.
"""

import functools
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array, PyTree, UncollectedStateError
from jaxfp8.ops._dot import dot
from jaxfp8.plugs._policy import Policy


def per_example_dot(policy: Policy, x: Array, w: Array, state: PyTree) -> Array:
    """The FP8 matmul of x [..., K] and w [K, N], which `jax.vmap` maps as one matmul.

    Args:
      policy: the recipe and the options.
      x: [..., K], of one example.
      w: [K, N], shared by all examples. If it is mapped, there is one matmul for each of its
        slices.
      state: the state of the matmul; () for recipes without state.

    Returns:
      [..., N].

    Raises:
      UncollectedStateError: in the backward pass, if the state is not collected.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> policy, x, w = Policy(fp8.recipes.current()), jnp.ones((2, 8)), jnp.ones((8, 4))
      >>> jax.vmap(lambda x: per_example_dot(policy, x, w, ()))(x).shape
      (2, 4)
    """
    return _dot(policy, x, w, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(policy: Policy, x: Array, w: Array, state: PyTree) -> Array:
    return _forward(policy)(x, w, state)


def _forward_rule(policy: Policy, x: Array, w: Array, state: PyTree) -> tuple[Array, Any]:
    return _forward(policy)(x, w, state), (x, w, state)


def _backward_rule(policy: Policy, residuals: Any, g: Array) -> Any:
    # The casts of x and w are written twice. XLA computes them once if both are in one program.
    return _backward(policy)(*residuals, g)


_dot.defvjp(_forward_rule, _backward_rule)


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
def _forward(policy: Policy) -> Any:
    """The matmul under `jax.vmap`. The result has the axes of x, so they need no change."""
    matmul = custom_vmap(functools.partial(_matmul, policy))

    @matmul.def_vmap
    def _rule(size: int, mapped: Any, x: Array, w: Array, state: PyTree) -> Any:
        x_mapped, *others = mapped
        if any(jax.tree.leaves(others)):
            return _sliced(functools.partial(_matmul, policy), size, mapped, x, w, state)
        return matmul(x, w, state), x_mapped

    return matmul


@functools.cache
def _backward(policy: Policy) -> Any:
    """The gradients under `jax.vmap`. Those of w and of the state are of all examples."""
    gradients = custom_vmap(functools.partial(_gradients, policy))

    @gradients.def_vmap
    def _rule(size: int, mapped: Any, x: Array, w: Array, state: PyTree, g: Array) -> Any:
        x_mapped, w_mapped, state_mapped, g_mapped = mapped
        if not (x_mapped and g_mapped) or any(jax.tree.leaves((w_mapped, state_mapped))):
            return _sliced(functools.partial(_gradients, policy), size, mapped, x, w, state, g)
        out = gradients(x, w, state, g)
        return out, (True, False, jax.tree.map(lambda _: False, out[2]))

    return gradients


def _sliced(function: Any, size: int, mapped: Any, *arguments: Any) -> Any:
    """`jax.vmap` of a function: one matmul for each slice, as for the members of an ensemble."""
    axes = jax.tree.map(lambda each: 0 if each else None, mapped)
    out = jax.vmap(function, in_axes=tuple(axes), axis_size=size)(*arguments)
    return out, jax.tree.map(lambda _: True, out)
