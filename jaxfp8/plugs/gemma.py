"""FP8 for gemma: a context in which the modules of google-deepmind/gemma compute in FP8.

Each linen module is exchanged before its first call. The replacement has the scope of the original,
so parameters keep their names and shapes. gemma's own `peft.ModuleInterceptor` does the same, but
whole models wrap `__call__` in `nn.jit`. Its cache does not know that interceptor, and would return
programs without FP8, or in another recipe.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Unpack

import flax.linen as nn
import jax

from jaxfp8._check import check_type
from jaxfp8._typing import Array
from jaxfp8.linen._dot_general import FP8EinsumOp
from jaxfp8.linen._layers import FP8Dense, FP8DenseGeneral, FP8Einsum
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.plugs._policy import Policy
from jaxfp8.recipes._recipe import Recipe

LAYERS = {nn.Dense: FP8Dense, nn.DenseGeneral: FP8DenseGeneral, nn.Einsum: FP8Einsum}
"""Layers of flax, and the layers of jaxfp8 with the same fields and parameters."""


# What is exchanged here: pairs of a policy and the paths of modules, the outermost context first.
# It is a part of the keys of jax.jit's cache, which nn.jit uses.
_entered: Any = jax.make_user_context(())
# What has exchanged a layer. Later a program from that cache may call the layer, unseen.
_matched: set[tuple[Policy, str]] = set()


@contextlib.contextmanager
def interceptor(
    recipe: Recipe, paths: str = ".*", **options: Unpack[LayerOptions]
) -> Iterator[None]:
    """A context in which layers of gemma compute in FP8. It replaces `peft.ModuleInterceptor`.

    It exchanges `nn.Dense`, `nn.DenseGeneral`, `nn.Einsum` and gemma's `_layers.Einsum`. Subclasses
    of them stay as they are. Enter it around each `init` and each `apply`.

    Args:
      recipe: which quantizer for which operand.
      paths: which modules, as a regular expression for the whole path ("layer_0/mlp/linear").
      **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`, `state_channel`,
        `save_original`; see `fp8.dot_general`.

    Returns:
      A context manager. It needs no import of gemma.

    Raises:
      TypeError: if `recipe` is not a Recipe, if `paths` is no string, or if an option is unknown.
      ValueError: if the recipe needs keys. When the context ends, also if layers ran in it and
        `paths` matches none of them.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> model, x = nn.Dense(8), jnp.ones((2, 4))
      >>> with interceptor(fp8.recipes.delayed()):
      ...     variables = model.init(jax.random.key(0), x)
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
    """
    policy = Policy.of("jaxfp8.plugs.gemma.interceptor", recipe, options)
    check_type("paths", paths, str, "a regular expression, for instance 'layer_.*'")
    known: dict[int, tuple[nn.Module, nn.Module]] = {}
    missed: list[str] = []

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if id(module) not in known:
            # The pair keeps the module alive. Otherwise another module could get its id.
            path = "/".join(module.path) if _is_layer(module) else None
            new = module
            if path is not None and re.fullmatch(paths, path):
                new = _replacement(module, policy)
                _matched.add((policy, paths))
            elif path is not None:
                missed.append(path)
            known[id(module)] = module, new
        new = known[id(module)][1]
        return next_fun(*args, **kwargs) if new is module else new(*args, **kwargs)

    with _entered((*_entered.value, (policy, paths))), nn.intercept_methods(intercept):
        yield
    if missed and (policy, paths) not in _matched:
        raise ValueError(
            f"paths={paths!r} matches no layer that ran in this context. Its layers are "
            f"{sorted(set(missed))}."
        )


def replace_module_fn(*_: Any, **__: Any) -> NoReturn:
    """The argument of gemma's `peft.ModuleInterceptor` in earlier versions. It is refused.

    Raises:
      NotImplementedError: always.

    Example:
      >>> replace_module_fn()
      Traceback (most recent call last):
      NotImplementedError: ...
    """
    raise NotImplementedError(
        "peft.ModuleInterceptor(replace_module_fn(...)): gemma's models wrap __call__ in nn.jit, "
        "whose cache does not know this interceptor. After a run in bfloat16 a run in FP8 would be "
        "in bfloat16. Write `with jaxfp8.plugs.gemma.interceptor(recipe, paths=...):` instead, or "
        "fp8.convert(model, recipe, inputs=(tokens,), layers={Einsum: ...})."
    )


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that has a replacement, and is being called."""
    return module.scope is not None and (type(module) in LAYERS or is_gemma_einsum(module))


def _replacement(module: nn.Module, policy: Policy) -> nn.Module:
    """The module to call in the place of this one."""
    if layer := LAYERS.get(type(module)):
        kept = {
            field.name: getattr(module, field.name)
            for field in dataclasses.fields(module)
            if field.init and field.name not in ("parent", "name")
        }
        made: nn.Module = layer(**kept, recipe=policy.recipe, **policy.options, parent=module.scope)
        return made
    scope: Any = module.scope  # flax's annotation leaves scopes out
    return FP8GemmaEinsum(wrapped=module, policy=policy, parent=scope)


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

        with fp8_gemma.interceptor(fp8.recipes.current()):  # makes such modules
            variables = model.init(key, tokens)
    """

    wrapped: Any
    policy: Policy

    @nn.compact
    def __call__(self, eqn: str, x: Array) -> Array:
        """Compute `einsum(eqn, x, w)` in FP8."""
        of = self.wrapped
        w = self.param(of.weight_name, of.initializer, of.shape, of.dtype)
        if isinstance(w, dict):  # flax returns the dict of a shared scope
            w = w["w"]
        if scale := getattr(of, "w_scale", None):  # newer families have it
            w = w * scale
        # Several modules of gemma may share one scope, each with a weight of its own name.
        name = f"fp8_{of.weight_name}"
        multiply = FP8EinsumOp(recipe=self.policy.recipe, **self.policy.options, name=name)
        return multiply(eqn, x, w.astype(x.dtype))
