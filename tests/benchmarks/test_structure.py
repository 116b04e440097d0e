"""The counter of the structure counts right, in a tiny package and in jaxfp8."""

import functools
import importlib
import inspect
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxfp8 as fp8
from jaxfp8.numerics import saturating_cast

FOLDER = Path(__file__).parents[2] / "benchmarks" / "structure"
ROOT = Path(fp8.__file__).parent

TINY = {
    "__init__.py": "from tiny import linen as linen\nfrom tiny._door import door as door\n",
    "_inner.py": '''"""A file."""
import dataclasses  # twice one name

LONE = """not
a docstring"""
"""Of LONE,
in two lines."""

def shared():
    """Of shared."""

class _Hidden:
    """Of _Hidden."""
    def public(self):
        """Of _Hidden, too."""

class Called:
    """Of Called."""
    def _private(self):
        """Of Called, too."""

def passed(): pass
''',
    "_user.py": """
from tiny import _inner
from tiny._inner import shared
from tiny.linen import _base as base
Backend("tiny._inner", "Called"), base.Base
room = _inner
room.passed()
""",
    "_door.py": """
from typing import overload
from tiny.numerics._far import far  # comes back

@overload
def door(a, /, b, *rest, c, d, e): ...

def door(a, /, b, *rest, c=1, **more):
    def nested(x, y=2): return [far(each) for each in (x, y)]
    near(0)
    near(0)
    return nested(a)

def near(x): return (lambda: x)()
""",
    "linen/__init__.py": "from tiny.linen._layer import Layer as Layer\n",
    "linen/_base.py": "class Base:\n    def inherited(self, a, b): pass\n",
    "linen/_layer.py": """
from tiny.linen._base import Base
from tiny._door import door

class Layer(Base):
    def __call__(self, x):
        "Of a face."
        return door(x, 1)
    def _own(self):
        "Of a face, but private."
    @staticmethod
    def static(a, b, c): pass
    @classmethod
    def using(cls, a): pass
    def _private(self): pass
""",
    "numerics/__init__.py": "",
    "numerics/_far.py": "def far(x): pass\nlarge = 1\n",
}


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    for path, text in TINY.items():
        (tmp_path / "tiny" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tiny" / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "tiny"
    for name in [name for name in sys.modules if name.partition(".")[0] == "tiny"]:
        del sys.modules[name]


def test_parameters(tiny):
    import _source as counter

    rows = [*counter.functions(counter.read(tiny))]
    assert {row["function"]: row["parameters"] for row in rows} == {
        "door": 3, "door.nested": 2, "near": 1, "far": 1, "Base.inherited": 2, "shared": 0,
        "_Hidden.public": 0, "Called._private": 0, "passed": 0,
        "Layer.__call__": 1, "Layer._own": 0, "Layer.static": 3, "Layer.using": 1,
        "Layer._private": 0,
    }  # fmt: skip
    assert len(rows) == 14
    assert {row["function"]: row["line"] for row in rows}["door.nested"] == 9


def test_doors(tiny):
    import _doors as counter
    from _source import read

    assert counter.doors(read(tiny)) == {
        ("tiny/_door.py", "door"),
        ("tiny/linen/_base.py", "Base.inherited"),
        ("tiny/linen/_layer.py", "Layer.__call__"),
        ("tiny/linen/_layer.py", "Layer.static"),
        ("tiny/linen/_layer.py", "Layer.using"),
    }


def test_lines(tiny):
    import _source as counter

    size = counter.lengths(counter.read(tiny))
    assert (size["files"], size["files without faces"]) == (9, 6)
    assert (size["longest"], size["longest_file"]) == (22, "tiny/_inner.py")
    text = "".join(path.read_text() for path in tiny.rglob("*.py"))
    assert size["lines"] == len(text.splitlines())
    assert size["median"] == 10.5  # of 22, 14, 14, 7, 2 and 2
    assert size["docstrings"] == 1 + 2 + 1 + 2 + 2 + 2
    assert size["comments"] == 2
    assert size["imports"] == 2 + 1 + 1 + 3 + 1 + 1 + 2
    blank = sum(not line.strip() for line in text.splitlines())
    assert size["code"] == size["lines"] - blank - size["docstrings"]
    assert size["share of imports"] == round(100 * size["imports"] / size["code"], 1)
    assert size["classes"] == 4
    with pytest.raises(ValueError, match=r"has no __init__\.py; pass the folder of a package"):
        counter.read(tiny.parent)


def test_private_imports(tiny):
    import _source as counter

    (tiny / "_user.py").write_text(
        "from __future__ import annotations\nimport jax._src.core, jax.numpy\n"
        "from jaxlib import _jax, xla_client\nfrom tiny._inner import _Hidden\n"
        "from . import _inner\n"
    )
    assert counter.private_imports(counter.read(tiny)) == ["jax._src.core", "jaxlib._jax"]


def test_names(tiny):
    import _names as counter
    from _source import read

    assert counter.inner_names(read(tiny)) == {
        ("_door.py", "near"): set(),
        ("_inner.py", "LONE"): set(),
        ("_inner.py", "shared"): {"_user.py"},
        ("_inner.py", "Called"): {"_user.py"},
        ("_inner.py", "passed"): {"_user.py"},
        ("_user.py", "room"): set(),
        ("linen/_base.py", "Base"): {"_user.py", "linen/_layer.py"},
        ("numerics/_far.py", "far"): {"_door.py"},
        ("numerics/_far.py", "large"): set(),
    }
    assert counter.docstring_lines(read(tiny)) == {
        "files": 1, "public names": 1, "inner names": 2 + 1 + 2, "_private names": 2 + 1,
    }  # fmt: skip


def test_calls_and_moves(tiny):
    import _trace as counter

    layer = importlib.import_module("tiny.linen._layer").Layer()
    before = sys.getprofile()
    calls = counter.record(tiny, lambda: layer(1), outside=("dumps",))
    # __call__ | door, near, near, nested | far, far: neither the lambda nor the comprehension.
    names = " ".join(call.stack[-1][1] for call in calls)
    assert names == "__call__ door near near nested far far"
    assert counter.traffic(calls) == {"calls": 7, "files": 3, "moves": 2}
    assert sys.getprofile() is before

    def to_far(call):
        return call.stack[-1][1] == "far"

    assert counter.frames(calls, "linen", to_far, "far") == [4]
    with pytest.raises(LookupError, match="no call of far was seen below a `__call__` in nnx/"):
        counter.frames(calls, "nnx", to_far, "far")


def test_calls_outside(tiny):
    import _trace as counter

    door = importlib.import_module("tiny._door")
    door.far = lambda each: None
    calls = counter.record(tiny, lambda: (json.dumps(1), door.door(1, 2)), outside=("dumps",))
    assert [call.outside for call in calls if call.outside] == ["dumps"]
    assert counter.traffic(calls) == {"calls": 4, "files": 1, "moves": 0}


def codes(code: types.CodeType):
    """All functions of a file that Python compiled, lambdas and comprehensions left out."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            if each.co_flags & inspect.CO_OPTIMIZED and not each.co_name.startswith("<"):
                yield each
            yield from codes(each)


@functools.cache
def source_of_jaxfp8():
    from _source import read

    return read(ROOT)


def test_parameters_of_jaxfp8():
    """Python's compiler is the oracle."""
    import _source as counter

    source = source_of_jaxfp8()
    ours = {(row["file"], row["function"], row["parameters"]) for row in counter.functions(source)}
    oracle = set()
    for path in source.trees:
        for code in codes(compile((ROOT / path).read_text(), path, "exec")):
            taken = code.co_varnames[: code.co_argcount]
            count = len(taken) + code.co_kwonlyargcount - (taken[:1] in (("self",), ("cls",)))
            oracle.add((f"jaxfp8/{path}", code.co_qualname.replace(".<locals>", ""), count))
    assert len(ours) > 500
    assert ours <= oracle
    left_out = {(file, name) for file, name, _ in oracle - ours}
    file = Path(inspect.getsourcefile(fp8.quantize)).relative_to(ROOT.parent)
    overloads = {(file.as_posix(), "quantize")}
    device_code = {each for each in left_out if each[0].endswith("/_triton_kernels.py")}
    assert left_out <= overloads | device_code
    assert len(device_code) == 5 + 13  # the functions of both kernels that Triton compiles


def test_doors_of_jaxfp8():
    """The imported face is the oracle."""
    from _doors import doors

    found = doors(source_of_jaxfp8())
    for face in (fp8, fp8.linen, fp8.nnx, fp8.recipes, fp8.sharding, fp8.comms):
        for name, thing in vars(face).items():
            if inspect.isfunction(thing) and name != "__dir__":
                file = Path(inspect.getsourcefile(inspect.unwrap(thing))).relative_to(ROOT.parent)
                assert (file.as_posix(), name) in found
    assert {name for _, name in found} >= {"FP8Dense.__call__", "FP8Linear.__init__", "dot_general"}
    of_quantizers = {name for file, name in found if file.startswith("jaxfp8/quantizers")}
    assert of_quantizers == {"register_quantizer_serialization"}


def test_names_of_jaxfp8():
    """Each name on a face has its docstring there. Docstrings are counted twice."""
    import _names as counter
    from _source import lengths

    source = source_of_jaxfp8()
    inner = counter.inner_names(source)
    for face in (fp8, fp8.linen, fp8.nnx, fp8.recipes, fp8.optim):
        for name, thing in vars(face).items():
            if inspect.isclass(thing) or inspect.isfunction(thing):
                file = inspect.getsourcefile(inspect.unwrap(thing))
                assert (Path(file).relative_to(ROOT).as_posix(), name) not in inner
    assert sum(counter.docstring_lines(source).values()) == lengths(source)["docstrings"]
    assert sum(map(bool, inner.values())) > len(inner) / 2


def test_way_of_lhs():
    from _walk import climbs, way_of_lhs

    way = way_of_lhs(ROOT, fp8.recipes.current())
    ends = (inspect.getsourcefile(inspect.unwrap(f)) for f in (fp8.dot_general, saturating_cast))
    assert [ROOT / way[0], ROOT / way[-1]] == [*map(Path, ends)]
    assert all(file != after for file, after in itertools.pairwise(way))
    assert climbs(way) == len(way) - len({*way}) > 0


def run(*words):
    names = {"XLA_FLAGS", "JAX_PLATFORMS"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = str(ROOT.parent)
    command = [sys.executable, FOLDER / "structure.py", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_table_without_older_figures():
    from structure import table

    assert [line.split() for line in table({"a: b": 2, "c": 3.5}).splitlines()] == [
        ["a:", "b", "2"], ["c", "3.5"]
    ]  # fmt: skip


@pytest.mark.slow  # traces fifteen train steps
def test_writes_and_compares(tmp_path):
    path, before = tmp_path / "now.json", FOLDER / "results" / "before_mechanisms.json"
    finished = run("--json", path, "--compare", before)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert str(ROOT.parent) not in path.read_text()
    figures = result["figures"]
    for recipe in ("current", "delayed", "blockwise", "mxfp8", "rowwise"):
        assert figures[f"{recipe}: calls"] > figures[f"{recipe}: moves"] > 0
        assert figures[f"{recipe}: frames to the matmul backend"] > 1
        assert figures[f"{recipe}: frames to the cast"] > 1
    kept = json.loads(before.read_text())["figures"]
    assert {*kept} == {*figures}  # or nothing can be compared with it
    for name, now in figures.items():
        (line,) = [each for each in finished.stdout.splitlines() if each.startswith(f"{name:55} ")]
        ratio = f"{now / kept[name]:.2f}" if kept[name] else "-"
        assert line.split()[-3:] == [str(kept[name]), str(now), ratio]


@pytest.mark.slow
def test_another_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[]")
    refused = run("--compare", path)
    assert refused.returncode == 2
    assert "it has no figures and versions; give a file that --json wrote" in refused.stderr
