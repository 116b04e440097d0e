"""A check of the names of keyword options, which a TypedDict lists."""

import functools
import reprlib
from collections.abc import Mapping


@functools.cache
def option_names(options: type) -> tuple[str, ...]:
    """The option names of a TypedDict and of its bases.

    Example:
      >>> from typing import TypedDict
      >>> option_names(TypedDict("Options", {"b": int, "a": int}, total=False))
      ('a', 'b')
    """
    return tuple(sorted(options.__optional_keys__))  # type: ignore[attr-defined]


def check_options(function: str, known: type, options: Mapping[str, object]) -> None:
    """Raise TypeError for an option that a function does not have.

    Args:
      function: the name of the called function, for the message.
      known: the TypedDict of the options that the function has.
      options: the options that the caller passed.

    Example:
      >>> from typing import TypedDict
      >>> check_options("f", TypedDict("Options", {"a": int}, total=False), {"a": 1})
    """
    for name in options:
        if name not in option_names(known):
            raise TypeError(
                f"{function} has no option {name}={reprlib.repr(options[name])}; its options are "
                f"{', '.join(option_names(known))}."
            )
