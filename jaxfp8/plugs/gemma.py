"""FP8 for gemma: a function that `peft.ModuleInterceptor` of google-deepmind/gemma calls.

The interceptor passes each linen module before its first call, and calls the returned module in its
place. The replacement has the scope of the original, so parameters keep their names and shapes.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Protocol, Unpack

import flax.linen as nn

from jaxfp8._typing import Array
from jaxfp8.linen._einsum_op import FP8EinsumOp
from jaxfp8.linen._layers import FP8Dense, FP8DenseGeneral, FP8Einsum
from jaxfp8.ops._options import LayerOptions
from jaxfp8.plugs._policy import Policy
from jaxfp8.recipes._recipe import Recipe

LAYERS = {nn.Dense: FP8Dense, nn.DenseGeneral: FP8DenseGeneral, nn.Einsum: FP8Einsum}
"""Layers of flax, and the layers of jaxfp8 with the same fields and parameters."""


class GemmaEinsum(Protocol):
    """The fields of gemma's `_layers.Einsum` that a replacement reads."""

    shape: tuple[int, ...]
    weight_name: str
    initializer: Any
    dtype: Any


def replace_module_fn(
    recipe: Recipe, paths: str = ".*", **options: Unpack[LayerOptions]
) -> Callable[[nn.Module], nn.Module]:
    """The argument of gemma's `peft.ModuleInterceptor` that puts FP8 layers into a model.

    It replaces `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum` and gemma's `_layers.Einsum`. Subclasses
    of them stay as they are.

    Args:
      recipe: which quantizer for which operand.
      paths: which modules, as a regular expression for the whole path ("layer_0/mlp/linear").
      **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`, `state_channel`,
        `save_original`; see `fp8.dot_general`.

    Returns:
      A function from a module to the module to use. It needs no import of gemma.

    Raises:
      TypeError: if `recipe` is not a Recipe, or if an option is unknown.
      ValueError: if the recipe needs keys.

    Example:
      .. code-block:: python

        from gemma import gm, peft
        from jaxfp8.plugs import gemma as fp8_gemma

        replace = fp8_gemma.replace_module_fn(fp8.recipes.blockwise(), paths="layer_.*")
        with peft.ModuleInterceptor(replace):
            variables = model.init(key, tokens)
        with peft.ModuleInterceptor(replace):  # in the loss, around each call
            logits = model.apply(variables, tokens).logits

      >>> import jaxfp8 as fp8
      >>> replace_module_fn(fp8.recipes.current())(nn.LayerNorm(name="norm"))
      LayerNorm(
      ...
    """
    policy = Policy.of("jaxfp8.plugs.gemma.replace_module_fn", recipe, options)

    def replace(module: nn.Module) -> nn.Module:
        if module.scope is None or not re.fullmatch(paths, "/".join(module.path)):
            return module
        if layer := LAYERS.get(type(module)):
            kept = {
                field.name: getattr(module, field.name)
                for field in dataclasses.fields(module)
                if field.init and field.name not in ("parent", "name")
            }
            made: nn.Module = layer(
                **kept, recipe=policy.recipe, **policy.options, parent=module.scope
            )
            return made
        if is_gemma_einsum(module):
            scope: Any = module.scope  # flax's annotation leaves scopes out
            return FP8GemmaEinsum(wrapped=module, policy=policy, parent=scope)
        return module

    return replace


def is_gemma_einsum(module: nn.Module) -> bool:
    """Whether a module is one of gemma's `_layers.Einsum`. There is one for each family of models.

    Example:
      >>> is_gemma_einsum(nn.Dense(4))
      False
    """
    kind = type(module)
    return (
        kind.__name__ == "Einsum" and re.match(r"gemma\b.*\b_layers$", kind.__module__) is not None
    )


class FP8GemmaEinsum(nn.Module):
    """gemma's `_layers.Einsum` with an FP8 matmul.

    Attributes:
      wrapped: the module of gemma, whose fields and scope this module has.
      policy: the recipe and the options.

    Example:
      .. code-block:: python

        replace = fp8_gemma.replace_module_fn(fp8.recipes.current())  # makes such modules
    """

    wrapped: Any
    policy: Policy

    @nn.compact
    def __call__(self, eqn: str, x: Array) -> Array:
        """Compute `einsum(eqn, x, w)` in FP8."""
        of: GemmaEinsum = self.wrapped
        w = self.param(of.weight_name, of.initializer, of.shape, of.dtype)
        if isinstance(w, dict):  # flax returns the dict of a shared scope
            w = w["w"]
        if scale := getattr(of, "w_scale", None):  # newer families have it
            w = w * scale
        # Several modules of gemma may share one scope, each with a weight of its own name.
        name = f"fp8_{of.weight_name}"
        multiply = FP8EinsumOp(recipe=self.policy.recipe, **self.policy.options, name=name)
        return multiply(eqn, x, w.astype(x.dtype))
