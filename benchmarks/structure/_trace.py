"""Record the calls of a package while JAX traces a train step: calls, moves and frames."""

import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call: (file, function) of each frame of the package on the stack, outermost first.

    The last frame is the called function. If the called function is outside of the package, the
    stack still has only frames of the package, and `outside` is the function's name. Such calls are
    recorded only on request.
    """

    stack: tuple[tuple[str, str], ...]
    outside: str | None = None


def record(
    root: Path,
    run: Callable[[], Any],
    outside: tuple[str, ...] = (),
    only: Callable[[FrameType], bool] = lambda frame: True,
) -> list[Call]:
    """Lists the calls of functions in the package `root` while `run` runs, in their order.

    Lambdas, comprehensions and generator expressions are not listed, because Python 3.12 calls
    fewer of them than 3.11. A generator counts each time that it is resumed.

    Args:
      root: the folder of the package.
      run: a function without arguments, whose calls are recorded.
      outside: names of functions outside of the package that are listed too.
      only: whether a call of the package is listed, from its frame.
    """
    prefix = f"{root}/"
    calls: list[Call] = []

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        is_inside = code.co_filename.startswith(prefix)
        if is_inside and not code.co_name.startswith("<") and only(frame):
            calls.append(Call(_stack(frame, prefix)))
        elif not is_inside and code.co_name in outside:
            calls.append(Call(_stack(frame, prefix), code.co_name))

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # a finalizer in the middle of the run would be listed
    sys.setprofile(hook)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def _stack(frame: FrameType | None, prefix: str) -> tuple[tuple[str, str], ...]:
    frames = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(prefix) and not code.co_name.startswith("<"):
            frames.append((code.co_filename.removeprefix(prefix), code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))


def traffic(calls: list[Call]) -> dict[str, int]:
    """The calls inside the package, the files they are in, and the moves.

    A move is a call in another file than the previous call. It does not matter who called.
    """
    files = [call.stack[-1][0] for call in calls if call.outside is None]
    moves = sum(file != before for before, file in itertools.pairwise(files))
    return {"calls": len(files), "files": len({*files}), "moves": moves}


def frames(calls: list[Call], layer: str, is_end: Callable[[Call], bool], what: str) -> list[int]:
    """Sorted numbers of frames from the layer to each end. Layer and end are counted.

    Args:
      calls: the recorded calls.
      layer: folder of the layer. The frame of the layer is the outermost `__call__` in this folder.
      is_end: whether a call is an end. An end without a layer on its stack is left out.
      what: description of the ends, for the message.

    Raises:
      LookupError: if there is no such call below the layer.
    """
    found = set()
    for call in filter(is_end, calls):
        starts = [file.startswith(f"{layer}/") and name == "__call__" for file, name in call.stack]
        if True in starts:
            found.add(len(call.stack) - starts.index(True))
    if not found:
        raise LookupError(
            f"no call of {what} was seen below a `__call__` in {layer}/. "
            "Frames are counted from that `__call__` to this call. "
            "If one was renamed, write its new name in benchmarks/structure/_passes.py."
        )
    return sorted(found)
