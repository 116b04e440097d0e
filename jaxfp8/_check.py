"""Checks that many functions make of their arguments. Errors name the argument and its value."""

import sys
from collections.abc import Collection
from typing import Any

import numpy as np

_LEAST, _MOST = sys.float_info.min, sys.float_info.max  # positive, and finite


def check_type(name: str, value: object, kind: Any, needed: str) -> None:
    """Raise TypeError unless `value` is a `kind`, a class or a union. `needed` says it in words."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {needed}.")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool."""
    check_type(name, value, bool, "True or False")


def check_int(name: str, value: object, needed: str = "an integer", *, least: int = 1) -> None:
    """Raise ValueError unless `value` is an int of at least `least`. A bool is none."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} must be {needed} of at least {least}.")


def is_number(value: Any, least: float = _LEAST, most: float = _MOST) -> bool:
    """Whether `value` is a number between the two, by default a positive one. A bool is none."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return is_real and not isinstance(value, bool) and bool(least <= value <= most)


def check_number(
    name: str, value: object, needed: str, *, least: float = _LEAST, most: float = _MOST
) -> None:
    """Raise ValueError unless `is_number`. `needed` says in words what is."""
    if not is_number(value, least, most):
        raise ValueError(f"{name}={value!r} must be {needed}.")


def check_one_of(name: str, value: object, known: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of the values that are known."""
    if value not in known:
        *some, last = map(repr, known)
        raise ValueError(f"{name}={value!r} is unknown; use {', '.join(some)} or {last}.")
