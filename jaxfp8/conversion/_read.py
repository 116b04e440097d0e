"""Matmuls that code of a model computes with parameters of its own: their rows, and their run.

`jaxprs/_weights.py` finds them in the traced program of a call. Each has the path of its
parameters, by which rules and `keep` know it. A converted model is traced at each call, and the
program runs with FP8 matmuls in their places. So no code of the model is changed or copied.
"""

import dataclasses
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array, FP8StateError
from jaxfp8.conversion._plan import ANY_USE, Decision, Plan
from jaxfp8.conversion._rule import UNCALLED, UNSEEN, Layer, Seen
from jaxfp8.jaxprs._flops import OTHER
from jaxfp8.jaxprs._rewrite import Traced, is_array, run
from jaxfp8.jaxprs._weights import WeightMatmul, Weights, weights_of
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._ragged_dot import ragged_dot
from jaxfp8.state._state import MatmulState
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight

# The rows of such matmuls.


def row_path(parameters: Sequence[str], use: int | None = 1) -> str:
    """The path of a row: that of its parameter, or of several, and which use of them it is.

    None is a use that is not known.

    Example:
      >>> row_path(["mlp/w", "mlp/lora/a"], use=2)
      'mlp/w+lora/a#2'
    """
    first, *others = parameters
    module = first.rpartition("/")[0]
    start = f"{module}/" if module else ""
    short = [each.removeprefix(start) for each in others]
    number = "" if use == 1 else f"#{use or ANY_USE}"
    return "+".join([first, *short]) + number


def note_weights(
    seen: Seen,
    program: Any,
    numbers: Sequence[int | None],
    paths: Sequence[str],
    own: Mapping[str, AbstractSet[int]],
) -> None:
    """Note the matmuls of a model's own code, with the operations of each.

    `numbers` has the number of the parameter for each input of the program, None for another one.
    `paths` are those of the parameters. `own` has the numbers of the parameters of known layers.
    """
    weights = weights_of(program, numbers)
    seen.vocabularies |= weights.tables
    multiplied = {number for matmul in weights.matmuls for number in matmul.parameters}
    rows: list[tuple[float, Layer]] = []
    last = 0.0
    for path, layer in seen.layers.items():
        times = [weights.times[number] for number in own.get(path, ()) if number in weights.times]
        if layer.obstacle == UNSEEN:
            if times:
                continue  # what multiplies there has rows of its own
            layer = dataclasses.replace(layer, obstacle=UNCALLED)
        if not layer.calls and multiplied & set(own[path]):
            continue  # other code of the model multiplies by its parameters
        last = min(times, default=last)
        rows.append((last, layer))
    twice = [path for path, n in Counter(paths[i] for i in multiplied).items() if n > 1]
    if twice:
        raise ValueError(
            f"two parameters have the path {twice[0]!r}, so rules and states cannot tell them "
            "apart. Rename one."
        )
    for matmul in weights.matmuls:
        base = row_path([paths[number] for number in matmul.parameters])
        seen.uses[base] = (*seen.uses.get(base, ()), matmul.source)
    for matmul, layer in rows_of(weights, paths, seen.modules, {}):
        rows.append((matmul.time, layer))
        seen.flops[layer.path] += matmul.flops
        seen.flops[OTHER] -= matmul.flops
        if not layer.obstacle:
            seen.reads[layer.path] = matmul.loops
    of_layers = {number for numbers in own.values() for number in numbers}
    for number, reason in weights.hidden:
        if number not in of_layers:
            path = paths[number]
            rows.append((weights.times[number], Layer(
                path=path, parameters=(path,), type=owner_of(path, seen.modules), obstacle=reason
            )))  # fmt: skip
    # Of branches, `flops_of` counts the largest one.
    seen.flops[OTHER] = max(seen.flops[OTHER], 0)
    seen.layers = {}
    for _, layer in sorted(rows, key=lambda row: row[0]):
        seen.layers.setdefault(layer.path, layer)


Source = tuple[str, ...]


def rows_of(
    weights: Weights,
    paths: Sequence[str],
    types: Mapping[str, type],
    uses: Mapping[str, Sequence[Source]],
) -> Iterator[tuple[WeightMatmul, Layer]]:
    """Each matmul with its row. `paths` are those of the parameters, `types` those of modules.

    `uses` has, by path, where the call with `inputs=` used each weight.
    """
    sources: dict[tuple[int, ...], list[Source]] = {}
    for matmul in weights.matmuls:
        sources.setdefault(matmul.parameters, []).append(matmul.source)
    numbers = {}
    for parameters, found in sources.items():
        base = row_path([paths[number] for number in parameters])
        numbers[parameters] = iter(_which_uses(found, uses.get(base, found)))
    for matmul in weights.matmuls:
        names = tuple(paths[number] for number in matmul.parameters)
        shape, batch = matmul.size
        yield matmul, Layer(
            path=row_path(names, next(numbers[matmul.parameters])), parameters=names,
            type=owner_of(names[0], types), shape=shape, batch=batch,
            equation=matmul.equation, repeated=bool(matmul.loops), lookup=matmul.lookup,
            obstacle=matmul.obstacle,
        )  # fmt: skip


def _which_uses(found: Sequence[Source], known: Sequence[Source]) -> list[int | None]:
    """Which of the known uses of a weight the found ones are, from 1. None if nothing can tell."""
    if len(found) == len(known):
        return list(range(1, len(found) + 1))
    numbers: list[int | None] = [None] * len(found)
    for source in set(found):
        mine, theirs = ([i for i, x in enumerate(xs) if x == source] for xs in (found, known))
        if len(mine) == len(theirs):
            for i, number in zip(mine, theirs, strict=True):
                numbers[i] = number + 1
    return numbers


def owner_of(path: str, types: Mapping[str, type]) -> type:
    """The class of the module that holds a parameter, or of the one around it that is known."""
    while path:
        path = path.rpartition("/")[0]
        if path in types:
            return types[path]
    return types.get("", object)


# The run of a converted model.


@register_node
@dataclasses.dataclass(frozen=True)
class Extra:
    """What a matmul has besides its operands, stacked for the scans around it.

    Attributes:
      state: its quantizer state, () without one.
      key: the key of stochastic rounding, None without one.
    """

    state: MatmulState | tuple[()] = ()
    key: Array | None = None


ExtraOf = Callable[[Layer, Decision, tuple[int, ...]], Extra]
"""`extra_of(layer, decision, loops)`: what a matmul has, given the lengths of scans around it."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the code of a model multiplies.

    Attributes:
      decide: `decide(layer, tables)`, what becomes of a matmul, given the sizes of tables.
      types: the classes of modules, by path.
      uses: where the call with `inputs=` used each weight, by path; see `rows_of`.
    """

    decide: Callable[[Layer, AbstractSet[int]], Decision]
    types: Mapping[str, type] = dataclasses.field(default_factory=dict)
    uses: Mapping[str, Sequence[Source]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> "Reading":
        """That of a plan that was made from a call with `inputs=`."""
        return cls(plan.decide_read, dict(plan.types), dict(plan.uses))


def read_and_run(
    function: Callable[..., Any],
    args: Sequence[Any],
    parameters: Mapping[int, str],
    reading: Reading,
    extra_of: ExtraOf,
    held: Mapping[int, QuantizedWeight] = types.MappingProxyType({}),
) -> Any:
    """`function(*args)` with the matmuls of its own code as `reading` says.

    `parameters` has the paths of leaves of `args` that are parameters, by the number of the leaf.
    `held` has those that are in FP8. Leaves of `args` stand for them; see `stands_for`.
    """
    traced = Traced(function, *args)
    traced.arrays = [held.get(i, leaf) for i, leaf in enumerate(traced.leaves) if is_array(leaf)]
    numbers, paths = number_parameters(traced.leaves, parameters)
    weights = weights_of(traced.program, numbers)
    extras: dict[Any, Extra] = {}
    found: dict[Any, tuple[WeightMatmul, Layer, Decision]] = {}
    for matmul, layer in rows_of(weights, paths, reading.types, reading.uses):
        decision = reading.decide(layer, weights.tables)
        if decision.recipe is not None:
            found[matmul.place] = matmul, layer, decision
            extra = extra_of(layer, decision, matmul.loops)
            extras[matmul.place] = _check_extra(extra, matmul, layer)

    def replace(place: Any, eqn: Any, operands: list[Any], extra: Extra) -> Array:
        matmul, layer, decision = found[place]
        usual = matmul.side == 1 and len(operands) == 2
        if decision.recipe is not None and decision.recipe.is_identity and not usual:
            # Sums in another order would have other bits.
            y: Array = eqn.primitive.bind(*operands, **eqn.params)
            return y
        try:
            return _multiply(matmul, layer, decision, operands, extra)
        except Exception as error:
            error.add_note(f"fp8.convert: in the matmul of {layer.path!r}.")
            raise

    return run(traced, extras, replace, _check_held)


def stands_for(weight: QuantizedWeight) -> Any:
    """The type of array that a model is traced with in the place of a weight in FP8."""
    values: Any = jax.typeof(weight.values[0])
    return values.update(dtype=jnp.dtype(weight.dtype))


def _check_held(eqn: Any, operands: list[Any]) -> None:
    """Raise TypeError if code of the model uses a weight in FP8 for anything but its matmul."""
    weight = next(filter(is_weight, operands), None)
    if weight is None:
        return
    use, cure = "its result", "Leave it out of fp8.quantize_params by a rule: (path, None)."
    if eqn is not None:
        use = f"{eqn.primitive.name!r} at {source_info_util.summarize(eqn.source_info)}"
        if eqn.primitive.name == "convert_element_type":
            to = eqn.params["new_dtype"]
            cure = f"Quantize it for that dtype: fp8.quantize_params(..., dtype=jnp.{to})."
    raise TypeError(
        f"code of the model takes {weight} into {use}. Its FP8 values can only be multiplied, by "
        f"the matmul of their row, with the axes that the parameter has. {cure}"
    )


def number_parameters(
    leaves: Iterable[Any], parameters: Mapping[int, str]
) -> tuple[list[int | None], list[str]]:
    """For each array among leaves the number of its parameter, and the path of each parameter."""
    numbers: list[int | None] = []
    paths: list[str] = []
    for place, leaf in enumerate(leaves):
        if not is_array(leaf):
            continue
        path = parameters.get(place)
        numbers.append(None if path is None else len(paths))
        paths += [] if path is None else [path]
    return numbers, paths


def key_of(key: Array | None, layer: Layer, loops: tuple[int, ...]) -> Array | None:
    """The key of one matmul, or a stack of keys for its loops."""
    if key is None:
        return None
    own = jax.random.fold_in(key, zlib.crc32(layer.path.encode()))
    return jax.random.split(own, loops) if loops else own


def _check_extra(extra: Extra, matmul: WeightMatmul, layer: Layer) -> Extra:
    key = key_of(extra.key, layer, matmul.loops)
    if isinstance(extra.state, MatmulState):
        have = extra.state.scale.shape[:-1]
        if have != matmul.loops:
            raise FP8StateError(
                f"{layer.path}: this call multiplies in loops of {list(matmul.loops)}, but the "
                f"state has {list(have)} before its rows. fp8.convert made it for the loops of "
                "inputs=. Convert the model with inputs= of this kind, or run loops of one length."
            )
    return Extra(extra.state, key)


def _multiply(
    matmul: WeightMatmul, layer: Layer, decision: Decision, operands: list[Any], extra: Extra
) -> Array:
    """The result of one matmul in FP8, with the axes and the dtype that it had."""
    params, out = matmul.eqn.params, matmul.eqn.outvars[0].aval
    x, w, *sizes = operands if matmul.side == 1 else (operands[1], operands[0], *operands[2:])
    options: Any = dict(decision.options)
    options |= {
        "recipe": decision.recipe, "state": extra.state, "name": layer.path,
        "precision": params["precision"],
        "preferred_element_type": params["preferred_element_type"],
    }  # fmt: skip
    if extra.key is not None:
        options["key"] = extra.key
    sharding = params["out_sharding"]
    if sizes:
        for name in ("x_shard", "w_shard", "y_shard"):
            options.pop(name, None)
        y = ragged_dot(x, w, sizes[0], out_sharding=sharding, **options)
        return y.astype(out.dtype)
    # A weight on the left moves its own axes behind those of x, and back.
    (_, _), (batch, _) = matmul.dimension_numbers
    ((k, _), _), (x_shape, w_shape) = matmul.dimension_numbers, matmul.shapes
    shared = len(batch)
    of_x = len(x_shape) - shared - len(k)
    of_w = len(w_shape) - shared - len(k)
    order = [*range(shared + of_x + of_w)]
    if matmul.side == 0:
        order = [*order[:shared], *order[shared + of_x :], *order[shared : shared + of_x]]
    if sharding is not None:
        spec = (*sharding.spec, *[None] * len(order))[: len(order)]
        transposed = [
            entry for _, entry in sorted(zip(order, spec, strict=True), key=lambda p: p[0])
        ]
        sharding = jax.NamedSharding(sharding.mesh, jax.P(*transposed))
    y = dot_general(x, w, matmul.dimension_numbers, out_sharding=sharding, **options)
    return jnp.transpose(y, order).astype(out.dtype)
