"""Converted nnx models: copies that share the Variables, with other matmuls in their layers."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from flax import nnx

from jaxfp8._example import Example
from jaxfp8.conversion._flops import flops_of, in_loops
from jaxfp8.conversion._layer import CONVOLUTION, FP8, LOOKUP, UNKNOWN, Layer
from jaxfp8.conversion._nnx_layers import Watch, give_matmul, known_of, obstacle_of
from jaxfp8.conversion._plan import Plan
from jaxfp8.conversion._seen import Seen
from jaxfp8.nnx._grouped import FP8GroupedLinear
from jaxfp8.nnx._moe import ExpertKernels, FP8MoE
from jaxfp8.nnx._state import FP8State
from jaxfp8.state._unset import unset_state

M = TypeVar("M")


def _modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Each module of a model with its path, a shared one once."""
    for path, module in nnx.iter_modules(model):
        yield "/".join(map(str, path)), module


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
    called = _called(model, plan, example, seen)
    for path, layer in seen.layers.items():
        uncalled = dataclasses.replace(layer, calls=0)
        seen.layers[path] = called.layers.get(path, layer if layer.obstacle else uncalled)
    seen.flops = called.flops
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
    if isinstance(module, _NORMS):
        return ""
    if isinstance(module, FP8GroupedLinear | FP8MoE | ExpertKernels):
        return FP8
    if isinstance(module, nnx.bridge.ToNNX):
        return "a linen model: convert it before nnx.bridge.ToNNX"
    kernels = [
        value
        for value in vars(module).values()
        if isinstance(value, nnx.Param) and len(getattr(value.get_raw_value(), "shape", ())) > 1
    ]
    return UNKNOWN if kernels else ""


def _called(model: nnx.Module, plan: Plan, example: Example, seen: Seen) -> Seen:
    """The layers that a call of the model runs, and its operations."""
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
    called.flops, seen.in_loops = flops_of(program), in_loops(program)
    return called


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
