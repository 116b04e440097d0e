"""The arrays of nnx modules. `nnx.jit` passes them as a list in the order of a graph."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from flax.nnx.extract import NodeStates

from jaxfp8._typing import PyTree

ArgumentKind = Literal[
    "weights", "master weights", "moments", "gradients", "quantizer state", "other arguments"
]
Kinds = list[ArgumentKind | None]
"""The kind of each array of a tree; None if the tree does not say it."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["kinds"])
@dataclasses.dataclass(frozen=True)
class Packed:
    """The types of the arrays of a module, and their kinds (static)."""

    arrays: tuple[Any, ...]
    kinds: tuple[ArgumentKind | None, ...]


def with_kinds_of_modules(
    given: Sequence[PyTree], types: Sequence[PyTree], kinds: Callable[[Any], Kinds]
) -> list[PyTree]:
    """The types of arguments, with a `Packed` for each list of arrays that stands for a module.

    Args:
      given: the arguments, with modules.
      types: the arguments that the program takes.
      kinds: gives the kind of each leaf of a module.

    Raises:
      ValueError: if a list does not fit to its module.

    Example:
      >>> with_kinds_of_modules([1.0], [1.0], lambda module: [])
      [1.0]
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
    return Packed(tuple(arrays), tuple(known[n] for n in order))
