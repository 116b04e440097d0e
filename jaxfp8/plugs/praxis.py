"""FP8 for praxis: the layer that praxis' layers take as `einsum_tpl=`.

praxis overwrites the variables of a collection, OVERWRITE_WITH_GRADIENT, with their gradients.
"""

import functools
from typing import Any, Unpack

import jax.numpy as jnp

from jaxfp8._typing import Array
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.ops._einsum import einsum
from jaxfp8.plugs._policy import Policy, import_guest, leaf_shapes, state_from_variables
from jaxfp8.recipes._recipe import Recipe


def einsum_tpl(recipe: Recipe, **options: Unpack[LayerOptions]) -> Any:
    """The template of an einsum layer, for `einsum_tpl=` of praxis' layers.

    Args:
      recipe: which quantizer for which operand.
      **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`, `state_channel`,
        `save_original`; see `fp8.dot_general`. `state_channel` is "gradient" by default.

    Returns:
      A `pax_fiddle.Config` of a layer that is called `(equation, x, w)`.

    Raises:
      ImportError: if praxis is not installed.
      TypeError: if `recipe` is not a Recipe, or if an option is unknown.
      ValueError: if the recipe needs keys.

    Example:
      .. code-block:: python

        from jaxfp8.plugs import praxis as fp8_praxis

        linear_tpl = pax_fiddle.Config(
            layers.Linear, einsum_tpl=fp8_praxis.einsum_tpl(fp8.recipes.delayed())
        )
    """
    options.setdefault("state_channel", "gradient")
    policy = Policy.of("jaxfp8.plugs.praxis.einsum_tpl", recipe, options)
    return import_guest("praxis.pax_fiddle", "praxis").Config(_layer(), policy=policy)


@functools.cache
def _layer() -> Any:
    """The class of layers. praxis defines its base, so it is made by its first use."""
    base_layer = import_guest("praxis.base_layer", "praxis")
    collections = base_layer.WeightHParamsCollection

    class FP8EinsumOp(base_layer.BaseLayer):  # type: ignore[name-defined]
        policy: Any = None

        def setup(self) -> None:
            for name, shape in leaf_shapes(self.policy.recipe).items():
                weight = base_layer.WeightHParams(
                    shape=list(shape), init=base_layer.WeightInit.Constant(0.0),
                    dtype=jnp.float32, mesh_shape=self.mesh_shape,
                    tensor_split_dims_mapping=None,
                    collections=[
                        collections.OVERWRITE_WITH_GRADIENT,
                        collections.DISALLOW_BFLOAT16_CONVERSION,
                    ],
                )  # fmt: skip
                self.create_variable(name, weight)

        def __call__(self, equation: str, x: Array, w: Array) -> Array:
            policy: Policy = self.policy
            return einsum(
                equation, x.astype(w.dtype), w, recipe=policy.recipe,
                state=state_from_variables(policy.recipe, lambda name: getattr(self.theta, name)),
                **policy.options,
            )  # fmt: skip

    return FP8EinsumOp
