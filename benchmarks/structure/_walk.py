"""The way of a value: the files that `lhs` enters from `fp8.dot_general` to its cast.

The call is traced with its gradients. A call **carries** `lhs` if an argument holds an array with
as many elements as `lhs`, also inside of a tuple, a dict, an object of jaxfp8 or a function. No
other array has this number. Reshapes and transpositions keep it. The way ends with the first call
of `saturating_cast` that carries it.

A **climb back** is a move to a file that the value has been in before.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
from _trace import record

import jaxfp8 as fp8
from jaxfp8.numerics import saturating_cast

LHS, RHS = (6, 10, 64), (64, 32)
DEEPEST = 6
"""Levels of objects that are searched. `Call`, its arrays and a tuple of them are three."""


def way_of_lhs(root: Path, recipe: fp8.Recipe) -> list[str]:
    """The files that lhs is in, from the first to the last, one entry for each move.

    Raises:
      LookupError: if no cast of lhs was seen.
    """
    state = fp8.init_state(recipe)
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (LHS, RHS))

    def loss(operands, state):
        axes = (((2,), (0,)), ((), ()))
        return fp8.dot_general(*operands, axes, recipe=recipe, state=state).sum()

    def trace():
        return jax.make_jaxpr(fp8.value_and_grad(loss))((lhs, rhs), state)

    jax.clear_caches()
    calls = record(root, trace, only=carries(math.prod(LHS)))
    stops = [call.stack[-1] for call in calls]
    begin, end = (_place(root, function) for function in (fp8.dot_general, saturating_cast))
    if not {begin, end} <= {*stops}:
        raise LookupError(
            f"recipe {recipe.name!r}: no calls of {begin} and {end} with {math.prod(LHS)} values "
            "were seen. The way of lhs begins and ends there. If it ends in another function, name "
            "that in benchmarks/structure/_walk.py."
        )
    files = [file for file, _ in stops[stops.index(begin) : stops.index(end) + 1]]
    return [file for file, _ in itertools.groupby(files)]


def _place(root: Path, function: Callable[..., Any]) -> tuple[str, str]:
    """The file and the name of a function, below what decorates it."""
    own = inspect.unwrap(function)
    return Path(inspect.getsourcefile(own)).relative_to(root).as_posix(), own.__name__


def climbs(way: list[str]) -> int:
    """How many moves lead to a file that was on the way before."""
    return sum(file in way[:position] for position, file in enumerate(way))


def carries(size: int) -> Callable[[FrameType], bool]:
    """Whether a frame's arguments, or the variables that it closes over, hold `size` elements."""

    def holds(value: Any, depth: int = 0) -> bool:
        if isinstance(value, jax.Array):
            return value.size == size
        if depth == DEEPEST:
            return False
        return any(holds(each, depth + 1) for each in _parts(value))

    return lambda frame: holds(tuple(frame.f_locals.values()))


def _parts(value: Any) -> tuple[Any, ...]:
    match value:
        case tuple() | list():
            return tuple(value)
        case dict():
            return tuple(value.values())
        case functools.partial():
            return value.func, value.args, value.keywords
        case MethodType():
            return (value.__self__,)
        case FunctionType():
            return tuple(cell.cell_contents for cell in value.__closure__ or () if _is_set(cell))
    is_ours = type(value).__module__.partition(".")[0] == fp8.__name__
    return tuple(vars(value).values()) if is_ours and hasattr(value, "__dict__") else ()


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a function that names itself, while it is being defined
        return False
    return True
