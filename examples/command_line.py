"""Command-line arguments that several examples share.

A mistake prints one line: what was given, and what to write instead.
"""

import argparse
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jaxfp8 as fp8

FORMATS = {"E4M3": fp8.E4M3, "E5M2": fp8.E5M2}  # by name, because JSON has no such values
# Scales for the default run of train_gpt.py. After 60 steps (2 CPU cores, jax 0.10.2) the delayed
# scales of x, w and g are at most 0.012, 0.0005 and 5e-8. The scales of w grow, so w_scale has a
# margin.
STATIC_SCALES = {"x_scale": 0.015, "w_scale": 0.001, "g_scale": 5e-8}


class Parser(argparse.ArgumentParser):
    """A parser of one script. Its errors are one line. --help shows the script's docstring."""

    def __init__(self, script: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(Path(script).name, description=description, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(str(message).split())}", file=sys.stderr)
        raise SystemExit(2)


def run_script(main: Callable[[], None]) -> None:
    """Run a script. Ctrl-C and SIGTERM end it at once, even if it compiles or waits for something.

    Ctrl-C prints one line. The exit code is 128 + the number of the signal, as in shells.
    """
    # A Python handler runs in the main thread, which compiles or waits for collectives most of the
    # time. So Python writes the signal's number to a pipe, and another thread reads the pipe. An
    # empty handler is needed too: without one, Ctrl-C raises KeyboardInterrupt, which JAX's garbage
    # collection can swallow, and the first process of a container never gets SIGTERM.
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as for `&` in a shell script
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writes)

    def wait() -> None:
        while (number := os.read(reads, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        if number == signal.SIGINT:
            print(f"\n{Path(sys.argv[0]).name}: stopped by Ctrl-C.", file=sys.stderr, flush=True)
        # os._exit skips exit handlers: JAX's waits for the other processes, and jaxlib 0.10.2 often
        # crashed there after a trace that was interrupted.
        os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()
    main()


def at_least_one(option: str, value: int) -> None:
    """Raise ValueError for a count below 1."""
    if value < 1:
        raise ValueError(f"{option} {value}: give at least 1.")


def positive(option: str, value: float) -> None:
    """Raise ValueError unless the value is finite and above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{option} {value}: give a finite number above 0, as in {option} 0.001.")


# ------------------------------------------------------------------------------------------- recipe
def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add --recipe and --set, which `recipe_of` reads."""
    names = "delayed, current, rowwise, blockwise, mxfp8, ..."
    parser.add_argument("--recipe", default="delayed", help=f"{names} (default: %(default)s)")
    field = {"type": recipe_field, "action": "append", "default": [], "metavar": "FIELD=VALUE"}
    parser.add_argument(
        "--set", **field, help="a field of the recipe, its value in JSON; may be repeated"
    )


def recipe_field(text: str) -> tuple[str, Any]:
    """Parse FIELD=VALUE, whose value is JSON."""
    field, equals, value = text.partition("=")
    if not (field and equals):
        raise argparse.ArgumentTypeError(f"{text}: give FIELD=VALUE, as in --set margin=1.")
    try:
        return field, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: {value!r} is no JSON; give a number, true, false, or a word in double "
            "quotes, as in --set 'algorithm=\"most_recent\"'."
        ) from None


def recipe_of(given: argparse.Namespace) -> fp8.Recipe:
    """The recipe of --recipe and --set.

    Raises:
      ValueError: for an unknown recipe or field. Also for a field that is missing, given twice or
        wrong.
    """
    fields = dict(given.set)
    if len(fields) < len(given.set):
        twice = next(field for field in fields if [name for name, _ in given.set].count(field) > 1)
        raise ValueError(f"--set {twice}: it is given more than once; give it once.")
    written = "".join(f" --set {field}={json.dumps(value)}" for field, value in given.set)
    if given.recipe == "static" and (
        missing := [name for name in STATIC_SCALES if name not in fields]
    ):
        cure = " ".join(f"--set {name}={STATIC_SCALES[name]}" for name in missing)
        raise ValueError(
            f"--recipe static{written}: it needs {', '.join(missing)}; add, for example, {cure}."
        )
    for field, value in fields.items():
        if field in ("forward", "gradient") and isinstance(value, str):
            fields[field] = FORMATS.get(value, value)
    try:
        return fp8.recipes.get(given.recipe, **fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--recipe {given.recipe}{written}: {error}") from None


# -------------------------------------------------------------------------------------------- files
def check_file(option: str, file: str) -> None:
    """Raise ValueError unless `file` can be written. Its content does not change."""
    path = Path(os.path.realpath(file))

    def refused(what: str, cure: str) -> ValueError:
        return ValueError(f"{option} {file or repr(file)}: {what}; {cure}.")

    try:
        if path.is_dir():
            raise refused(
                "it is a directory", f"give a file, as in {option} {Path(file) / 'result'}"
            )
        if not path.parent.is_dir():
            raise refused(
                "its folder does not exist", f"make it first: mkdir -p {Path(file).parent}"
            )
        new = not path.exists()
        # This test fails before training, not after it. Pipes and devices are not opened.
        if new or path.is_file():
            path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise refused(
            f"it cannot be written ({error.strerror})", "give a file that you may write"
        ) from None
