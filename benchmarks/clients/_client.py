"""What a client is: its packages, its own command, and the rows that are run of it.

A file NAME_client.py defines one `CLIENT`. `run.py` runs the rows. Nothing here imports jax, since
each client has an environment of its own.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
"""Names of jaxfp8's recipes in rows. Every other name is a method of the client itself."""


def documented(page: str, marker: str) -> str:
    """The patch behind `<!-- marker -->` in a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    return text.split(f"<!-- {marker} -->\n")[1].split("```diff\n")[1].split("```")[0]


def beside(name: str) -> str:
    """The text of a file in this folder: a patch that is none for users."""
    return (HERE / name).read_text()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One run of a client's command.

    Attributes:
      name: what differs from other rows: "4 devices, FSDP". A key together with `recipe`.
      recipe: "bfloat16", a name of `RECIPES`, or a method of the client: "its fp8".
      arguments: given to the command, behind the client's own.
      environment: variables for this row.
      devices: how many CPU devices there are.
      setup: commands that run before, and whose losses do not count: to write a checkpoint.
      like: the row, as (name, recipe), whose last losses this run must repeat to the last digit.
      refuses: a regular expression. The command must stop, with an error that matches it.
      losses: how many losses the command must print. 0: those of the client.
    """

    name: str
    recipe: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: int = 1
    setup: tuple[tuple[str, ...], ...] = ()
    like: tuple[str, str] | None = None
    refuses: str | None = None
    losses: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
    """A framework, and how to run its own command.

    Attributes:
      name: that of its file, NAME_client.py.
      title: its name in tables, with its version.
      python: the version of Python of its environment: "3.12".
      packages: what pip installs, with pinned versions.
      alone: what pip installs after it, without dependencies.
      checkout: "owner/name commit" of the source tree that `--checkout NAME=FOLDER` gives. None:
        pip installs all of it.
      patches: functions that give the text of a patch. They are applied to a copy of the checkout.
      command: behind `python`. "{here}" is this folder, "{checkout}" the patched copy, and
        "{scratch}" a new folder for each row. Arguments of rows may have them, too.
      environment: variables for each run.
      loss: a regular expression whose group 1 is the loss of a step, in the output.
      loss_file: a file that the command writes, which has more digits than its output. Its losses
        are read. None: those of the output.
      losses: how many losses each row prints.
      prints: a name for other numbers in the output, and a regular expression whose group 1 is one.
      program: a regular expression for the name of the XLA module of the train step.
      counts: the script beside this file that counts the matmuls of a folder of dumps.
      rows: what is run.
      lines: statements and lines of config that a user writes, with: jaxfp8, its own FP8, qwix.
    """

    name: str
    title: str
    python: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    checkout: str | None = None
    patches: tuple[Callable[[], str], ...] = ()
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loss: str
    loss_file: str | None = None
    losses: int
    prints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    program: str
    counts: str = "_matmuls.py"
    rows: tuple[Row, ...]
    lines: Mapping[str, str] = dataclasses.field(default_factory=dict)
