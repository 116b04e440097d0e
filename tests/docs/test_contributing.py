"""CONTRIBUTING's diff applies, touches few files, and what it adds works."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from pages import ROOT

ADDITION = re.compile(r"```diff\n(.*?)```.*?```python\n(.*?)```", re.DOTALL)


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diff")
def test_addition(tmp_path):
    ((diff, example),) = ADDITION.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(re.findall(r"^\+\+\+ b/jaxfp8/", diff, re.MULTILINE)) <= 3
    shutil.copytree(ROOT / "jaxfp8", tmp_path / "jaxfp8")
    # Outside of any repository, so that git reads paths from here.
    env = os.environ | {
        "GIT_CEILING_DIRECTORIES": str(tmp_path.parent),
        "PYTHONPATH": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    run = lambda command, text: subprocess.run(
        command, cwd=tmp_path, input=text, text=True, capture_output=True, env=env
    )
    applied = run(["git", "apply", "--unidiff-zero", "-"], diff)
    assert applied.returncode == 0, applied.stderr
    check = f"import jaxfp8\nassert jaxfp8.__file__.startswith({str(tmp_path)!r})\n"
    added = run([sys.executable, "-"], check + example)
    assert added.returncode == 0, added.stderr
