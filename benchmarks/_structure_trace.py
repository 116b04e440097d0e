"""What runs of a package while JAX traces a train step: calls, moves, frames."""

import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call: (file, function) of each frame of the package on the stack, outermost first.

    The last one is what was called. A call of a function outside of the package, which is recorded
    only on request, has the frames of the package alone; `outside` is then its name.
    """

    stack: tuple[tuple[str, str], ...]
    outside: str | None = None


def record(root: Path, run: Callable[[], Any], outside: tuple[str, ...] = ()) -> list[Call]:
    """Lists the calls of functions in the package `root` while `run` runs, in their order.

    Lambdas, comprehensions and generator expressions are not listed: Python 3.12 calls fewer of
    them than 3.11. A generator counts each time that it is resumed.

    Args:
      root: the folder of the package.
      run: what is recorded.
      outside: names of functions that are listed, too, if they are not in the package.
    """
    prefix = f"{root}/"
    calls: list[Call] = []

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        is_inside = code.co_filename.startswith(prefix)
        if is_inside and not code.co_name.startswith("<"):
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

    A move is a call in another file than the call before it, whoever made that one.
    """
    files = [call.stack[-1][0] for call in calls if call.outside is None]
    moves = sum(file != before for before, file in itertools.pairwise(files))
    return {"calls": len(files), "files": len({*files}), "moves": moves}


def frames(calls: list[Call], layer: str, is_end: Callable[[Call], bool], what: str) -> list[int]:
    """Sorted numbers of frames from the layer to each call that is an end, both of them counted.

    Args:
      calls: what was recorded.
      layer: folder of the layer; its frame is the outermost `__call__` in there.
      is_end: whether a call is one that frames are counted to. Ends without a layer are left out.
      what: the ends, for the message.

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
            f"no call of {what} was seen below a `__call__` in {layer}/, "
            "but frames are counted from there to it; "
            "write the new name of what was renamed in benchmarks/_structure_passes.py."
        )
    return sorted(found)
