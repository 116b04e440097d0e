"""The arguments of a train step: what each array is, and those of the high-precision twin."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.extract import NodeStates

from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import PyTree
from jaxfp8.ops._quantize_params import path_name
from jaxfp8.optim._master_weights import MasterWeightsState
from jaxfp8.optim._masters import BFloat16PlusState
from jaxfp8.optim._released import Released
from jaxfp8.state._state import is_node
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight

# The arrays of nnx modules. `nnx.jit` passes them as a list in the order of a graph.

ArgumentKind = Literal[
    "weights", "master weights", "moments", "gradients", "quantizer state", "other arguments"
]
Kinds = list[ArgumentKind | None]
"""The kind of each array of a tree; None if the tree does not say it."""


@register_node
@dataclasses.dataclass(frozen=True)
class _Packed:
    """The types of the arrays of a module, and their kinds (static)."""

    arrays: tuple[Any, ...]
    kinds: tuple[ArgumentKind | None, ...] = dataclasses.field(metadata=STATIC)


def _with_kinds_of_modules(
    given: Sequence[PyTree], types: Sequence[PyTree], kinds: Callable[[Any], Kinds]
) -> list[PyTree]:
    """The types of arguments, with a `_Packed` for each list of arrays that stands for a module.

    `kinds` gives the kind of each leaf of a module. ValueError if a list does not fit to its
    module.
    """
    found = jax.tree.leaves(given, is_leaf=_is_module)
    modules = iter([module for module in found if _is_module(module)])
    return [
        jax.tree.map(lambda node: _packed(node, modules, kinds), tree, is_leaf=_is_packed)
        for tree in types
    ]


def _is_module(node: object) -> bool:
    return isinstance(node, nnx.Pytree)


def _is_packed(node: object) -> bool:
    return isinstance(node, NodeStates)


def _packed(node: Any, modules: Iterator[Any], kinds: Callable[[Any], Kinds]) -> Any:
    if not _is_packed(node):
        return node
    module, arrays = next(modules, None), jax.tree.leaves(node)
    leaves, flat = jax.tree.flatten(module)
    structure: Any = flat  # jax gives it no type
    # A module of numbers tells the order in which a graph has the leaves of the tree.
    numbers = structure.unflatten([np.array(n) for n in range(len(leaves))])
    order = [int(n) for n in jax.tree.leaves(nnx.state(numbers))]
    if [leaves[n].shape for n in order] != [array.shape for array in arrays]:
        raise ValueError(
            f"the step gets {len(arrays)} arrays for a {type(module).__name__} with {len(leaves)}. "
            "Two arguments may share Variables. Pass the states of the modules, from nnx.split, to "
            "a jax.jit of the step."
        )
    known = kinds(module)
    return _Packed(tuple(arrays), tuple(known[n] for n in order))


# What each array that a train step takes is: a weight, a moment, quantizer state, or another.

_KINDS: tuple[ArgumentKind, ...] = get_args(ArgumentKind)

# Names that flax uses for variables, and for the fields of its TrainState.
_BY_NAME: dict[str, ArgumentKind] = {"params": "weights", "opt_state": "moments"}


def _is_quantized_weight(node: object) -> bool:
    """Whether a node outside of optimizer states is a weight that is stored in FP8."""
    return isinstance(node, QuantizedTensor | QuantizedWeight)


def _is_optimizer_state(node: object) -> bool:
    """Whether a node is an optimizer of nnx, or a state of a transformation of optax or jaxfp8."""
    if isinstance(node, nnx.Optimizer | nnx.optimizer.OptState):
        return True
    module = f"{type(node).__module__}."
    return _is_named_tuple(node) and module.startswith(("optax.", "jaxfp8.optim."))


def _is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and getattr(node, "_fields", None) is not None


def kinds_of(
    given: Sequence[PyTree],
    types: Sequence[PyTree],
    results: PyTree,
    named: Sequence[PyTree] | None,
) -> list[ArgumentKind]:
    """The kind of each array of the arguments of a step.

    ValueError if `named` does not fit, or if the weights cannot be found.

    Args:
      given: the arguments, with nnx modules as the user passed them.
      types: the arguments that the program takes, `lowered.args_info`, without static ones.
      results: the types of what the step returns.
      named: a kind, or a tree of kinds, for each of `types`; None where it has to be found.
    """
    trees = _with_kinds_of_modules(given, types, _kinds)
    found = [_kinds(tree) for tree in trees]
    if named is not None:
        found = _merged(found, trees, named)
    if not any(kind == "weights" for kinds in found for kind in kinds):
        in_fp8 = _mark_quantized(trees, found)
        _find_weights(trees, found, results, in_fp8)
    return [kind or "other arguments" for kinds in found for kind in kinds]


def _children(node: Any) -> list[tuple[str, Any]]:
    """The children of a node of a tree, with their names. A leaf has none."""
    if _is_named_tuple(node):  # jax 0.10.2 gives all fields the name of the first one
        return list(zip(node._fields, node, strict=True))
    flat = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
    if flat is None:
        return []
    return [(str(getattr(key, "key", getattr(key, "name", ""))), child) for key, child in flat[0]]


def _kinds(node: Any, kind: ArgumentKind | None = None) -> Kinds:
    """The kind of each array in a tree. `kind` is that of a tree around it."""
    if isinstance(node, _Packed):
        return list(node.kinds)
    if is_node(node):
        return ["quantizer state"] * len(jax.tree.leaves(node))
    if isinstance(node, Released):
        return _kinds_of_released(node)
    if isinstance(node, MasterWeightsState):
        return [*_kinds(node.masters, "master weights"), *_kinds(node.inner, "moments")]
    if kind is None:
        kind = _kind_of(node)
    if jax.tree_util.all_leaves([node]):
        return [kind]
    found: Kinds = []
    for name, child in _children(node):
        if kind == "moments" and name == "acc_grads":  # of optax.MultiSteps
            found += _kinds(child, "gradients")
        else:
            found += _kinds(child, kind or _BY_NAME.get(name))
    return found


def _kinds_of_released(layers: Released) -> Kinds:
    """Weights, what the optimizer state is, and the seal."""
    opt_state = jax.tree.unflatten(layers.treedef, range(len(layers.carriers)))
    found: Kinds = ["weights"] * len(jax.tree.leaves(layers._values))
    for kind, carriers in zip(_kinds(opt_state, "moments"), layers.carriers, strict=True):
        found += [kind] * len(carriers)
    return [*found, "other arguments"]


def _kind_of(node: Any) -> ArgumentKind | None:
    if _is_optimizer_state(node):
        return "moments"
    if isinstance(node, nnx.Param):
        return "weights"
    if isinstance(node, nnx.Variable) and not is_node(node.get_raw_value()):
        return "other arguments"
    return None


def _merged(found: list[Kinds], trees: list[PyTree], named: Sequence[PyTree]) -> list[Kinds]:
    """The kinds that the user named, and those that were found for the rest."""
    if len(named) != len(trees):
        raise ValueError(
            f"argument_kinds has {len(named)} entries, but the step takes {len(trees)} arguments "
            "that are not static. Give one kind for each; None where it is to be found."
        )
    merged = []
    for position, (kinds, tree, given) in enumerate(zip(found, trees, named, strict=True)):
        wanted = _spread(given, tree, f"argument_kinds[{position}]")
        for kind in wanted:
            if kind is not None and not (isinstance(kind, str) and kind in _KINDS):
                raise ValueError(
                    f"argument_kinds[{position}] holds {kind!r}; a kind is one of "
                    f"{', '.join(map(repr, _KINDS))}, or None."
                )
        pairs = zip(kinds, wanted, strict=True)
        merged.append([k if k == "quantizer state" else kind or k for k, kind in pairs])
    return merged


def _spread(given: PyTree, tree: PyTree, name: str) -> list[Any]:
    """The kind of each array of a tree, from kinds of subtrees. The error calls them `name`."""
    # An FP8 weight has one kind. The twin has one array in its place.
    given = jax.tree.map(
        lambda node: (*jax.tree.leaves(node), None)[0] if _is_quantized_weight(node) else node,
        given,
        is_leaf=lambda node: node is None or _is_quantized_weight(node),
    )
    kinds: list[Any]
    structure: Any  # jax gives it no type
    # Among kinds None stands for a subtree. In the tree it is no array, so it gets no kind.
    kinds, structure = jax.tree.flatten(given, is_leaf=lambda node: node is None)
    try:
        below = structure.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"{name} does not fit the argument: {str(error)[:300]} Give one kind for the whole "
            "argument, or a tree with its nodes and keys: jax.tree.map(lambda _: 'weights', "
            "argument). A kind stands for all arrays below it. An nnx module needs one kind."
        ) from None
    return [kind for kind, part in zip(kinds, below, strict=True) for _ in jax.tree.leaves(part)]


def _mark_quantized(trees: list[PyTree], found: list[Kinds]) -> bool:
    """Mark trees with FP8 weights in them as weights. Says whether there are any."""
    marked = False
    for tree, kinds in zip(trees, found, strict=True):
        for node, start, stop in list(_unknown(tree, kinds, 0)):
            if any(map(_is_quantized_weight, jax.tree.leaves(node, is_leaf=_is_quantized_weight))):
                kinds[start:stop] = ["weights"] * (stop - start)
                marked = True
    return marked


def _find_weights(trees: list[PyTree], found: list[Kinds], results: PyTree, in_fp8: bool) -> None:
    """Mark the only tree of arrays that the step takes and returns as weights.

    With weights in FP8 there may be no such tree, or one of parameters beside them (LoRA).
    """
    returned = set(_signatures(results))
    back = [
        (position, start, stop)
        for position, (tree, kinds) in enumerate(zip(trees, found, strict=True))
        for node, start, stop in _unknown(tree, kinds, 0)
        if _is_trainable(node) and _signature(node) in returned
    ]
    if in_fp8 and not back:
        return
    if len(back) != 1:
        what = (
            "returns no tree of arrays that has the structure and shapes of an argument"
            if not back
            else f"returns {len(back)} trees like arguments, at the positions "
            f"{', '.join(str(position) for position, *_ in back)}"
        )
        raise ValueError(
            f"cannot tell which argument of the step holds the weights: it {what}. Say it: "
            "argument_kinds=('weights', None, ...), with one entry for each argument."
        )
    ((position, start, stop),) = back
    found[position][start:stop] = ["weights"] * (stop - start)


def _unknown(node: Any, kinds: Kinds, start: int) -> Iterable[tuple[Any, int, int]]:
    """The largest trees in which no kind is known, with their range in the kinds."""
    stop = start + len(jax.tree.leaves(node))
    if start < stop and not any(kinds[start:stop]):
        yield node, start, stop
        return
    for _, child in _children(node):
        yield from _unknown(child, kinds, start)
        start += len(jax.tree.leaves(child))


def _is_trainable(tree: PyTree) -> bool:
    """Whether a tree has an array of floats in it, and more than scalars."""
    leaves = jax.tree.leaves(tree)
    return any(x.shape and jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)


def _signature(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *(leaf.shape for leaf in leaves)


def _signatures(tree: PyTree) -> Iterable[tuple[Any, ...]]:
    yield _signature(tree)
    for _, child in _children(tree):
        yield from _signatures(child)


# The arguments of the high-precision twin of a step: weights in FP8 become arrays.


def arguments_of_twin(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with FP8 weights as types of arrays of their own dtype.

    A bfloat16 weight is a part of its `BFloat16Plus` master weight. So the optimizer of the twin
    does not store that part.
    """
    flat = jax.tree_util.tree_leaves_with_path(args, is_leaf=_is_whole)
    weights = [path_name(path) for path, node in flat if _is_quantized_weight(node)]
    if not weights:
        return tuple(args)
    return tuple(jax.tree.map(lambda node: _of_twin(node, weights), args, is_leaf=_is_whole))


def _is_whole(node: Any) -> bool:
    return _holds_masters(node) or is_node(node) or _is_quantized_weight(node)


def _holds_masters(node: Any) -> bool:
    return isinstance(node, MasterWeightsState) or _is_optimizer_state(node)


def _of_twin(node: Any, weights: list[str]) -> Any:
    if _is_quantized_weight(node):
        values = node.values[0] if is_weight(node) else node.values
        sharding = getattr(values, "sharding", None)
        return jax.ShapeDtypeStruct(node.shape, node.dtype, sharding=sharding)
    if _holds_masters(node):
        return jax.tree.map(
            lambda n: _without_high(n, weights) if isinstance(n, BFloat16PlusState) else n,
            node, is_leaf=lambda n: isinstance(n, BFloat16PlusState),
        )  # fmt: skip
    return node


def _without_high(masters: BFloat16PlusState, weights: list[str]) -> PyTree:
    """The master weights without the high parts that the twin has as its weights."""

    def one(path: Any, high: Any) -> Any:
        name = path_name(path)
        in_twin = any(weight == name or weight.endswith(f"/{name}") for weight in weights)
        return None if in_twin else high

    return masters._replace(high=jax.tree_util.tree_map_with_path(one, masters.high))
