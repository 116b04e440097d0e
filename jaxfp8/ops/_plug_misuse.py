"""Checks of plugs: the objects of jaxfp8 that flax calls in place of a matmul.

flax may be given a class where an instance is needed, or the reverse. It may also be given a plug
for `dot_general` where a plug for `einsum` is needed, or the reverse.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def refuse_class(plug: type, arguments: tuple[Any, ...], cure: str) -> None:
    """Raise TypeError if a plug is constructed with the operands of a matmul.

    flax calls the plug as a function. If flax was given a class, the call constructs it, and the
    operands become its fields.

    Args:
      plug: the class that is constructed.
      arguments: its positional arguments.
      cure: what to write instead.

    Example:
      >>> refuse_class(dict, (), "")
    """
    called_as_matmul = len(arguments) > 2 and (
        isinstance(arguments[0], str) or isinstance(arguments[2], tuple)
    )
    if called_as_matmul and hasattr(arguments[1], "shape"):
        raise TypeError(
            f"{plug.__name__} was called with the operands of a matmul. So flax was given the "
            f"class {plug.__name__} where an instance is needed; write {cure}."
        )


def needs_operands(
    cure: str, *, equation: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for `__call__` of a plug.

    The decorated method raises TypeError if flax calls it as it calls another kind of plug.

    Args:
      cure: what to write if flax was given an instance where a class is needed.
      equation: whether the first argument is the equation of an einsum.

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
            name = type(arguments[0]).__name__
            if len(arguments) == 1 and not options:
                raise TypeError(
                    f"an instance of {name} was called without operands. So flax was given an "
                    f"instance, but this argument needs a class; write {cure}."
                )
            if len(arguments) > 1 and isinstance(arguments[1], str) != equation:
                given, needed = (
                    ("an array", "an equation") if equation else ("an equation", "an array")
                )
                other = (
                    "dot_general=FP8DotGeneral(recipe)"
                    if equation
                    else "einsum_op=FP8EinsumOp(recipe)"
                )
                raise TypeError(
                    f"the first argument of {name} is {given}, but {needed} is needed; write "
                    f"{other} if flax calls it."
                )
            return call(*arguments, **options)

        return checked

    return decorated
