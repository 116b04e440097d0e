"""Faults to plant in jaxfp8: reading, checking and planting them.

A table is a TOML file. The name of each section is the id of a fault:

    [room-name]
    file = "room/_file.py"
    text = 'a piece of source'
    replacement = 'the same piece with a fault'
    breaks = "What a user would notice."

The text occurs once in the whole package. So a fault is found again after its text has moved to
another file. `file` only helps a reader.
"""

import ast
import dataclasses
import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLES = tuple(sorted((HERE / "faults").glob("*.toml")))

Sources = dict[str, str]  # of a package: path inside it, and text


@dataclasses.dataclass(frozen=True)
class Fault:
    id: str
    file: str
    text: str
    replacement: str
    breaks: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.text}\0{self.replacement}".encode()).hexdigest()[:16]


def read_faults(tables: Iterable[Path]) -> list[Fault]:
    faults: dict[str, Fault] = {}
    for table in tables:
        for name, fields in tomllib.loads(table.read_text(encoding="utf-8")).items():
            if name in faults:
                raise ValueError(f"{table}: the id {name!r} is used twice. Give it another name.")
            faults[name] = Fault(name, **fields)
    return list(faults.values())


def read_sources(package: Path) -> Sources:
    return {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }


def places_of(text: str, sources: Sources) -> dict[str, int]:
    """How often each file holds the text. Files without it are left out."""
    return {path: source.count(text) for path, source in sources.items() if text in source}


def planted(fault: Fault, sources: Sources) -> tuple[str, str]:
    """The file that holds the text of a fault, and its source with the fault.

    Raises:
      ValueError: if the text is not there exactly once, or if the fault changes no statement.
    """
    places = places_of(fault.text, sources)
    if list(places.values()) != [1]:
        raise ValueError(
            f"{fault.id}: its text must be in the package once, but it is in "
            f"{places or 'no file'}. It was written for {fault.file}. Edit the table."
        )
    (path,) = places
    source = sources[path].replace(fault.text, fault.replacement)
    if ast.dump(ast.parse(source, path)) == ast.dump(ast.parse(sources[path])):
        raise ValueError(f"{fault.id}: its replacement changes nothing in {path}. Edit the table.")
    return path, source


def problems_of(faults: Iterable[Fault], sources: Sources) -> list[str]:
    found = []
    for fault in faults:
        try:
            planted(fault, sources)
        except (ValueError, SyntaxError) as error:
            found.append(f"{fault.id}: {error}" if isinstance(error, SyntaxError) else str(error))
    return found


def room_of(path: str) -> str:
    """A folder of the package, or the name of a file beside the folders."""
    return path.removesuffix(".py").split("/")[0]
