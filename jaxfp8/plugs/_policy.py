"""What plugs share: the recipe and options of a layer, and how a framework holds its state."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfp8._call import check_options
from jaxfp8._typing import Array, PyTree, UncollectedStateError
from jaxfp8.matmul._options import LayerOptions, check_save_original, check_state_channel
from jaxfp8.ops._dot_general import dot
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._init import init_state
from jaxfp8.state._state import LEAVES, MatmulState

# The recipe and the options of a matmul, as one hashable value: a static field of a layer.


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a layer of a framework multiplies.

    Attributes:
      recipe: which quantizer for which operand.
      pairs: the options of the matmul, as sorted pairs (name, value).
    """

    recipe: Recipe
    pairs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, function: str, recipe: Recipe, options: LayerOptions) -> "Policy":
        """The policy of these arguments.

        Args:
          function: the public function that got the arguments, for messages.
          recipe: which quantizer for which operand.
          options: the options of the matmul.

        Raises:
          TypeError: if `recipe` is not a Recipe, or if an option is unknown.
          ValueError: if the recipe needs keys, or if `state_channel` or `save_original` is
            unknown.

        Example:
          >>> import jaxfp8 as fp8
          >>> Policy.of("f", fp8.recipes.current(), {"state_channel": "gradient"}).options
          {'state_channel': 'gradient'}
        """
        check_recipe(recipe)
        check_options(function, LayerOptions, options)
        check_kernels(options.get("kernels"))
        check_state_channel(options.get("state_channel"))
        check_save_original(options.get("save_original"))
        if recipe.needs_key:
            raise ValueError(
                f"recipe {recipe.name!r} rounds stochastically, which needs a key at each step. "
                f"{function} has no keys. Use gradient_rounding='nearest'."
            )
        return cls(recipe, tuple(sorted(options.items())))

    @property
    def options(self) -> Any:
        """The options, for `**`."""
        return dict(self.pairs)


# The import of a framework by its plug.


def guest(module: str, package: str) -> Any:
    """A module of a framework.

    Args:
      module: the name of the module.
      package: what `pip install` calls it.

    Returns:
      The module.

    Raises:
      ImportError: if the module cannot be imported. The message names the package to install.

    Example:
      >>> guest("jax.numpy", "jax").__name__
      'jax.numpy'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this plug needs the module {module!r}, and importing it failed: {error}. Install it "
            f"with: pip install {package}",
            name=module,
        ) from error


# A state as separate arrays, for frameworks whose variables are arrays with names.

PREFIX = "fp8_"


def leaf_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a state, by the name of its variable. All are float32.

    An array begins as zeros: a state that is 0 everywhere is unset.

    Example:
      >>> import jaxfp8 as fp8
      >>> leaf_shapes(fp8.recipes.delayed())["fp8_scale"]
      (3,)
      >>> leaf_shapes(fp8.recipes.current())
      {}
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return {}
    return {PREFIX + name: jnp.shape(getattr(state, name)) for name in LEAVES}


def state_of(recipe: Recipe, variable: Callable[[str], Array]) -> Any:
    """The state whose arrays are variables.

    Args:
      recipe: the recipe of the state.
      variable: returns the variable of a name.

    Returns:
      A state; () for recipes without state.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> zeros = {name: jnp.zeros(shape) for name, shape in leaf_shapes(recipe).items()}
      >>> state_of(recipe, zeros.get).scale.shape
      (3,)
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return ()
    leaves: dict[str, Any] = {name: variable(PREFIX + name) for name in LEAVES}
    return dataclasses.replace(state, **leaves)


# A matmul of a layer that is written for one example, and mapped over the batch by `jax.vmap`.
#
# `jax.vmap` of an FP8 matmul would quantize each example alone, and would compute the gradient of
#   the
# weight as one outer product for each example. Here `jax.vmap` gives all examples to one matmul. A
# tensor has one amax for all examples, and tiles along tokens have the tokens of all examples.


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
