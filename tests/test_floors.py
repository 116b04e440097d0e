"""The house stands.

Imports run down only, rooms on one floor are strangers, and nobody inside imports a face.

Pallas and Triton wait until a kernel is asked for.
"""

import ast
import graphlib
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

# From the ground up. A room is a folder of jaxfp8/, or a file beside them; the face of the house
# stands on the roof.
FLOORS = (
    ("_typing", "_check", "_version", "_pytrees"),
    ("numerics", "_geometry", "_call", "_layer_arguments", "_table"),
    ("_quantized_tensor", "jaxprs", "programs", "prologues"),
    ("sharding",),
    ("kernels",),
    ("quantizers",),
    ("recipes", "comms"),
    ("weights",),
    ("plan", "state"),
    ("matmul",),
    ("ops",),
    ("moe",),
    ("linen", "nnx", "optim"),
    ("checkpoint", "conversion", "diagnostics"),
    ("plugs",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS, start=1) for room in rooms}

# Rooms stay rooms: few files, each of them a subject. CONTRIBUTING.md says what to do at a bound.
MOST_FILES = 210  # with faces
LONGEST = 500  # lines of a file
LEAST_MEDIAN = 200  # lines, without faces

HOUSE = "jaxfp8"
# What takes long to import, or is not always installed. Files that import it are reached through a
# `Backend` alone.
HEAVY = ("jax.experimental.pallas", "jax.experimental.mosaic", "jax_triton", "triton")
ROOT = Path(__file__).parent.parent / HOUSE

# A house is {path inside jaxfp8/: source}, so that a test can build a crooked one.
House = dict[str, str]


def read_house() -> House:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))
    }


def is_face(path: str) -> bool:
    return path.endswith("__init__.py")


def module_of(path: str) -> str:
    return ".".join((HOUSE, *path.removesuffix(".py").split("/"))).removesuffix(".__init__")


def room_of(path: str) -> str:
    return path.removesuffix(".py").split("/")[0]


def imported_by(path: str, house: House) -> Iterator[tuple[int, str]]:
    """Yields (line, module) of each import of a file, also of those inside functions."""
    modules = {module_of(other) for other in house}
    folder = module_of(path).split(".") if is_face(path) else module_of(path).split(".")[:-1]
    for node in ast.walk(ast.parse(house[path], path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                # `from folder import _file` imports the file; `from folder import name` imports the
                # face of the folder.
                yield node.lineno, name if name in modules or is_heavy(name) else source


def backends_of(path: str, house: House) -> Iterator[tuple[int, str]]:
    """Yields (line, module) of each `Backend("module", ...)`: what the first call of it imports."""
    for node in ast.walk(ast.parse(house[path], path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "Backend"
        ):
            keywords = {each.arg: each.value for each in node.keywords}
            module = node.args[0] if node.args else keywords.get("module")
            if module is None:
                continue  # a function, which the file has imported already
            yield (
                node.lineno,
                module.value if isinstance(module, ast.Constant) else "an unknown module",
            )


def is_heavy(module: str) -> bool:
    return any(f"{module}.".startswith(f"{heavy}.") for heavy in HEAVY)


def is_of_the_house(module: str) -> bool:
    return module.split(".")[0] == HOUSE


def imports_of(path: str, house: House) -> Iterator[tuple[int, str]]:
    """Yields (line, module) of each import from the house, now or through a `Backend`."""
    yield from (
        (line, module) for line, module in imported_by(path, house) if is_of_the_house(module)
    )
    yield from backends_of(path, house)


def imported_at_once(house: House) -> list[str]:
    """Lists the files that `import jaxfp8` runs."""
    path_of = {module_of(path): path for path in house}
    waiting, found = ["__init__.py"], []
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for _, module in imported_by(path, house):
            parts = module.split(".")  # a file is imported after the faces of its folders
            parents = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            waiting += [path_of[parent] for parent in parents if parent in path_of]
    return found


def fault(importer: str, imported: str) -> str | None:
    """Says what is wrong with one import between two files, if anything is."""
    if importer == "__init__.py":
        return None  # the roof sees every floor
    if is_face(imported):
        below = is_face(importer) and imported.startswith(importer.removesuffix("__init__.py"))
        return None if below else "is a face: import from the file that defines the name"
    here, there = room_of(importer), room_of(imported)
    if here == there or FLOOR[there] < FLOOR[here]:
        return None
    if FLOOR[there] > FLOOR[here]:
        return f"is above: {there} is on floor {FLOOR[there]}, {here} on floor {FLOOR[here]}"
    return f"is a stranger: {there} and {here} are both on floor {FLOOR[here]}"


def faults(house: House) -> list[str]:
    """Lists all that is wrong with a house."""
    homeless = [path for path in house if path != "__init__.py" and room_of(path) not in FLOOR]
    if homeless:
        return [f"{path}: {room_of(path)} is on no floor, add it to FLOORS" for path in homeless]
    path_of = {module_of(path): path for path in house}
    found, graph = [], graphlib.TopologicalSorter[str]()
    for path in house:
        for line, module in imports_of(path, house):
            if module not in path_of:
                found.append(f"{path}:{line}: {module} does not exist")
                continue
            graph.add(path, path_of[module])
            if what := fault(path, path_of[module]):
                found.append(f"{path}:{line}: {module} {what}")
    for path in imported_at_once(house):
        heavy = [(line, module) for line, module in imported_by(path, house) if is_heavy(module)]
        found += [
            f"{path}:{line}: {module} is heavy, and `import {HOUSE}` reaches it"
            for line, module in heavy
        ]
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        found.append("imports run in a circle: " + " <- ".join(error.args[1]))
    return found


def test_the_house_stands():
    house = read_house()
    assert house, f"no Python file under {HOUSE}/"
    assert not faults(house), "\n".join(faults(house))


def test_the_house_has_rooms_and_no_drawers():
    house = read_house()
    lines = {path: len(source.splitlines()) for path, source in house.items()}
    assert len(house) <= MOST_FILES
    assert not {path: n for path, n in lines.items() if n > LONGEST}
    assert statistics.median(n for path, n in lines.items() if not is_face(path)) >= LEAST_MEDIAN


def test_every_room_on_a_floor_exists():
    assert set(FLOOR) == {room_of(path) for path in read_house()} - {"__init__"}


# A straight house; each row below adds one crooked file to it.
STRAIGHT: House = {
    "__init__.py": "from jaxfp8 import linen as linen\nfrom jaxfp8.numerics import E4M3 as E4M3",
    "_typing.py": "import jax",
    "numerics/__init__.py": "from jaxfp8.numerics._formats import E4M3 as E4M3",
    "numerics/_formats.py": "from jaxfp8._typing import Array",
    "numerics/_scale.py": "from jaxfp8.numerics import _formats\nfrom . import _formats",
    "kernels/__init__.py": "from jaxfp8.kernels.cast import cast as cast",
    "kernels/cast/__init__.py": "from jaxfp8.kernels.cast._api import cast as cast",
    "kernels/_dispatch.py": "class Backend: pass",
    "kernels/cast/_api.py": "from ...numerics._scale import scale_of\n"
    "B = Backend('jaxfp8.kernels.cast._mosaic', 'cast')",
    "kernels/cast/_mosaic.py": "from jax.experimental.pallas import mosaic_gpu\nimport jax_triton",
    "recipes/_recipe.py": "import jaxfp8.kernels.cast._api",
    "linen/__init__.py": "from jaxfp8.linen._layers import FP8Dense as FP8Dense",
    "linen/_layers.py": "from jaxfp8.recipes._recipe import Recipe",
}


def test_a_straight_house_has_no_faults():
    assert faults(STRAIGHT) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        pytest.param(
            "numerics/_amax.py", "from jaxfp8.linen._layers import x", "is above", id="upward"
        ),
        pytest.param(
            "numerics/_amax.py", "import jaxfp8.linen._layers", "is above", id="upward-plain-import"
        ),
        pytest.param(
            "numerics/_amax.py", "from ..linen._layers import x", "is above", id="upward-relative"
        ),
        pytest.param(
            "_version.py",
            "def f():\n  from jaxfp8.linen import _layers",
            "is above",
            id="upward-in-function",
        ),
        pytest.param(
            "comms/_gather.py",
            "from jaxfp8.recipes._recipe import x",
            "is a stranger",
            id="same-floor",
        ),
        pytest.param(
            "_version.py",
            "from jaxfp8._typing import Array",
            "is a stranger",
            id="same-floor-files",
        ),
        pytest.param(
            "linen/_state.py", "import jaxfp8 as fp8", "is a face", id="face-of-the-house"
        ),
        pytest.param(
            "linen/_state.py", "from jaxfp8 import E4M3", "is a face", id="name-from-the-house"
        ),
        pytest.param(
            "linen/_state.py", "from jaxfp8 import numerics", "is a face", id="face-as-module"
        ),
        pytest.param(
            "linen/_state.py", "from jaxfp8.numerics import E4M3", "is a face", id="face-of-a-room"
        ),
        pytest.param("linen/_state.py", "from . import FP8Dense", "is a face", id="own-face"),
        pytest.param(
            "optim/__init__.py",
            "from jaxfp8.numerics import E4M3",
            "is a face",
            id="face-of-a-face",
        ),
        pytest.param("_typing.py", "import jaxfp8.nothing", "does not exist", id="missing"),
        pytest.param(
            "numerics/_formats.py",
            "from jaxfp8.numerics._scale import x",
            "in a circle",
            id="circle",
        ),
        pytest.param(
            "kernels/cast/_tile.py",
            "Backend('jaxfp8.kernels.cast._gone', 'f')",
            "does not exist",
            id="backend",
        ),
        pytest.param(
            "kernels/cast/_tile.py",
            "Backend(name, 'f')",
            "does not exist",
            id="backend-without-a-name",
        ),
        pytest.param(
            "kernels/_tile.py",
            "Backend('jaxfp8.linen._layers', 'f')",
            "is above",
            id="backend-upward",
        ),
        pytest.param(
            "_typing.py", "from jax.experimental import pallas as pl", "is heavy", id="heavy"
        ),
        pytest.param(
            "numerics/_formats.py",
            "import jax.experimental.pallas.triton",
            "is heavy",
            id="heavy-plain",
        ),
        pytest.param(
            "linen/__init__.py",
            "from jax_triton import triton_call",
            "is heavy",
            id="heavy-in-a-face",
        ),
        pytest.param(
            "_typing.py",
            "def f():\n  import triton.language as tl",
            "is heavy",
            id="heavy-in-function",
        ),
        pytest.param("utils/_misc.py", "", "is on no floor", id="unknown-room"),
    ],
)
def test_a_crooked_house_is_found(path, source, complaint):
    (found,) = faults({**STRAIGHT, path: source})
    assert complaint in found
