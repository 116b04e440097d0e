"""Converted nnx models: copies that share the Variables, with other matmuls in their layers."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxfp8._call import Example
from jaxfp8.conversion._flops import flops_of, in_loops
from jaxfp8.conversion._layer import CONVOLUTION, FP8, LOOKUP, UNCALLED, UNKNOWN, UNSEEN, Layer
from jaxfp8.conversion._nnx_layers import Watch, give_matmul, known_of, obstacle_of
from jaxfp8.conversion._plan import Plan
from jaxfp8.conversion._seen import Seen
from jaxfp8.conversion._weights import known_by_use, uses_of
from jaxfp8.nnx._grouped import FP8GroupedLinear
from jaxfp8.nnx._moe import ExpertKernels, FP8MoE
from jaxfp8.nnx._state import FP8State
from jaxfp8.state._unset import unset_state

M = TypeVar("M")


def _modules(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Each module of a model with its path, a shared one once, in the order of attributes."""
    found = sorted(nnx.iter_modules(model), key=lambda each: _place(model, each[0]))
    return [("/".join(map(str, path)), module) for path, module in found]


def _place(model: nnx.Module, path: Iterable[Any]) -> list[int]:
    """Where a path is in its model. flax sorts attributes by name."""
    place: list[int] = []
    node: Any = model
    for part in path:
        inner = node if isinstance(node, dict) else getattr(node, "__dict__", None)
        inner = dict(enumerate(node)) if inner is None else inner
        names = list(map(str, inner))
        place.append(names.index(str(part)))
        node = list(inner.values())[place[-1]]
    return place


def _copy(model: Any) -> Any:
    """A copy of all modules. It shares the Variables."""
    return nnx.merge(*nnx.split(model))


def look(model: nnx.Module, plan: Plan, example: Example | None) -> Seen:
    """The modules and layers of a model, and those that an example call runs."""
    seen = Seen()
    for path, module in _modules(model):
        seen.modules[path] = type(module)
        if isinstance(module, nnx.Embed):
            seen.vocabularies.add(module.num_embeddings)
        if (layer := _layer(path, module, plan)) is not None:
            seen.add(layer)
    if example is None:
        seen.flops.update({path: layer.flops for path, layer in seen.layers.items()})
        return seen
    _see_call(model, plan, example, seen)
    return seen


def _layer(path: str, module: nnx.Module, plan: Plan) -> Layer | None:
    """A module as a layer, without an example call. None if it has no kernel."""
    known = known_of(module, plan.foreign)
    if known is None:
        obstacle = _obstacle(module)
        return Layer(path=path, type=type(module), obstacle=obstacle) if obstacle else None
    if known.size is None:
        return Layer(path=path, type=type(module), obstacle=_NOT_CALLED)
    if isinstance(module, nnx.Embed):
        return Layer(path=path, type=type(module), obstacle=LOOKUP)
    size, stacked = known.size(module)
    return Layer(
        path=path, type=type(module), shape=size.shape, batch=size.batch, counted=False,
        repeated=bool(stacked), obstacle=obstacle_of(module, known),
    )  # fmt: skip


_NOT_CALLED = "only a call shows its size, so inputs= must run it"


_NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm, nnx.GroupNorm)  # in a stack, of two axes


def _obstacle(module: nnx.Module) -> str:
    """Why a module with a kernel is no layer of a known type. "" if it has no kernel."""
    if isinstance(module, nnx.Conv | nnx.ConvTranspose):
        return CONVOLUTION
    if isinstance(module, (*_NORMS, nnx.List, nnx.Dict)):
        return ""
    if isinstance(module, FP8GroupedLinear | FP8MoE | ExpertKernels):
        return FP8
    if isinstance(module, nnx.bridge.ToNNX):
        return "a linen model: convert it before nnx.bridge.ToNNX"
    kernels = [each for each in _params(vars(module)) if len(_shape(each)) > 1]
    return UNSEEN if kernels else ""


def _shape(param: nnx.Variable[Any]) -> tuple[int, ...]:
    return tuple(getattr(param.get_raw_value(), "shape", ()))


def _params(node: Any) -> Iterator[nnx.Param[Any]]:
    """The parameters of a module, also those in lists and dicts, without those of its modules."""
    if isinstance(node, nnx.Param):
        yield node
    elif isinstance(node, nnx.List | nnx.Dict):
        yield from _params(vars(node))
    elif isinstance(node, list | tuple | dict):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _params(each)


def _see_call(model: nnx.Module, plan: Plan, example: Example, seen: Seen) -> None:
    """Note the layers that a call of the model runs, in its order, and its operations."""
    called, copy = Seen(), _copy(model)
    for path, module in _modules(copy):
        known = known_of(module, plan.foreign)
        if known is None or path not in seen.layers:
            continue
        layer, own = seen.layers[path], getattr(module, known.attribute, None)
        if isinstance(own, nnx.Module):
            continue  # an FP8 layer already, whose matmul holds state
        if isinstance(module, nnx.Embed) or known.size is None:
            layer = dataclasses.replace(layer, obstacle="")
        give_matmul(module, known, Watch(layer, called, own or known.default))
    graphdef, state = nnx.split(copy)
    program = example.jaxpr(
        lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs), state
    )
    seen.flops, seen.in_loops = flops_of(program), in_loops(program)
    for path, layer in seen.layers.items():
        uncalled = dataclasses.replace(layer, calls=0)
        seen.layers[path] = called.layers.get(path, layer if layer.obstacle else uncalled)
    _see_uses(seen, program, copy, state)


def _see_uses(seen: Seen, program: Any, model: nnx.Module, state: nnx.State) -> None:
    """Note what a program does with parameters. Its inputs begin with the state of the model."""
    variables = dict(nnx.to_flat_state(state))
    number = {path: i for i, path in enumerate(variables)}
    numbers = [number[path] for path, each in variables.items() for _ in jax.tree.leaves(each)]
    rest = [None] * (len(program.invars) - len(numbers))
    uses = uses_of(program, [*numbers, *rest])
    # A shared Variable has one path, and several modules.
    of = {id(x): number[path] for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)}
    own = {
        path: {of[id(each)] for each in _params(vars(module))}
        for path, module in _modules(model)
        if path in seen.layers
    }
    first = {number: place for place, number in enumerate(uses.order)}
    place = {
        path: min((first[i] for i in own[path] if i in first), default=len(first)) for path in own
    }
    for path, layer in seen.layers.items():
        if layer.obstacle == UNSEEN:
            obstacle = UNKNOWN if place[path] < len(first) else UNCALLED
            seen.layers[path] = dataclasses.replace(layer, obstacle=obstacle)
    in_order = sorted(seen.layers, key=place.__getitem__)
    seen.layers = known_by_use({path: seen.layers[path] for path in in_order}, own, uses)


def converted(model: M, plan: Plan, example: Example | None, rngs: Any) -> M:
    """A copy of the model with the matmuls in FP8 that were decided.

    It is traced, so that a layer that cannot take its recipe raises its error now.
    """
    copy: Any = _copy(model)
    recipes = {path: decision for path, decision in plan.decided if decision.recipe}
    for path, module in _modules(copy):
        if path not in recipes:
            continue
        known, decision = known_of(module, plan.foreign), recipes[path]
        assert known is not None
        assert decision.recipe is not None
        stacked = () if known.size is None else known.size(module)[1]
        if stacked and decision.recipe.needs_key:
            raise ValueError(
                f"layer {path!r} is a stack of {list(stacked)} layers, and recipe "
                f"{decision.recipe.name!r} rounds stochastically. fp8.convert cannot give each "
                "layer of a stack its keys. Write fp8.nnx layers in the stack instead."
            )
        matmul = known.plug(decision.recipe, rngs=rngs, **dict(decision.options))
        if stacked and matmul.state is not None:
            matmul.state = nnx.data(FP8State(unset_state(decision.recipe.rows, stacked)))
        give_matmul(module, known, matmul)
    if example is not None:
        graphdef, state = nnx.split(copy)
        example.shapes(
            lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs), state
        )
    return copy
