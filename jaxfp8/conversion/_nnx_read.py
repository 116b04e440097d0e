"""nnx models whose own code multiplies by parameters: their states, and the run of a call.

Such a model gets a subclass with another `__call__`, and a dict `fp8_matmuls` with the state and
the keys of each of these matmuls, by the path of its row. A call runs on a copy, so that all that
it changes is seen. What has changed is then written to the model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxfp8._typing import Array, FP8StateError
from jaxfp8.conversion._plan import Decision, Plan
from jaxfp8.conversion._read import Extra, Reading, read_and_run, stands_for
from jaxfp8.conversion._rule import Layer
from jaxfp8.jaxprs._flops import layer_scope
from jaxfp8.nnx._dot_general import AFTER_QWIX, FP8DotGeneral, is_watched_by_qwix
from jaxfp8.nnx._state import FP8State
from jaxfp8.state._init import unset_state
from jaxfp8.state._state import OF_READ_MATMULS
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight


@functools.cache  # one class for equal plans, so that functions compiled for a model are found
def read_class(kind: type, plan: Plan) -> type:
    """The class of a converted model of this class."""

    @functools.wraps(kind.__call__)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if type(model) is not converted and is_watched_by_qwix(model):
            raise TypeError(
                f"qwix was applied to a {kind.__name__} that fp8.convert made. It would see only "
                f"some matmuls, so layers would get no adapter. {AFTER_QWIX}"
            )
        return _call(kind.__call__, plan, model, args, kwargs)

    def reduce(model: Any, protocol: Any) -> Any:
        base: Any = kind
        _, _, *rest = base.__reduce_ex__(model, protocol)
        return (_empty, (kind, plan), *rest)

    members = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members |= {"fp8_plan": plan, "__reduce_ex__": reduce}
    is_pytree = getattr(kind, "_pytree__is_pytree", True)
    converted = type(kind.__name__, (kind,), members, pytree=is_pytree)
    return converted


def _empty(kind: type, plan: Plan) -> Any:
    return object.__new__(read_class(kind, plan))


def give_matmuls(model: Any, plan: Plan, rngs: Any) -> None:
    """Let the code of a model multiply as the plan says. The model is a copy of the caller's."""
    decided, matmuls = dict(plan.decided), {}
    for path, loops in plan.reads:
        decision = decided[path]
        assert decision.recipe is not None
        if not decision.recipe.rows and not decision.recipe.needs_key:
            continue
        matmul = FP8DotGeneral(decision.recipe, rngs=rngs, **dict(decision.options))
        if loops and matmul.state is not None:
            matmul.state = nnx.data(FP8State(unset_state(decision.recipe.rows, loops)))
        matmuls[path] = matmul
    kind: Any = type(model)
    # nnx would note an attribute "__class__" in the graph of the model.
    object.__setattr__(model, "__class__", read_class(kind, plan))
    if matmuls:
        setattr(model, OF_READ_MATMULS, nnx.Dict(matmuls))


@dataclasses.dataclass(frozen=True)
class InLayer:
    """The matmul of a layer that stays as it is, marked for what reads the program."""

    function: Callable[..., Array]
    path: str

    def __call__(self, *operands: Any, **options: Any) -> Array:
        with layer_scope(self.path):
            return self.function(*operands, **options)


# A call of a converted model.


def _call(
    method: Callable[..., Any], plan: Plan, model: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    places = [place for place, leaf in enumerate(leaves) if _is_node(leaf)]
    nodes = [model, *(leaves[place] for place in places)]
    graphdef, state = nnx.split(nodes)
    before = dict(nnx.to_flat_state(state))
    changed: dict[Any, Any] = {}
    attributes: list[tuple[Any, str, Any]] = []

    def run(values: list[Any], leaves: list[Any]) -> Any:
        given = zip(before.items(), values, strict=True)
        flat = [(path, _with_value(variable, value)) for (path, variable), value in given]
        copies = nnx.merge(graphdef, nnx.from_flat_state(flat))
        new = list(leaves)
        for place, node in zip(places, copies[1:], strict=True):
            new[place] = node
        args, kwargs = jax.tree.unflatten(structure, new)
        out = method(copies[0], *args, **kwargs)
        own = dict(zip(before, values, strict=True))
        for path, variable in nnx.to_flat_state(nnx.state(copies)):
            if path not in own or not _is_same(_value_of(variable), own[path]):
                changed[path] = variable
        attributes[:] = _changed_attributes(copies, nodes)
        return out, [_value_of(variable) for variable in changed.values()]

    parameters: dict[int, str] = {}
    held: dict[int, QuantizedWeight] = {}
    values, number = [], 0
    read = {path.partition("#")[0] for path, _ in plan.reads}
    for path, variable in before.items():
        value = _value_of(variable)
        if is_weight(value) and path[0] == 0 and parameter_path(path[1:], ()) in read:
            held[number] = value
            value = stands_for(value)
        values.append(value)
        for keys, _ in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(variable, nnx.Param) and path[0] == 0:
                parameters[number] = parameter_path(path[1:], keys)
            number += 1
    plain = [None if place in places else leaf for place, leaf in enumerate(leaves)]
    extra_of = functools.partial(_extra_of, getattr(model, OF_READ_MATMULS, {}))
    out, new = read_and_run(run, (values, plain), parameters, Reading.of(plan), extra_of, held)
    modules = dict(nnx.iter_graph(nodes))
    updates = {path: _with_value(changed[path], y) for path, y in zip(changed, new, strict=True)}
    for path, variable in updates.items():
        module = modules.get(path[:-1])
        if path not in before and isinstance(module, nnx.Module) and isinstance(path[-1], str):
            setattr(module, path[-1], variable)  # flax updates no attribute that was None
    nnx.update(nodes, nnx.from_flat_state(list(updates.items())))
    for module, name, value in attributes:
        setattr(module, name, value)
    return out


def parameter_path(path: tuple[Any, ...], keys: tuple[Any, ...]) -> str:
    """The path of a parameter: that of its Variable, and of the leaf in a Variable with several."""
    inner = (jax.tree_util.keystr(keys, simple=True, separator="/"),) if keys else ()
    return "/".join((*map(str, path), *inner))


def _extra_of(matmuls: Any, layer: Layer, decision: Decision, loops: tuple[int, ...]) -> Extra:
    del loops
    recipe = decision.recipe
    assert recipe is not None
    if not recipe.rows and not recipe.needs_key:
        return Extra()
    if layer.path not in matmuls:
        raise FP8StateError(
            f"{layer.path}: this call runs a matmul that inputs= of fp8.convert did not run, and "
            f"recipe {recipe.name!r} needs its state. Convert the model with inputs= that run it."
        )
    matmul = matmuls[layer.path]
    return Extra(matmul.matmul_state, matmul.matmul_options().get("key"))


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Module | nnx.Variable | nnx.Rngs | nnx.Object)


def _value_of(variable: Any) -> Any:
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _with_value(variable: Any, value: Any) -> Any:
    return variable.replace(value) if isinstance(variable, nnx.Variable) else value


def _is_same(one: Any, other: Any) -> bool:
    first, second = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(first) == len(second) and all(x is y for x, y in zip(first, second, strict=True))


def _changed_attributes(copies: Any, nodes: Any) -> list[tuple[Any, str, Any]]:
    """What a call has written to attributes of copies that are no arrays, for their originals."""
    old, found = dict(nnx.iter_graph(nodes)), []
    for path, copy in nnx.iter_graph(copies):
        module = old.get(path)
        if not isinstance(module, nnx.Module) or module is copy:
            continue
        for name, value in vars(copy).items():
            parts = jax.tree.leaves(value) if isinstance(value, tuple) else [value]
            plain = all(isinstance(part, bool | int | float | str | None) for part in parts)
            if plain and vars(module).get(name, copy) != value:
                found.append((module, name, value))
    return found
