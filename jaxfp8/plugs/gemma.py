"""FP8 for gemma: a context in which models of google-deepmind/gemma compute in FP8.

The outermost call of a linen module is traced. The program runs with FP8 matmuls where it
multiplies by parameters, as `fp8.convert` does it. gemma's own `peft.ModuleInterceptor` exchanges
modules. But whole models wrap `__call__` in `nn.jit`, whose cache does not know that interceptor,
and would return programs without FP8, or in another recipe.
"""

import contextlib
import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, NoReturn, Unpack

import flax.linen as nn
import jax
from flax.core.scope import in_filter
from flax.linen import module as linen_module

from jaxfp8._check import check_type
from jaxfp8._typing import PyTree
from jaxfp8.conversion._linen_read import parameters_of, read_apply, run_in_scope
from jaxfp8.conversion._plan import KEPT, Decision, Plan, modules_of, stacks_of
from jaxfp8.conversion._read import Reading
from jaxfp8.conversion._rule import Layer
from jaxfp8.linen._state import COLLECTION
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.plugs._policy import Policy
from jaxfp8.recipes._recipe import Recipe

# What is entered: pairs of a policy and the paths of parameters, the outermost context first. It is
# a part of the keys of jax.jit's cache, so that a program is not used in another context.
_entered: Any = jax.make_user_context(())


@contextlib.contextmanager
def interceptor(
    recipe: Recipe, paths: str | None = None, **options: Unpack[LayerOptions]
) -> Iterator[None]:
    """A context in which models of gemma compute in FP8. It replaces `peft.ModuleInterceptor`.

    All matmuls of a parameter and of something that depends on inputs are computed in FP8, in
    models of any linen module. FP8 layers stay as they are. The state of a matmul has the path of
    its parameter. Enter the context around each `init` and each `apply`.

    Args:
      recipe: which quantizer for which operand.
      paths: which matmuls, as a regular expression for the whole path of their parameter, or of its
        module ("layer_0/mlp/linear"). None: all but heads, routers and lookups, as `fp8.convert`
        finds them.
      **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`, `state_channel`,
        `save_original`; see `fp8.dot_general`.

    Returns:
      A context manager. It needs no import of gemma.

    Raises:
      TypeError: if `recipe` is not a Recipe, if `paths` is no string, or if an option is unknown.
      ValueError: if the recipe needs keys, or inside of another interceptor of flax. When the
        context ends, if models ran in it, and `paths` matches none of their matmuls.

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
    if paths is not None:
        check_type("paths", paths, str, "a regular expression, for instance 'layer_.*'")
    others = [each for each in linen_module._global_interceptor_stack if each is not _intercept]
    if others:  # the outermost module is called inside of them, and once more by `_intercept`
        raise ValueError(
            f"jaxfp8.plugs.gemma.interceptor was entered inside of flax's interceptors {others}, "
            "which would run twice on the outermost module. Enter interceptor(recipe) first, and "
            "nn.intercept_methods inside of it."
        )
    plan = Plan(recipe=recipe, keep=KEPT if paths is None else (), options=policy.pairs)
    context = _Context(plan, re.compile(".*" if paths is None else paths), set(), set())
    token = _contexts.set((*_contexts.get(), context))
    try:
        with _entered((*_entered.value, (policy, paths))), nn.intercept_methods(_intercept):
            yield
    finally:
        _contexts.reset(token)
    if context.missed and not context.matched:
        raise ValueError(
            f"paths={paths!r} matches no parameter that a model multiplied by in this context. "
            f"These are {sorted(context.missed)}."
        )


class _Context(NamedTuple):
    """What a context was entered with, and the paths that its expression matched and did not."""

    plan: Plan
    paths: re.Pattern[str]
    matched: set[str]
    missed: set[str]

    def matches(self, layer: Layer) -> bool:
        """Whether the context decides a matmul."""
        modules = (path.rpartition("/")[0] for path in layer.parameters)
        found = any(map(self.paths.fullmatch, (*layer.paths, *modules)))
        (self.matched if found else self.missed).add(layer.path)
        return found


_contexts = contextvars.ContextVar[tuple[_Context, ...]]("_contexts", default=())
"""The outermost context comes first, and decides first. A model that runs has none inside."""


def _intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    contexts, module = _contexts.get(), context.module
    method = _method_of(module, context.orig_method.func) if contexts else None
    # `setup` must set its attributes on this module, and not on a copy.
    if method is None or module.scope is None or context.method_name == "setup":
        return next_fun(*args, **kwargs)

    def decide(blocks: frozenset[str], layer: Layer, tables: Collection[int]) -> Decision:
        # All contexts look, because each says if it matched nothing.
        matching = [each for each in contexts if each.matches(layer)]
        if not matching:
            return Decision(None, "")
        vocabulary = max(tables, default=None)
        plan = dataclasses.replace(matching[0].plan, blocks=blocks, vocabulary=vocabulary)
        return plan.decide(layer)

    def run(model: Any, variables: PyTree, rngs: Any, mutable: Any) -> tuple[Any, PyTree]:
        starts = module.is_initializing()
        made = given = variables
        if starts:
            _, made = model.init_with_output(rngs, *args, method=method, **kwargs)
            # Without what `init` added to other collections. A decoder that finds its cache there
            # would take its example for a next token.
            kept = ("params", COLLECTION, *variables)
            given = {name: made[name] for name in made if name in kept}
        apply = functools.partial(
            model.apply, method=method, mutable=True if starts else mutable or ()
        )
        reading = Reading(functools.partial(decide, _blocks_of(given)))
        y, changed = read_apply(
            reading, apply, given, rngs, args, kwargs, True, makes_states=starts
        )
        if not starts:
            return y, {name: changed[name] for name in changed if in_filter(mutable, name)}
        states = {COLLECTION: changed[COLLECTION]} if COLLECTION in changed else {}
        return y, {**made, **states}

    token = _contexts.set(())
    try:
        return run_in_scope(module, run)
    finally:
        _contexts.reset(token)


def _blocks_of(variables: PyTree) -> frozenset[str]:
    """The paths of the blocks of a model. What is in one is no head, as in `fp8.convert`."""
    paths = parameters_of(variables).values()
    stacks = stacks_of(modules_of(paths), {path.rpartition("/")[0] for path in paths})
    return frozenset(block for stack in stacks for block in stack)


def _method_of(module: nn.Module, function: Any) -> Callable[..., Any] | None:
    """The method of a function, inside of `nn.jit` if it has one. A jitted one cannot call itself.

    None for what flax calls to run `setup` alone.
    """
    for name in dir(type(module)):
        method = getattr(type(module), name, None)
        while (inner := getattr(method, "__wrapped__", None)) is not None:
            if inner is function:
                return method
            method = inner
    return None


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
        "fp8.convert(model, recipe, inputs=(tokens,))."
    )
