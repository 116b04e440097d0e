"""Which tests may find a fault: those of its room, then those of rooms above it.

`run.py` says in which order they run.
"""

import ast
from pathlib import Path

from fault_table import Sources, room_of

# Where the tests of a room are, below tests/. A room that is not here has a folder of its name.
TESTS = {
    "_call": ("ops/test_unknown_options.py", "conversion"),
    "_check": ("test_check.py",),
    "_geometry": ("test_geometry.py",),
    "_layer_arguments": ("test_layer_arguments.py",),
    "_pytrees": ("test_pytrees.py",),
    "_quantized_tensor": ("tensors",),
    "matmul": ("ops",),
    "prologues": ("kernels/test_prologues.py", "ops/test_prologue.py"),
}
CONTRACTS = ("golden", "contracts")
# Rooms that meshes change, and that tests/meshes tests together.
ON_MESHES = {"sharding", "weights", "state", "matmul", "ops", "moe"}


def rooms_by_importers(sources: Sources) -> dict[str, set[str]]:
    """For each room, the rooms that import it."""
    rooms = {room_of(path) for path in sources}
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                parts = name.split(".")
                if parts[0] == "jaxfp8" and len(parts) > 1 and parts[1] in rooms - {room_of(path)}:
                    found[parts[1]].add(room_of(path))
    return {room: importers - {"__init__"} for room, importers in found.items()}


def height_of(room: str, importers: dict[str, set[str]]) -> int:
    below = [other for other, above in importers.items() if room in above]
    return 1 + max((height_of(other, importers) for other in below), default=0)


def stages_of(room: str, sources: Sources, tests: Path) -> dict[str, list[str]]:
    """The paths of tests for a fault in a room, by stage. No path is in two stages."""
    importers = rooms_by_importers(sources)

    def existing(room: str) -> list[str]:
        return [path for path in TESTS.get(room, (room,)) if (tests / path).exists()]

    above = sorted(importers[room], key=lambda each: (height_of(each, importers), each))
    later = ["meshes"] * (room in ON_MESHES) + [path for each in above for path in existing(each)]
    stages = {"room": existing(room), "contracts": [*CONTRACTS], "importers": later}
    seen: set[str] = set()
    for name, paths in stages.items():
        stages[name] = [f"tests/{path}" for path in dict.fromkeys(paths) if path not in seen]
        seen |= set(paths)
    return {name: paths for name, paths in stages.items() if paths}
