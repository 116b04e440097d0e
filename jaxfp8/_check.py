"""Checks that many functions make of their arguments. Errors name the argument and its value."""

import math
import sys
from collections.abc import Collection
from numbers import Real
from typing import Any

import numpy as np

_LEAST, _MOST = math.ulp(0.0), sys.float_info.max  # positive, and finite


def check_type(name: str, value: object, kind: Any, needed: str) -> None:
    """Raise TypeError unless `value` is a `kind`, a class or a union. `needed` says it in words."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {needed}.")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool."""
    check_type(name, value, bool, "True or False")


def check_int(
    name: str, value: object, needed: str = "an integer", *, least: int = 1, most: int | None = None
) -> None:
    """Raise ValueError unless `value` is an int between the two. A bool is none."""
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r} must be {needed} {bounds}.")


def is_number(value: Any, least: float = _LEAST, most: float = _MOST) -> bool:
    """Whether `value` is a number between the two, by default a positive one. A bool is none."""
    # Beside a float32 NumPy would round the bounds to float32, where they are 0 and inf.
    plain: Any = value.item() if isinstance(value, np.generic) else value
    is_real = not isinstance(plain, bool) and isinstance(plain, Real)
    return is_real and bool(least <= plain <= most)


def check_number(
    name: str, value: Any, needed: str, *, least: float = _LEAST, most: float = _MOST
) -> float:
    """The value as a float. ValueError unless `is_number`. `needed` says in words what is."""
    if not is_number(value, least, most):
        raise ValueError(f"{name}={value!r} must be {needed}.")
    return float(value)


def check_one_of(name: str, value: object, known: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of at least two values that are known."""
    # An array is equal to several values, and 16.0 to an integer.
    if not any(isinstance(value, type(each)) and value == each for each in known):
        *some, last = map(repr, known)
        raise ValueError(f"{name}={value!r} is unknown; use {', '.join(some)} or {last}.")
