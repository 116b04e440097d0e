"""README.md keeps its word: its ```python fences run, one after another, in one namespace.

Both sides of its diff run, and the table that it prints is the one that is printed.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8

README = Path(__file__).parent.parent / "README.md"
# Any fence, so that the end of one is never taken for the start of another.
FENCE = re.compile(r"^```(?P<tag>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def python_fences(text: str) -> Iterator[tuple[int, str]]:
    """Yields (lines above the code, code) of each fence tagged `python` and not `no-run`."""
    for fence in FENCE.finditer(text):
        tags = fence["tag"].split()
        if "python" in tags and "no-run" not in tags:
            yield text.count("\n", 0, fence.start("code")), fence["code"]


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
@pytest.mark.usefixtures("standard_promotion")  # what its readers have
def test_readme(tmp_path, monkeypatch):
    fences = list(python_fences(README.read_text()))
    assert fences, "README.md shows no Python"
    monkeypatch.chdir(tmp_path)  # what it writes, it writes here
    namespace = {"__name__": "__main__"}
    for above, code in fences:
        # The empty lines give a traceback the line numbers of README.md.
        exec(compile("\n" * above + code, str(README), "exec"), namespace)


def fence_after(mark: str) -> str:
    return FENCE.search(README.read_text().split(f"<!-- {mark} -->")[1])["code"]


def sides_of(diff: str) -> tuple[str, str]:
    """The code before and after a diff."""
    before, after = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != other)
        for other in "+-"
    )
    return before, after


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
@pytest.mark.usefixtures("standard_promotion")
def test_the_diff():
    """Three lines change. Both sides run, the second one in FP8 and with kernels of an H200."""
    diff = fence_after("the diff")
    assert [line[0] for line in diff.splitlines()].count("+") == 3
    losses = []
    for code in sides_of(diff):
        namespace = {}
        exec(code, namespace)
        x = jax.random.normal(jax.random.key(0), (128, 256))
        params = namespace["layer"].init(jax.random.key(1), x)
        loss, grads = namespace["step"](params, x)
        assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
        losses.append(float(loss))
    before, after = losses
    assert before != after
    assert after == pytest.approx(before, rel=0.01)
    assert namespace["layer"].kernels == namespace["kernels"] == fp8.Kernels("h200")


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
def test_the_choices():
    printed = fence_after("the choices")
    recipe, kernels = fp8.recipes.blockwise(), fp8.Kernels("h200")
    choices = str(kernels.choices(recipe, (8192, 4096, 4096)))
    if jax.__version_info__ >= (0, 11):
        assert printed == f"{choices}\n"
    else:  # XLA's kernels, with the reason
        assert choices.splitlines()[:2] == printed.splitlines()[:2]
        assert choices.count("; mosaic cannot: ") == 6


def test_sides_of_a_diff():
    assert sides_of(" a\n-b\n+c\n \n-d\n") == ("a\nb\n\nd\n", "a\nc\n\n")


def test_only_python_fences_run():
    text = (
        "a\n```python\nx = 1\n```\n```bash\nls\n```\n"
        "```python no-run\nx = 2\n```\n```python\ny = x\n```\n"
    )
    assert list(python_fences(text)) == [(2, "x = 1\n"), (11, "y = x\n")]
