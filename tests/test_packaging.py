"""What pyproject.toml promises.

Requirements are imported, imports are required, and README stands on a package index.
"""

import ast
import functools
import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import headings

import jaxfp8 as fp8

ROOT = Path(__file__).parent.parent
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIGURATION["project"]
HATCH = CONFIGURATION["tool"]["hatch"]
REQUIREMENTS = {"dependencies": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}

# Where what is required has to be imported.
FOLDERS = {
    "dependencies": "jaxfp8",
    "triton": "jaxfp8",
    "examples": "examples",
    "notebooks": "notebooks",
    "test": "tests",
    "plugs": "tests/plugs",
    "silicon": "tests/silicon",
    "loaders": "tests/loaders",
}
# Modules whose name is not that of their package.
MODULES = {
    "absl-py": "absl",
    "compressed-tensors": "compressed_tensors",
    "jax-triton": "jax_triton",
    "orbax-checkpoint": "orbax",
    "pytest-xdist": "xdist",
}
# Required, and imported by others than the folder that requires it.
PLUGINS = {
    ("notebooks", "ipykernel"): "nbclient starts it by name: it runs the cells",
    ("test", "flatbuffers"): "jax.export imports it to write and read files",
    ("test", "absl-py"): (
        "flax's tests import it (tests/guests), and jax 0.10 does in Mosaic, undeclared"
    ),
    ("loaders", "accelerate"): "transformers needs it to load a file with quantization",
}
# What a folder may import besides the dependencies.
EXTRAS = {
    "jaxfp8": ("triton",),  # behind `Backend`s: tests/test_floors.py
    "examples": ("examples",),
    "notebooks": ("notebooks",),
    # Without the last ones, tests of them are skipped.
    "tests": ("test", "examples", "triton", "plugs", "silicon", "loaders"),
}

# Other libraries that a folder compares us with, or plugs us into, where they are installed. No
# extra installs them.
# They are in docs/test_coming_from.py and in plugs/.
RIVALS = {"tests": {"qwix", "axlearn", "gemma", "haliax", "levanter"}}


def sources(folder: str) -> Iterator[str]:
    """Yields the source of each file, and of each cell of a notebook."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.read_text()
    for path in sorted((ROOT / folder).rglob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@functools.cache
def imported(folder: str) -> set[str]:
    """The modules on top of what a folder imports, also inside functions, and by `importorskip`."""
    found = set()
    for source in sources(folder):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
                found.add(node.args[0].value)
    return {name.split(".")[0] for name in found}


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def module_of(name: str) -> str:
    return MODULES.get(name, name)


def names(*extras: str) -> set[str]:
    return {name_of(requirement) for extra in extras for requirement in REQUIREMENTS[extra]}


def of_the_checkout() -> set[str]:
    """Files and folders that scripts find beside them: modules that nobody has to install."""
    folders = ("tests", "benchmarks", "examples", "notebooks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return {"jaxfp8"} | {path.stem for path in paths if path.suffix == ".py" or path.is_dir()}


@pytest.mark.parametrize(("extra", "folder"), FOLDERS.items())
def test_what_is_required_is_imported(extra, folder):
    modules = imported(folder)
    plugins = {name for of, name in PLUGINS if of == extra}
    unused = {name for name in names(extra) if module_of(name) not in modules}
    assert unused == plugins, (
        f"{extra} of pyproject.toml: {sorted(unused - plugins)} is imported nowhere in {folder}/, "
        f"drop it; {sorted(plugins - unused)} is no plugin, drop it from PLUGINS"
    )


@pytest.mark.parametrize("folder", EXTRAS)
def test_what_is_imported_is_required(folder):
    required = {module_of(name) for name in names("dependencies", *EXTRAS[folder])}
    required |= sys.stdlib_module_names | of_the_checkout()
    rivals = RIVALS.get(folder, set())
    assert rivals <= imported(folder) - required, "a rival that is no rival; drop it from RIVALS"
    missing = imported(folder) - required - rivals
    assert not missing, f"{folder}/ imports {sorted(missing)}; pyproject.toml does not require it"


def test_extras_have_a_folder():
    tools = {"cuda12", "cuda13", "tpu", "export", "dev"}  # what jax imports, and commands
    assert {*PROJECT["optional-dependencies"]} - tools == {*FOLDERS} - {"dependencies"}


def test_version():
    assert fp8.__version__ == importlib.metadata.version("jaxfp8")
    assert (ROOT / HATCH["version"]["path"]).read_text().count(
        f'__version__ = "{fp8.__version__}"'
    ) == 1


def test_types_are_for_users_too():
    assert (ROOT / "jaxfp8" / "py.typed").exists()
    assert HATCH["build"]["targets"]["wheel"]["packages"] == ["jaxfp8"]


# By train_gpt.py, conftest.py, nox, and whoever imports noxfile.py. Git ignores them.
MADE = {"runs", ".jax_cache", ".nox", "__pycache__"}
MADE |= {"gpu_day", "gpu_day_dry_run", "gpu_day_compile_only"}  # python -m benchmarks.gpu.day


def test_the_sdist_holds_what_its_tests_read():
    inside = {*HATCH["build"]["targets"]["sdist"]["only-include"], "pyproject.toml", "LICENSE"}
    assert all((ROOT / name).exists() for name in inside)
    here = {path.name for path in ROOT.iterdir()} - MADE
    nodes = (node for source in sources("tests") for node in ast.walk(ast.parse(source)))
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {text.split("/")[0] for text in texts} & here
    assert {"examples", "benchmarks"} <= named
    assert named <= inside, (
        f"tests name {sorted(named - inside)}; pyproject.toml leaves it out of the sdist"
    )


README = (ROOT / "README.md").read_text()
REPOSITORY = PROJECT["urls"]["Repository"]
FILES = f"{REPOSITORY}/blob/main/"
PICTURES = FILES.replace("//github.com", "//raw.githubusercontent.com").replace("/blob/", "/")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"(!?)\[[^\]]*\]\(\s*<?([^)>\s]+)|(<img)[^>]*?src=[\"']([^\"']+)|^\[[^\]]+\]:\s*(\S+)",
    re.MULTILINE,
)


def on_the_index(text: str) -> str:
    """What hatch-fancy-pypi-readme makes of README.md: its substitutions, in their order."""
    for substitution in HATCH["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    return text


def links(text: str) -> list[tuple[bool, str]]:
    """(whether it is a picture, its target) of each link."""
    found = LINK.findall(CODE.sub("", text))
    return [
        (bool(mark or image), target or source or reference)
        for mark, target, image, source, reference in found
    ]


def test_readme_links_lead_somewhere_on_an_index():
    found = links(on_the_index(README))
    assert len(found) == len(links(README)) > 2
    for is_picture, target in found:
        assert re.match(r"https?://|mailto:", target), f"{target} is relative"
        here = PICTURES if is_picture else FILES
        if target.startswith(here):
            path = target.removeprefix(here).partition("#")[0]
            assert (ROOT / path).exists(), f"README.md links {path}, which does not exist"
        elif target.startswith(f"{REPOSITORY}#"):
            assert target.partition("#")[2] in headings(README), (
                f"README.md has no section {target.partition('#')[2]!r}"
            )


def test_readme_s_code_stays_on_an_index():
    assert CODE.findall(on_the_index(README)) == CODE.findall(README)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("[a](docs/a.md)", f"[a]({FILES}docs/a.md)"),
        ("[a](docs/a.md#part)", f"[a]({FILES}docs/a.md#part)"),
        ("[a](#part)", f"[a]({REPOSITORY}#part)"),
        ("![a](a.png)", f"![a]({PICTURES}a.png)"),
        ("![](a.png) [b](b)", f"![]({PICTURES}a.png) [b]({FILES}b)"),
        ("[![a](a.png)](b.md)", f"[![a]({PICTURES}a.png)]({FILES}b.md)"),
        ("[a](https://b.org/c.md)", "[a](https://b.org/c.md)"),
        ("![a](https://b.org/c.png)", "![a](https://b.org/c.png)"),
        ("[a](mailto:a@b.org)", "[a](mailto:a@b.org)"),
    ],
)
def test_links_on_an_index(given, wanted):
    assert on_the_index(given) == wanted
