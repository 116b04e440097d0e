"""Whether the casts of matmuls are watched, and how their statistics reach the host.

The switch is a context that JAX knows (`jax.make_user_context`). Every cache of JAX has it in its
key: those of traces, of loops and of programs. So a step that was compiled before is compiled once
more while casts are watched. The program without statistics is never changed, and is used again
afterwards.

Statistics are scalars, which `jax.debug.callback` sends. A matmul that is differentiated sends
those of x, w and g together, in its backward pass. So `jax.checkpoint`, which runs a forward pass
twice, does not send them twice.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxfp8.ops._cast_stats import CastStats

Receive = Callable[[str, tuple[CastStats, ...]], None]
"""A function `(layer, statistics)`. JAX calls it on another thread."""

_watched: Any = jax.make_user_context(False)
# A program outlives the context in which it was compiled. So it sends to whoever listens now, and
# finds the listener here. Callbacks run on another thread, where context variables have no value.
_listeners: list[Receive] = []
# Frames of these packages do not name a matmul.
_LIBRARIES = frozenset({"jaxfp8", "jax", "flax", "functools", "contextlib"})


@contextlib.contextmanager
def watching(receive: Receive) -> Iterator[None]:
    """Watch the casts of all matmuls that run in this context.

    Raises:
      RuntimeError: if casts are watched already.

    Example:
      >>> with watching(lambda layer, statistics: None):
      ...     is_watching()
      True
      >>> is_watching()
      False
    """
    if _listeners:
        raise RuntimeError(
            "fp8.diagnostics.collect() is active already, in this thread or in another. Records "
            "have one receiver. Leave the first context before you enter the next one."
        )
    _listeners.append(receive)
    try:
        with _watched(True):
            yield
    finally:
        try:
            # Programs may still run. What they send belongs to this context.
            jax.effects_barrier()
        finally:
            _listeners.clear()


def is_watching() -> bool:
    """Whether casts are watched here."""
    return bool(_watched.value)


def name_of_call(given: str | None) -> str | None:
    """The name of a matmul: `name=` of the call, or the line of code that calls it.

    None if casts are not watched. Then the name is no part of the call, and equal layers share
    their traces.

    Raises:
      TypeError: if `given` is neither a string nor None.

    Example:
      >>> name_of_call("up") is None
      True
    """
    if given is not None and not isinstance(given, str):
        raise TypeError(f"name={given!r} must be a string, for instance name='mlp/up'.")
    if not is_watching() or _is_check_of_scan():
        return None
    if given is not None:
        return given
    for frame in _frames():
        if _module(frame).partition(".")[0] not in _LIBRARIES:
            file = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
            return f"{file}:{frame.f_lineno}"
    return "matmul"


def _is_check_of_scan() -> bool:
    """Whether `nn.scan` traces its body only to check it, before it loops over it.

    The trace must have no effect. With one, flax 0.12.12 raises "broadcasted variable has a data
    dependency on the scan body". Its result is not used, so it needs no statistics. flax does not
    say which trace it is. So this function reads the local variables of flax's stack frame. If flax
    renames them, users see flax's error.
    """
    return any(
        _module(frame) == "flax.core.axes_scan" and frame.f_locals.get("init_mode") is True
        for frame in _frames()
        if frame.f_code.co_name == "body_fn"
    )


def _frames() -> Iterator[types.FrameType]:
    """The frames of the stack, from the caller outwards."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def send(layer: str | None, statistics: tuple[CastStats, ...]) -> None:
    """Send statistics of a layer to the host when the program runs. Nothing if there are none.

    Example:
      >>> send(None, ())
    """
    if statistics:
        assert layer is not None
        jax.debug.callback(functools.partial(_deliver, layer), statistics)


def _deliver(layer: str, statistics: tuple[CastStats, ...]) -> None:
    for receive in _listeners:
        receive(layer, statistics)
