"""Arguments of a call: examples that may be types, and the names of keyword options."""

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxfp8._typing import PyTree

# `Example`: the arguments of an example call, some of which may be types.


@dataclasses.dataclass(frozen=True)
class Example:
    """The arguments of an example call of a model. Arrays may be `jax.ShapeDtypeStruct`s."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def shapes(self, function: Callable[..., Any], *first: PyTree) -> PyTree:
        """The types of `function(*first, *args, **kwargs)`. Nothing is computed."""
        call, arrays = self._call(function)

        def only_arrays(first: PyTree, arrays: dict[int, Any]) -> PyTree:
            # A model may return strings and functions, too.
            return jax.tree.map(_array_or_none, call(first, arrays))

        return jax.eval_shape(only_arrays, first, arrays)

    def jaxpr(self, function: Callable[..., Any], *first: PyTree) -> Any:
        """The program of `function(*first, *args, **kwargs)`."""
        call, arrays = self._call(function)

        def only_arrays(first: PyTree, arrays: dict[int, Any]) -> list[Any]:
            outs = map(_array_or_none, jax.tree.leaves(call(first, arrays)))
            return [out for out in outs if out is not None]

        return jax.make_jaxpr(only_arrays)(first, arrays).jaxpr

    def _call(self, function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[int, Any]]:
        """`function` of its first arguments and of the arrays, and the arrays."""
        leaves, structure = jax.tree.flatten((self.args, self.kwargs), is_leaf=lambda n: n is None)
        # The others are flags, for instance, which must not be traced.
        arrays = {place: leaf for place, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}

        def call(first: Any, arrays: dict[int, Any]) -> Any:
            new = [arrays.get(place, leaf) for place, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, new)
            return function(*first, *args, **kwargs)

        return call, arrays


def _array_or_none(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else None


# A check of the names of keyword options, which a TypedDict lists.


@functools.cache
def option_names(options: type) -> tuple[str, ...]:
    """The option names of a TypedDict and of its bases, sorted."""
    return tuple(sorted(options.__optional_keys__))  # type: ignore[attr-defined]


def check_options(function: str, known: type, options: Mapping[str, object]) -> None:
    """Raise TypeError for an option that is none of the TypedDict `known`, those of `function`."""
    for name in options:
        if name not in option_names(known):
            raise TypeError(
                f"{function} has no option {name}={reprlib.repr(options[name])}; its options are "
                f"{', '.join(option_names(known))}."
            )
