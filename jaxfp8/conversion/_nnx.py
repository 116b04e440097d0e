"""Converted nnx models: copies that share the Variables, with other matmuls in their layers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfp8._call import Example
from jaxfp8._geometry import Geometry, check_dimension_numbers
from jaxfp8._typing import Array
from jaxfp8.conversion._foreign import Compute, Foreign, OneCallEinsum, compute_of
from jaxfp8.conversion._nnx_read import InLayer, give_matmuls, parameter_path
from jaxfp8.conversion._plan import Plan
from jaxfp8.conversion._read import note_weights
from jaxfp8.conversion._rule import (
    FP8,
    LOOKUP,
    UNSEEN,
    Layer,
    Seen,
    Size,
    own_matmul,
    size_of_einsum,
)
from jaxfp8.jaxprs._flops import flops_of, layer_scope
from jaxfp8.jaxprs._weights import CONVOLUTION
from jaxfp8.matmul._options import KeepsFP8
from jaxfp8.nnx._dot_general import (
    AbstractFP8Matmul,
    FP8DotGeneral,
    FP8EinsumOp,
    is_watched_by_qwix,
)
from jaxfp8.nnx._layers import FP8Einsum, FP8Linear, FP8LinearGeneral
from jaxfp8.nnx._moe import ExpertKernels, FP8GroupedLinear, FP8MoE
from jaxfp8.nnx._state import FP8State
from jaxfp8.state._init import unset_state

# flax.nnx's layers with a kernel: the size of their matmul, and how they get another one.


class _Known(NamedTuple):
    """A type of layers that multiply by a kernel.

    Attributes:
      plug: the class of the matmul in FP8.
      attribute: the attribute in which the layer keeps its matmul.
      default: what flax computes it with.
      size: the size of a layer's matmul for one token, and the shape of its stack. None for a
        layer that is not flax's. Only a call shows its size.
      fp8: the class that replaces exactly this class of flax.
    """

    plug: type[AbstractFP8Matmul]
    attribute: str
    default: Callable[..., Array]
    size: Callable[[Any], tuple[Size, tuple[int, ...]]] | None
    fp8: type


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param.get_raw_value(), "shape", ()))


def _linear_size(layer: nnx.Linear) -> tuple[Size, tuple[int, ...]]:
    *stacked, k, n = _shape(layer.kernel)
    return Size((1, k, n)), tuple(stacked)


def _general_size(layer: nnx.LinearGeneral) -> tuple[Size, tuple[int, ...]]:
    sides = (tuple(layer.batch_axis.values()), layer.in_features, layer.out_features)
    batch, k, n = map(math.prod, sides)
    shape = _shape(layer.kernel)
    return Size((1, k, n), batch), shape[: len(shape) - sum(map(len, sides))]


def _einsum_size(layer: nnx.Einsum) -> tuple[Size, tuple[int, ...]]:
    shape, own = _shape(layer.kernel), tuple(layer.kernel_shape)
    inputs, kernel = layer.einsum_str.replace(" ", "").split("->")[0].split(",")
    before, _, after = kernel.partition("...")
    named = own[: len(before)] + own[len(own) - len(after) :]  # without the axes of "..."
    sizes = dict(zip(before + after, named, strict=True))
    lhs = tuple(sizes.get(name, 1) for name in inputs.replace("...", ""))
    one = size_of_einsum(layer.einsum_str.replace("...", ""), lhs, named)
    return one, shape[: len(shape) - len(own)]


class _Attending(nnx.Embed):
    """`nnx.Embed` whose `attend` calls the attribute `dot_general`."""

    dot_general: Any

    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        query, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        dimension_numbers = (((query.ndim - 1,), (1,)), ((), ()))
        y: Array = self.dot_general(query, table, dimension_numbers, out_sharding=out_sharding)
        return y


@functools.cache
def _attending(kind: type) -> type:
    """The class of an embedding of the user, with the `attend` of `_Attending` as its parent's."""
    if kind is nnx.Embed:
        return _Attending
    return type(kind.__name__, (kind, _Attending), {"__module__": kind.__module__})


def _embed_size(layer: nnx.Embed) -> tuple[Size, tuple[int, ...]]:
    *stacked, n, k = _shape(layer.embedding)
    return Size((1, k, n)), tuple(stacked)


_KNOWN: dict[type, _Known] = {
    nnx.Linear: _Known(FP8DotGeneral, "dot_general", jax.lax.dot_general, _linear_size, FP8Linear),
    nnx.LinearGeneral: _Known(
        FP8DotGeneral, "dot_general", jax.lax.dot_general, _general_size, FP8LinearGeneral
    ),
    nnx.Einsum: _Known(FP8EinsumOp, "einsum_op", jnp.einsum, _einsum_size, FP8Einsum),
    nnx.Embed: _Known(FP8DotGeneral, "dot_general", jax.lax.dot_general, _embed_size, _Attending),
}


def _known_of(module: nnx.Module, foreign: Foreign) -> _Known | None:
    """How to convert a module, if it is a layer of a known type.

    None for a layer of a model of qwix. It computes more than the layer: all of it is read.
    """
    compute = compute_of(foreign, type(module))
    if is_watched_by_qwix(module):
        if compute is not None:
            raise ValueError(
                f"layers= has {type(module).__name__}, but qwix computes more for such a layer "
                "than its own code. Leave layers= out: its matmuls are read."
            )
        return None
    if compute is not None:
        return _Known(FP8EinsumOp, _EINSUM, jnp.einsum, None, _computed(type(module), compute))
    known = next((known for kind, known in _KNOWN.items() if isinstance(module, kind)), None)
    if isinstance(module, nnx.Embed) and known is not None:
        return known._replace(fp8=_attending(type(module)))
    return known


_EINSUM = "fp8_einsum"


@functools.cache
def _computed(kind: type, compute: Compute) -> type:

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(layer, OneCallEinsum(getattr(layer, _EINSUM)), *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _give_matmul(layer: Any, known: _Known, matmul: Any) -> None:
    """Let a layer multiply with `matmul`. The layer is a copy that the caller made."""
    # A layer of exactly a class of flax becomes one of ours, which also sums the gradient of the
    # bias in the matmul. A class of the user stays, and gets the attribute alone.
    converts = isinstance(matmul, AbstractFP8Matmul) and type(layer) in _KNOWN
    if converts or known.size is None or isinstance(layer, nnx.Embed):
        # nnx would note an attribute "__class__" in the graph of the model.
        object.__setattr__(layer, "__class__", known.fp8)
    if isinstance(layer, FP8Linear | FP8Einsum):
        layer.prologue = None
    if isinstance(matmul, AbstractFP8Matmul) and hasattr(layer, "promote_dtype"):
        layer.promote_dtype = KeepsFP8.of(layer.promote_dtype)
    setattr(layer, known.attribute, nnx.data(matmul) if isinstance(matmul, nnx.Module) else matmul)


def _watched(function: Any, layer: Layer, seen: Seen) -> Callable[..., Array]:
    """A matmul that notes its size, for a model that is only looked at."""

    def multiply(*operands: Any, **options: Any) -> Array:
        if isinstance(operands[0], str):
            equation, x, w = operands[:3]
            size = size_of_einsum(equation, jnp.shape(x), jnp.shape(w))
        else:
            x, w, dimension_numbers = operands[:3]
            shapes = jnp.shape(x), jnp.shape(w)
            numbers = check_dimension_numbers(*shapes, dimension_numbers)
            lhs, rhs = Geometry.of(numbers, *map(len, shapes)).sides
            batch, m, k = lhs.matrix_shape(shapes[0])
            size = Size((m, k, rhs.matrix_shape(shapes[1])[1]), batch)
        seen.add(dataclasses.replace(layer, **size._asdict(), counted=True))
        with layer_scope(layer.path):
            y: Array = function(*operands, **options)
        return y

    return multiply


def _obstacle_of(layer: nnx.Module, known: _Known) -> str:
    attributes = (known.attribute, "dot_general_cls")
    if any(isinstance(getattr(layer, name, None), AbstractFP8Matmul) for name in attributes):
        return FP8
    return own_matmul(layer, attributes, known.default)


# A whole model: its copy, its layers, and what a call of it shows.

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
    return nnx.merge(*nnx.split(model))  # of all modules. It shares the Variables


def _function_of(model: Any) -> tuple[Callable[..., Any], nnx.State]:
    """A call of the model as a function of its state and of the arguments, and the state."""
    graphdef, state = nnx.split(model)
    return lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs), state


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
    known = _known_of(module, plan.foreign)
    if known is None:
        obstacle = _obstacle(module)
        return Layer(path=path, type=type(module), obstacle=obstacle) if obstacle else None
    if known.size is None:
        return Layer(path=path, type=type(module), obstacle=_NOT_CALLED)
    if isinstance(module, nnx.Embed):
        return Layer(path=path, type=type(module), obstacle=LOOKUP)
    size, stacked = known.size(module)
    return Layer(
        path=path, type=type(module), **size._asdict(), counted=False, repeated=bool(stacked),
        obstacle=_obstacle_of(module, known),
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
        known = _known_of(module, plan.foreign)
        if known is None or path not in seen.layers:
            continue
        layer, own = seen.layers[path], getattr(module, known.attribute, None)
        if isinstance(own, nnx.Module):
            continue  # an FP8 layer already, whose matmul holds state
        if isinstance(module, nnx.Embed) or known.size is None:
            layer = dataclasses.replace(layer, obstacle="")
        _give_matmul(module, known, _watched(own or known.default, layer, called))
    call, state = _function_of(copy)
    program = example.jaxpr(call, state)
    seen.flops, seen.in_loops = flops_of(program)
    for path, layer in seen.layers.items():
        uncalled = dataclasses.replace(layer, calls=0)
        seen.layers[path] = called.layers.get(path, layer if layer.obstacle else uncalled)
    _see_weights(seen, program, copy, state)


def _see_weights(seen: Seen, program: Any, model: nnx.Module, state: nnx.State) -> None:
    """Note what a program does with parameters. Its inputs begin with the state of the model."""
    numbers: list[int | None] = []
    paths: list[str] = []
    number: dict[Any, set[int]] = {}
    for path, variable in nnx.to_flat_state(state):
        is_parameter = isinstance(variable, nnx.Param)
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable
        for keys, _ in jax.tree_util.tree_leaves_with_path(value):
            numbers.append(len(paths) if is_parameter else None)
            if is_parameter:
                number.setdefault(path, set()).add(len(paths))
                paths.append(parameter_path(path, keys))
    numbers += [None] * (len(program.invars) - len(numbers))
    # A shared Variable has one path, and several modules.
    of = {id(x): number[path] for path, x in nnx.iter_graph(model) if path in number}
    own = {
        path: set().union(*(of.get(id(each), set()) for each in _params(vars(module))))
        for path, module in _modules(model)
        if path in seen.layers
    }
    note_weights(seen, program, numbers, paths, own)


def converted(model: M, plan: Plan, example: Example | None, rngs: Any) -> M:
    """A copy of the model with the matmuls in FP8 that were decided.

    It is traced, so that a layer that cannot take its recipe raises its error now.
    """
    copy: Any = _copy(model)
    recipes = {path: decision for path, decision in plan.decided if decision.recipe}
    for path, module in _modules(copy):
        known = _known_of(module, plan.foreign)
        if known is None:
            continue
        if path not in recipes:
            own = getattr(module, known.attribute, None)
            if plan.reads and known.size is not None and not isinstance(own, nnx.Module):
                _give_matmul(module, known, InLayer(own or known.default, path))
            continue
        decision = recipes[path]
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
        _give_matmul(module, known, matmul)
    if plan.reads:
        give_matmuls(copy, plan, rngs)
    if example is not None:
        example.shapes(*_function_of(copy))
    return copy
