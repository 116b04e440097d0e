"""Folders of safetensors files: one file, or several with an index that says what is where."""

import contextlib
import os
from collections.abc import Iterable

import numpy as np

from jaxfp8.checkpoint._safetensors import (
    CheckpointError,
    Path,
    Reader,
    TensorSpec,
    lacks,
    named,
    read_json,
    show,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint(contextlib.AbstractContextManager["Checkpoint"]):
    """The tensors of a safetensors file, or of a folder, which may hold them in several files."""

    specs: dict[str, TensorSpec]
    metadata: dict[str, str]  # what all files say

    def __init__(self, path: Path) -> None:
        """Open the files and check their headers. `path` is a file, an index or a folder."""
        self.path = _find_in_folder(os.fspath(path))
        readers = []
        with contextlib.ExitStack() as opened:
            if not self.path.endswith(".json"):
                readers.append(opened.enter_context(Reader(self.path)))
            else:
                weight_map = read_index(self.path)
                for file in sorted(set(weight_map.values())):
                    readers.append(opened.enter_context(_open_shard(self.path, file)))
                    _compare(self.path, file, weight_map, readers[-1].specs)
            self._opened = opened.pop_all()
        self._readers = {name: reader for reader in readers for name in reader.specs}
        self.specs = {name: reader.specs[name] for name, reader in self._readers.items()}
        shared = [reader.metadata.items() for reader in readers]
        self.metadata = {
            key: text
            for key, text in (shared[0] if shared else ())
            if all((key, text) in each for each in shared)
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read the rows start:stop of axis 0, or the whole tensor, into memory of its own."""
        if name not in self._readers:
            raise lacks(self.path, name, self.specs)
        return self._readers[name].read(name, start, stop)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def read_index(path: Path) -> dict[str, str]:
    """Read which tensor is in which file: the `weight_map` of `model.safetensors.index.json`."""
    path = os.fspath(path)
    with named(path):
        weight_map = read_json(path).get("weight_map")
        if type(weight_map) is not dict:
            raise ValueError(f"weight_map={show(weight_map)} must be a dict of names of files")
        for name, file_name in weight_map.items():
            # A name with a folder, or with a drive of Windows, would read files elsewhere.
            if type(file_name) is not str or not (
                file_name.endswith(".safetensors")
                and file_name.isprintable()
                and set(file_name).isdisjoint("/\\:")
            ):
                raise ValueError(
                    f"weight_map puts tensor {show(name)} into {show(file_name)}. It must be the "
                    f"name of a file of this folder that ends with .safetensors"
                )
    return weight_map


def _find_in_folder(path: str) -> str:
    """The file or the index of a folder. A path of a file is returned as it is."""
    if not os.path.isdir(path):
        return path
    files = sorted(file for file in os.listdir(path) if file.endswith((".safetensors", INDEX)))
    known = [file for file in (SINGLE, INDEX) if file in files] or files
    if len(known) != 1:
        raise CheckpointError(
            f"{path} must hold {SINGLE}, {INDEX} or one other file that ends with .safetensors. It "
            f"holds {show(known)}. Give the path of a file instead of the folder."
        )
    return os.path.join(path, known[0])


def _open_shard(index: str, file: str) -> Reader:
    try:
        return Reader(os.path.join(os.path.dirname(index), file))
    except OSError as error:
        raise CheckpointError(
            f"{index} names the file {show(file)}, which cannot be opened: {error.strerror}. "
            f"Copy or download all files of the folder."
        ) from error


def _compare(index: str, file: str, weight_map: dict[str, str], found: Iterable[str]) -> None:
    """Raise an error unless a file has the tensors that the index puts there, and no others."""
    expected = {name for name, other in weight_map.items() if other == file}
    for name in sorted(expected.symmetric_difference(found)):
        other = weight_map.get(name)
        place = "does not name it" if other is None else f"puts it into {show(other)}"
        raise CheckpointError(
            f"{index} {place}: tensor {show(name)}. The file {show(file)} "
            f"{'does not have' if name in expected else 'has'} it. Copy or download all files of "
            f"the folder."
        )
