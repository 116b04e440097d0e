"""Checkpoints of a training run. Orbax writes and restores them, bit for bit.

A checkpoint is a folder DIR/STEP/. It holds the arrays as Orbax writes them, and description.json.
That file has a description of the run, the shapes of the arrays, and the SHA-256 of each file. A
damaged checkpoint raises an error. A save writes the folder under another name and renames it at
the end. So an interrupted save does not change the previous checkpoint.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import jaxfp8 as fp8

KEPT = 2  # a run keeps this many checkpoints: a complete save deletes older ones
DESCRIPTION = "description.json"

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs its progress here


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message says why and what to do, in one line."""


def shapes(arrays: Any) -> dict[str, str]:
    """The dtype and shape of each array in a tree, by the array's name."""
    leaves = jax.tree.leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): f"{a.dtype}{list(np.shape(a))}" for path, a in leaves}


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The keys whose values differ, or that only one of the dicts has."""
    return [key for key in ours | theirs if ours.get(key) != theirs.get(key)]


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' ...')}"


class Checkpoints:
    """The checkpoints of one run, saved every `every` steps.

    `run` describes the run, in types that JSON has. A checkpoint with another description raises
    CheckpointError.
    """

    def __init__(self, directory: Path, run: dict[str, Any], every: int) -> None:
        self.directory, self.run, self.every = directory.absolute(), run, every

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first. Only names of folders are read."""
        if not self.directory.is_dir():
            return []
        try:
            folders = [path.name for path in self.directory.iterdir() if path.is_dir()]
        except OSError as error:
            why = in_one_line(error)
            raise CheckpointError(
                f"{self.directory}: it cannot be read ({why}); give a directory that you may read."
            ) from None
        return sorted(int(name) for name in folders if name.isdecimal() and name == str(int(name)))

    def description(self) -> dict[str, Any]:
        """How the newest checkpoint describes its run. There must be one."""
        run: dict[str, Any] = self._description(self.steps()[-1])["run"]
        return run

    def save(self, step: int, arrays: dict[str, Any]) -> None:
        """Save a tree of arrays. On return they are on disk, so the next step may donate them."""
        folder = self.directory / str(step)
        unfinished = folder.with_suffix(".unfinished")
        try:
            for left in self.directory.glob("*.unfinished"):  # left by an interrupted save
                shutil.rmtree(left)
            with ocp.StandardCheckpointer() as checkpointer:  # on exit it waits for files
                checkpointer.save(unfinished / "arrays", arrays)
            description = {
                "run": self.run,
                "step": step,
                "shapes": shapes(arrays),
                "files": digests(unfinished),
            }
            (unfinished / DESCRIPTION).write_text(json.dumps(description, indent=1))
            unfinished.rename(folder)
            for old in self.steps()[:-KEPT]:
                shutil.rmtree(self.directory / str(old))
        except Exception as error:  # the type for a full disk depends on which part was writing
            why = in_one_line(error)
            raise CheckpointError(
                f"{folder}: it could not be saved ({why}). Free space on the disk, or allow "
                "writing there. Then --resume continues from the previous checkpoint."
            ) from None

    def check(self) -> None:
        """Raise CheckpointError if the newest checkpoint is damaged or of another run.

        Its arrays are hashed, but Orbax does not read them.
        """
        if not self.steps():
            return
        step = self.steps()[-1]
        folder, description = self.directory / str(step), self._description(step)
        run = description["run"]
        if others := different(self.run, run):
            pairs = (f"{key} {run.get(key)!r}, not {self.run.get(key)!r}" for key in others)
            listed = ", ".join(pairs)
            raise CheckpointError(
                f"{folder}: it was saved with {listed}; a resumed run needs the settings that it "
                "was started with. Repeat them with --resume, or give another --checkpoint."
            )
        # Files are checked before Orbax reads them, because Orbax misses some damage. For other
        # damage its threads print tracebacks.
        files = digests(folder)
        del files[DESCRIPTION]
        if others := different(files, description["files"]):
            what = "is missing" if others[0] not in files else "has changed since it was saved"
            raise self._damaged(step, f"{others[0]} {what}")

    def restore(self, like: dict[str, Any]) -> dict[str, Any]:
        """Read the newest checkpoint into the tree of `like`.

        The entry "state" must be the quantizer state. `fp8.check_state` checks it, also against
        the weights in the entry "params".
        """
        self.check()
        step = self.steps()[-1]
        saved, wanted = self._description(step)["shapes"], shapes(like)
        if others := different(saved, wanted):
            was, due = (found.get(others[0], "absent") for found in (saved, wanted))
            raise self._damaged(step, f"{others[0]} is {was}, in the model it is {due}")
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                arrays = checkpointer.restore(self.directory / str(step) / "arrays", like)
            arrays["state"] = fp8.check_state(
                arrays["state"], like=like["state"], params=arrays["params"]
            )
        except Exception as error:  # the file may be of another version of Orbax
            raise self._damaged(step, in_one_line(error)) from None
        return arrays

    def _description(self, step: int) -> dict[str, Any]:
        try:
            description = json.loads((self.directory / str(step) / DESCRIPTION).read_text())
            parts = {key: description[key] for key in ("run", "shapes", "files")}
            of_step = description["step"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise self._damaged(step, f"{DESCRIPTION}: {in_one_line(error)}") from None
        if not all(isinstance(part, dict) for part in parts.values()):
            raise self._damaged(step, f"{DESCRIPTION} does not describe a run")
        if of_step != step:
            raise self._damaged(step, f"{DESCRIPTION} describes step {of_step}")
        return parts

    def _damaged(self, step: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory / str(step)}: it cannot be resumed: {what}. Move it away to resume "
            "from the previous checkpoint, or start again in another --checkpoint DIR."
        )


def open_directory(directory: str, runs: list[Checkpoints], resume: bool) -> None:
    """Raise CheckpointError unless `directory` can take new runs, or holds runs to resume."""
    path = Path(directory)

    def refused(what: str, cure: str) -> CheckpointError:
        return CheckpointError(f"--checkpoint {directory}: {what}; {cure}.")

    for file in (path, *(run.directory for run in runs)):
        if file.exists() and not file.is_dir():
            raise refused(f"{file} is a file", "give a directory")
    if resume and not path.is_dir():
        raise refused(
            "there is no such directory",
            "give the directory of a run, or leave out --resume",
        )
    if resume and not any(run.steps() for run in runs):
        names = " or ".join(f"{run.directory.name}/STEP/" for run in runs)
        raise refused(
            f"it holds no checkpoint {names}",
            "give the directory of a run, or a new one without --resume",
        )
    # Only names are read, so a damaged checkpoint also counts as a run and is not overwritten.
    found = [entry for run in runs for entry in run.directory.glob("*") if entry.name.isdigit()]
    if found and not resume:
        raise refused(
            f"it holds a run already ({found[0]})",
            "add --resume to continue it, or give a new directory",
        )
    for run in runs:
        run.check()
    try:  # a test write here fails before training, not at the first save
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        what = f"it cannot be written to ({in_one_line(error)})"
        raise refused(what, "give a directory that you may write to") from None
