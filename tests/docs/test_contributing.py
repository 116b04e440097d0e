"""CONTRIBUTING's diffs apply, touch few files, and what they add works."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from pages import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ADDITION = re.compile(r"### ([^\n]+)\n.*?```diff\n(.*?)```.*?```python\n(.*?)```", re.DOTALL)
ADDITIONS = ADDITION.findall(TEXT)

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diffs")


def test_there_are_three():
    assert [name for name, *_ in ADDITIONS] == [
        "An option of a recipe", "A kernel backend", "A quantizer with state",
    ]  # fmt: skip


@needs_git
def test_additions_together(tmp_path):
    """All three in one copy, and their examples in one process, as most of that is imports."""
    apply_and_run([diff for _, diff, _ in ADDITIONS], [code for *_, code in ADDITIONS], tmp_path)


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "diff", "example"), ADDITIONS, ids=[name for name, *_ in ADDITIONS]
)
def test_addition(name, diff, example, tmp_path):
    apply_and_run([diff], [example], tmp_path)


def apply_and_run(diffs, examples, tmp_path):
    shutil.copytree(ROOT / "jaxfp8", tmp_path / "jaxfp8")
    apply = ["git", "apply", "--unidiff-zero", "-"]
    # Outside of any repository, so that git reads paths from here.
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    for diff in diffs:
        assert len(re.findall(r"^\+\+\+ b/jaxfp8/", diff, re.MULTILINE)) <= 3
        applied = subprocess.run(
            apply, cwd=tmp_path, input=diff, text=True, capture_output=True, env=outside
        )
        assert applied.returncode == 0, applied.stderr
    env = outside | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    check = f"import jaxfp8\nassert jaxfp8.__file__.startswith({str(tmp_path)!r})\n"
    run = subprocess.run(
        [sys.executable, "-c", "\n".join([check, *(f"exec({code!r}, {{}})" for code in examples)])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=env,
    )
    assert run.returncode == 0, run.stderr
