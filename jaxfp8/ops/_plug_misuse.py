"""Checks of how flax was given a plug: a class where an instance is needed, or the reverse."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def refuse_class(plug: type, arguments: tuple[Any, ...], cure: str) -> None:
    """Raise TypeError if a plug is constructed with the operands of a matmul.

    flax calls what it was given as a function. A class in that place would take the operands as its
    fields.

    Args:
      plug: the class that is constructed.
      arguments: its positional arguments.
      cure: what to write instead.

    Example:
      >>> refuse_class(dict, (), "")
    """
    if len(arguments) > 1 and any(hasattr(each, "shape") for each in arguments[:3]):
        raise TypeError(
            f"{plug.__name__} was called with the operands of a matmul, so flax was given the class {plug.__name__} where "
            f"an instance is needed; write {cure}."
        )


def needs_operands(cure: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates `__call__` of a plug: raise TypeError if flax calls an instance as it calls a class.

    Example:
      >>> class Plug:
      ...     @needs_operands("dot_general=plug")
      ...     def __call__(self, lhs): return lhs
      >>> Plug()(1.0)
      1.0
    """

    def decorated(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            if len(arguments) == 1 and not options:
                name = type(arguments[0]).__name__
                raise TypeError(
                    f"an instance of {name} was called without operands, so flax was given an instance, but this "
                    f"argument needs a class; write {cure}."
                )
            return call(*arguments, **options)

        return checked

    return decorated
