"""`python benchmarks` has a line for each script, and README a section for each folder."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


def test_every_script_has_a_line():
    done = subprocess.run(
        [sys.executable, "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    texts = {path: path.read_text() for path in FOLDER.glob("*/*.py")}
    paths = {*texts, FOLDER / "tpu.py"}
    scripts = {path for path in paths if 'if __name__ == "__main__":' in path.read_text()}
    assert {ROOT / path for path in lines} == scripts
    assert lines["benchmarks/gpu/autotune.py"].endswith("[needs a GPU; with `--dry-run` nothing]")
    rows = re.findall(r"^\| \[`(\w+)/`\]", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted({path.parent.name for path in texts})


def test_nothing_is_imported(tmp_path):
    spec = importlib.util.spec_from_file_location("the_list", FOLDER / "__main__.py")
    the_list = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(the_list)
    (tmp_path / "rooms").mkdir()
    (tmp_path / "rooms" / "_part.py").write_text('"""A part."""\nraise ImportError\n')
    (tmp_path / "rooms" / "script.py").write_text(
        '"""A question?\n\nNeeds: torch.\n"""\nraise ImportError\nif __name__ == "__main__": main()'
    )
    expected = [(f"{tmp_path.name}/rooms/script.py", "A question? [needs torch]")]
    assert [*the_list.scripts(tmp_path)] == expected
