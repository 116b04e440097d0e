"""FP8 for axlearn: the child layer that its dense layers call for their einsum.

axlearn keeps quantizer state in parameters. Its learner overwrites them with their gradients, if
`OverrideInplaceUpdateTransformation` has a rule for them. `train_dtype` and `eval_dtype` cast all
parameters, so states are kept as bytes (`_state_bytes.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp

from jaxfp8._typing import Array, FP8StateError
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.ops._einsum import einsum
from jaxfp8.plugs._policy import Policy, import_guest, is_called_by
from jaxfp8.plugs._state_bytes import StateBytes, from_bytes
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._init import init_state
from jaxfp8.state._state import LEAVES, MatmulState

PREFIX = "fp8_"  # of the variables of a state, each an array with a name
UPDATE_RULES = (f".*/{PREFIX}.*",)
"""`rules` of axlearn's `OverrideInplaceUpdateTransformation`, for recipes with state."""


def quantized_einsum_config(recipe: Recipe, **options: Unpack[LayerOptions]) -> Any:
    """The config of a `BaseQuantizedEinsum` that computes with a recipe of jaxfp8.

    Args:
      recipe: which quantizer for which operand.
      **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`, `state_channel`,
        `save_original`; see `fp8.dot_general`. `state_channel` is "gradient" by default.

    Returns:
      A config, for `set_quantized_dot_general_recursively`.

    Raises:
      FP8StateError: when the layer is called in `with_minibatch_steps`, if the recipe has state.
      ImportError: if axlearn is not installed.
      TypeError: if `recipe` is not a Recipe, or if an option is unknown.
      ValueError: if the recipe needs keys.

    Example:
      .. code-block:: python

        from jaxfp8.plugs import axlearn as fp8_axlearn

        set_quantized_dot_general_recursively(
            cfg.model, fp8_axlearn.quantized_einsum_config(fp8.recipes.delayed())
        )
        cfg.learner.optimizer = config_for_class(...)  # your optimizer
        cfg.learner.optimizer = OverrideInplaceUpdateTransformation.default_config().set(
            transformation=cfg.learner.optimizer, rules=fp8_axlearn.UPDATE_RULES
        )
    """
    options.setdefault("state_channel", "gradient")
    policy = Policy.of("jaxfp8.plugs.axlearn.quantized_einsum_config", recipe, options)
    return _layer().default_config().set(policy=policy)


@functools.cache
def _layer() -> Any:
    """The class of layers. axlearn defines its base, so it is made by its first use."""
    package = "git+https://github.com/apple/axlearn"
    layers = import_guest("axlearn.common.quantized_dot_general.layers", package)
    base_layer = import_guest("axlearn.common.base_layer", package)
    config = import_guest("axlearn.common.config", package)
    zero = import_guest("axlearn.common.param_init", package).constant_initializer(0.0)

    class FP8Einsum(layers.BaseQuantizedEinsum):  # type: ignore[name-defined]
        @config.config_class
        class Config(layers.BaseQuantizedEinsum.Config):  # type: ignore[name-defined]
            policy: config.Required[Policy] = config.REQUIRED  # type: ignore[name-defined]

        def _create_layer_parameter_specs(self) -> dict[str, Any]:
            specs: dict[str, Any] = super()._create_layer_parameter_specs()
            for name, shape in leaf_shapes(self.config.policy.recipe).items():
                specs[name] = base_layer.ParameterSpec(
                    shape=shape, dtype=jnp.float32, mesh_axes=(None,) * len(shape),
                    initializer=zero, weight_decay_scale=0,
                )  # fmt: skip
            return specs

        def einsum_maybe_quantized(
            self, subscripts: str, *, activation: Array, kernel: Array
        ) -> Array:
            policy: Policy = self.config.policy
            check_one_backward_pass(policy)
            state = state_from_variables(policy.recipe, lambda name: self.parameters[name])
            return einsum(
                subscripts, activation, kernel, recipe=policy.recipe, state=state,
                **policy.options,
            )  # fmt: skip

    return FP8Einsum


def check_one_backward_pass(policy: Policy) -> None:
    """Raise FP8StateError in axlearn's loop over minibatches, which averages states."""
    if policy.passes_state_as_gradient and is_called_by("axlearn.common.gradient_accumulation"):
        raise FP8StateError(
            f"with_minibatch_steps accumulates gradients, but recipe {policy.recipe.name!r} has "
            "quantizer state, and axlearn would average the states of minibatches. Leave "
            "forward_fn_transformation of the learner unset, or take a recipe without state, "
            "such as fp8.recipes.current()."
        )


def leaf_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a state in bytes, by the name of its variable. All are float32.

    An array begins as zeros: a state that is 0 everywhere is unset.
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return {}
    return {PREFIX + name: (*jnp.shape(getattr(state, name)), 4) for name in LEAVES}


def state_from_variables(recipe: Recipe, variable: Callable[[str], Array]) -> Any:
    """The state whose bytes are variables, which `variable` returns by name. () without state.

    Variables may be cast, and their cotangents have the bytes of the next state.
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return ()
    leaves: dict[str, Any] = {name: variable(PREFIX + name) for name in LEAVES}
    return from_bytes(StateBytes(dataclasses.replace(state, **leaves)))
