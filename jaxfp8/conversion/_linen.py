"""Converted linen models: interception of methods, and states that follow parameters.

A converted model is an instance of a subclass of the model's class, with equal fields, name and
methods. Its methods run under an interceptor (`flax.linen.intercept_methods`). The interceptor sees
each call of a layer, and computes those that the plan puts into FP8. Modules, parameters and their
paths are those of the model.

States are variables in their own collection. But many models contain `nn.scan` or `nn.vmap`, which
name the collections that they stack, and do not name this one. While `init` and `apply` of such a
model run, each state is a variable in "params", beside the parameters of its layer. A
transformation treats it as it treats them.

A module may run another one by its `apply` or `init`, with variables of its own. The paths in there
begin anew, so they would meet those of the model, and nobody keeps states for them. So scopes of
the model carry a flag, which flax hands on to all scopes inside, and those of other runs lack it.
What lacks it runs as before the conversion.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import freeze, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxfp8._call import Example
from jaxfp8._typing import FP8StateError, PyTree
from jaxfp8.conversion._foreign import OneCallEinsum, compute_of
from jaxfp8.conversion._linen_layers import KNOWN, Known, matmul_of, see_other_layer
from jaxfp8.conversion._linen_read import (
    init_read,
    parameters_of,
    read_apply,
    run_in_scope,
)
from jaxfp8.conversion._plan import Decision, Plan
from jaxfp8.conversion._read import Reading, note_weights
from jaxfp8.conversion._rule import FP8, Layer, Seen, own_matmul, size_of_einsum
from jaxfp8.jaxprs._flops import flops_of, layer_scope
from jaxfp8.linen._matmul_module import MatmulModule
from jaxfp8.linen._state import COLLECTION, NAME, home
from jaxfp8.ops._einsum import einsum
from jaxfp8.state._identity import check_layout
from jaxfp8.state._state import is_state

# Variables: states are beside parameters while a model runs, and apart from them before and after.
#
# Then "params" is the tree of the unconverted model.


def _together(variables: PyTree) -> dict[str, Any]:
    """The variables while a converted model runs: states are in "params"."""
    plain: dict[str, Any] = dict(unfreeze(variables))
    states, others = _split(plain.pop(COLLECTION, {}))
    params = _flat(plain.get("params", {}))
    if both := sorted(params.keys() & states.keys()):
        raise FP8StateError(
            f"{'/'.join(both[0])} is both in 'params' and in {COLLECTION!r}. Pass the parameters "
            "of the model and the quantizer states apart, as model.init returns them."
        )
    plain["params"] = unflatten_dict(params | states)
    return plain | ({COLLECTION: unflatten_dict(others)} if others else {})


def _apart(variables: PyTree) -> dict[str, Any]:
    """The variables after a converted model ran: states are in their own collection."""
    plain: dict[str, Any] = dict(unfreeze(variables))
    states, params = _split(plain.get("params", {}))
    if not states:
        return plain
    plain[COLLECTION] = unflatten_dict(_flat(plain.get(COLLECTION, {})) | states)
    plain["params"] = unflatten_dict(params)
    if not params:
        del plain["params"]
    return plain


_flat = functools.partial(flatten_dict, keep_empty_nodes=True)


def _split(tree: PyTree) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The states of a tree of dicts by their paths, and the rest."""
    flat = _flat(tree)
    states = {path: node for path, node in flat.items() if is_state(node)}
    return states, {path: node for path, node in flat.items() if path not in states}


# Interception: what runs in place of the methods of a model.


class _Running(NamedTuple):
    """A model that runs under an interceptor now.

    Attributes:
      plan: the plan of the model.
      depth: the length of the model's path, if it is a part of another model.
      seen: takes notes of modules and layers. Nothing is converted then. None: the plan is carried
        out.
    """

    plan: Plan
    depth: int
    seen: Seen | None


_OURS = "jaxfp8"
"""The flag of the scopes of a model, and of no other run inside of it."""


# The `_Running` of the innermost model. It is a context that JAX knows: every cache of JAX has it
# in its key. `nn.jit` keeps compiled functions by the fields of a module, which conversion does not
# change. So without it, a model would run functions that were compiled for another one. Equal plans
# use the functions of each other. A look finds none, because each `Seen` is another one.
_running: Any = jax.make_user_context(None)
_part_of_another: Any = jax.make_user_context(None)
"""Another value for each call of a model in a module that is not converted."""


@contextlib.contextmanager
def _run(plan: Plan, depth: int, seen: Seen | None = None) -> Iterator[None]:
    """Intercept all calls of layers, and compute them as the plan says."""
    running = _Running(plan, depth, seen)
    with _running(running), nn.intercept_methods(functools.partial(_intercept, running)):
        yield


def _intercept(
    running: _Running, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
    if _running.value is not running:
        return next_fun(*args, **kwargs)  # a converted model inside this one decides
    module, method = context.module, getattr(context.orig_method, "func", None)
    if module.scope is None or not module.scope.has_flag(_OURS):
        with _running(None):  # an `apply` inside of the model, with paths of its own
            return next_fun(*args, **kwargs)
    path = "/".join(module.path[running.depth :])
    if running.seen is not None:
        running.seen.modules.setdefault(path, type(module))
        if isinstance(module, nn.Embed):
            running.seen.vocabularies.add(module.num_embeddings)
    compute = compute_of(running.plan.foreign, type(module))
    try:
        if compute is not None and context.method_name == "__call__":
            multiply = functools.partial(_einsum_of, running, path, module)
            return compute(module, OneCallEinsum(multiply), *args, **kwargs)
        if method in KNOWN:
            return _call(running, path, module, KNOWN[method], next_fun, args, kwargs)
    except Exception as error:
        # The message of a matmul names operands, but a model has many layers.
        if not any("fp8.convert" in note for note in getattr(error, "__notes__", ())):
            error.add_note(f"fp8.convert: in layer {path!r}, a {type(module).__name__}.")
        raise
    if running.seen is None:
        return next_fun(*args, **kwargs)
    y = next_fun(*args, **kwargs)
    see_other_layer(running.seen, path, module)
    return y


def _mark(module: nn.Module) -> None:
    """Mark the scopes of a module, and of modules in its fields."""
    scope: Any = module.scope  # flax's annotation leaves scopes out
    if scope is None:
        return
    scope.flags = freeze({**scope.flags, _OURS: True})
    values = [vars(module).get(field.name) for field in dataclasses.fields(module)]
    for child in jax.tree.leaves(values, is_leaf=lambda value: isinstance(value, nn.Module)):
        if isinstance(child, nn.Module) and child is not module.parent:
            _mark(child)


def _call(
    running: _Running, path: str, module: nn.Module, known: Known, next_fun: Any, args: Any,
    kwargs: Any,
) -> Any:  # fmt: skip
    own = own_matmul(module, ("dot_general", "dot_general_cls"), jax.lax.dot_general)
    layer = Layer(
        path=path, type=type(module), **known.size(module, *args, **kwargs)._asdict(),
        obstacle=FP8 if isinstance(module, MatmulModule) else own,
    )  # fmt: skip
    return _multiply(
        running, layer,
        lambda: next_fun(*args, **kwargs),
        lambda decision: known.run(module, decision, next_fun, *args, **kwargs),
    )  # fmt: skip


def _einsum_of(
    running: _Running, path: str, module: nn.Module, equation: str, x: Any, w: Any, **options: Any
) -> Any:
    name = NAME
    if _shares_scope(module):
        path, name = f"{path}/{module.name}".removeprefix("/"), f"{NAME}_{module.name}"
    size = size_of_einsum(equation, jnp.shape(x), jnp.shape(w))
    return _multiply(
        running, Layer(path=path, type=type(module), **size._asdict()),
        lambda: jnp.einsum(equation, x, w, **options),
        lambda decision: matmul_of(einsum, module, decision, name)(equation, x, w, **options),
    )  # fmt: skip


def _multiply(
    running: _Running,
    layer: Layer,
    plain: Callable[[], Any],
    in_fp8: Callable[[Decision], Any],
) -> Any:
    """The result of a layer, as the plan says. A look notes the layer and leaves it as it is."""
    if running.seen is not None:
        running.seen.add(layer)
        with layer_scope(layer.path):
            return plain()
    decision = running.plan.decide(layer)
    if decision.recipe is None:
        if not running.plan.reads:
            return plain()
        with layer_scope(layer.path):  # what reads the program knows that it is decided
            return plain()
    with _running(None):  # matmuls share their traces with those of the backward pass
        return in_fp8(decision)


def _shares_scope(module: nn.Module) -> bool:
    """Whether `nn.share_scope` gave a layer the path of its parent, and of other layers there."""
    return isinstance(module.parent, nn.Module) and module.parent.scope is module.scope


# A look at a model before it is converted.


def _variables(model: nn.Module, keys: dict[str, Any], example: Example) -> PyTree:
    """The types of a model's variables. Its class may have an `init` with other arguments."""
    return example.shapes(lambda *args, **kwargs: nn.Module.init(model, keys, *args, **kwargs))


def look(model: nn.Module, plan: Plan, example: Example) -> Seen:
    """The modules and layers of a model, as a call shows them. Nothing is computed."""
    seen = Seen()
    keys = {"params": jax.random.key(0)}  # flax draws from it for every stream that is missing
    variables = _variables(model, keys, example)

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        _mark(module)
        return module(*args, **kwargs)

    with _run(plan, 0, seen):
        program = example.jaxpr(
            lambda variables, keys, *args, **kwargs: nn.Module.apply(
                model, variables, *args, rngs=keys, mutable=True, method=call, **kwargs
            ),
            variables,
            keys,
        )
    seen.flops, seen.in_loops = flops_of(program)
    _see_weights(seen, program, variables)
    return seen


def _see_weights(seen: Seen, program: Any, variables: PyTree) -> None:
    """Note what a program does with parameters. Its inputs begin with the variables."""
    numbers: list[int | None] = [None] * len(program.invars)
    paths: list[str] = []
    own: defaultdict[str, set[int]] = defaultdict(set)
    for place, path in parameters_of(variables).items():
        numbers[place] = len(paths)
        for layer in seen.layers:
            if path.startswith(f"{layer}/" if layer else ""):
                own[layer].add(len(paths))
        paths.append(path)
    note_weights(seen, program, numbers, paths, own)


# The converted model: an instance of a subclass.


def converted(model: nn.Module, plan: Plan, example: Example, rngs: Any) -> Any:
    """The model with the matmuls in FP8 that the plan says.

    `init` and `apply` are traced, so a layer that cannot take its recipe raises its error now.
    """
    del rngs  # linen passes keys at each call
    new = _made(model, plan)
    try:
        _check(new, example)
    except FP8StateError:
        # A transformation of the model does not hand on the collection of states.
        new = _made(model, dataclasses.replace(plan, states_in_params=True))
        _check(new, example)
    return new


def _check(model: nn.Module, example: Example) -> None:
    keys = {"params": jax.random.key(0)}
    variables = _variables(model, keys, example)
    example.shapes(
        lambda variables, *args, **kwargs: Converted.apply(
            model, variables, *args, rngs=keys, mutable=True, **kwargs
        ),
        variables,
    )
    for state in jax.tree.leaves(variables.get(COLLECTION, {}), is_leaf=is_state):
        if is_state(state):
            # Stacks of parameters along another axis than the first stack states there, too.
            check_layout(
                jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), state)
            )


def _made(model: nn.Module, plan: Plan) -> Any:
    return _made_again(type(model), _fields_of(model), plan)


def _made_again(kind: type, fields: dict[str, Any], plan: Plan) -> Any:
    return _subclass(kind, plan)(**fields)


def _fields_of(model: Any) -> dict[str, Any]:
    return {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}


@functools.cache  # one subclass for equal plans, so that equal models are equal
def _subclass(kind: type, plan: Plan) -> type:
    names = [
        name
        for name in dir(kind)
        if getattr(inspect.getattr_static(kind, name, None), "method_handler_wrapped", False)
    ]
    members: dict[str, Any] = {name: _entry(getattr(kind, name), plan) for name in names}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members |= {"fp8_plan": plan, "fp8_model": kind}  # no annotations, so they are no fields
    return type(kind.__name__, (Converted, kind), members)


def _entry(method: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    # `apply` sets the interceptor, too. This one serves models that are bound, or a part of
    # another. There, states stay in their own collection.
    @functools.wraps(method)  # also copies the marks by which flax knows its own methods
    def entered(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = _running.value
        inside = running is not None and running.plan is plan
        if inside or module.scope is None:
            return method(module, *args, **kwargs)
        if plan.reads:
            return _run_in_scope(module, method.__name__, args, kwargs)
        with _run(plan, len(module.path)):
            return method(module, *args, **kwargs)

    return entered


def _run_in_scope(module: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A method of a converted model that is bound, or a part of another model."""

    def run(model: Any, variables: PyTree, rngs: Any, mutable: Any) -> tuple[Any, PyTree]:
        if module.is_initializing():
            found: tuple[Any, PyTree] = model.init_with_output(rngs, *args, method=name, **kwargs)
        else:
            found = model.apply(
                variables, *args, rngs=rngs, method=name, mutable=mutable or (), **kwargs
            )
        return found

    # An outer module may have changed the layers inside, as LoRA of gemma does by an interceptor.
    # The caches of `nn.jit` do not know that, and would return programs without the change.
    with _part_of_another(object()):
        return run_in_scope(module, run)


class Converted:
    """The methods by which `flax.linen.Module` starts a model, for a converted model."""

    fp8_plan: Plan
    fp8_model: type

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]
        _mark(self)

    def init_with_output(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        with self._started():
            y, variables = super().init_with_output(rngs, *args, **kwargs)  # type: ignore[misc]
        variables = _apart(variables) if self.fp8_plan.states_in_params else variables
        return y, init_read(self.fp8_plan, variables)

    def apply(
        self: Any,
        variables: PyTree,
        *args: Any,
        mutable: Any = False,
        capture_intermediates: Any = False,
        rngs: Any = None,
        **kwargs: Any,
    ) -> Any:
        run = functools.partial(
            self._apply, mutable=mutable, capture_intermediates=capture_intermediates
        )
        if not self.fp8_plan.reads:
            return run(variables, *args, rngs=rngs, **kwargs)
        changes = mutable if mutable is not False or not capture_intermediates else ()
        return read_apply(Reading.of(self.fp8_plan), run, variables, rngs, args, kwargs, changes)

    def _apply(
        self: Any,
        variables: PyTree,
        *args: Any,
        mutable: Any,
        capture_intermediates: Any,
        **kwargs: Any,
    ) -> Any:
        moves = self.fp8_plan.states_in_params
        with self._started():
            out = super().apply(  # type: ignore[misc]
                _together(variables) if moves else variables,
                *args,
                mutable=mutable,
                capture_intermediates=capture_intermediates,
                **kwargs,
            )
        if not moves or (mutable is False and not capture_intermediates):
            return out
        y, changed = out
        return y, _apart(changed)

    @contextlib.contextmanager
    def _started(self: Any) -> Iterator[None]:
        token = home.set("params" if self.fp8_plan.states_in_params else COLLECTION)
        try:
            with _run(self.fp8_plan, 0):
                yield
        finally:
            home.reset(token)

    def __reduce__(self: Any) -> Any:
        return _made_again, (self.fp8_model, _fields_of(self), self.fp8_plan)
