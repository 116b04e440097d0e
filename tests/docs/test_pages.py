"""README.md and docs/ keep their word: code runs, links lead somewhere, commands exist."""

import ast
import inspect
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, PAGES, ROOT, fences, headings, marked, sides_of

import jaxfp8 as fp8

IDS = {"ids": lambda page: str(page.relative_to(ROOT))}
WITH_CODE = [page for page in DOCS if any(fences(page.read_text(), "python"))]
# Pages of many models, or of what other tests run. Eagerly each operation is a program.
LONG = {
    "coming-from",  # test_coming_from.py runs its diffs
    "convert",
    "diagnostics",
    "diverged",
    "experts",
    "fine-tuning",
    "gradient-release",
    "layers",
    "memory",
    "moe",
    "state",  # test_one_train_step.py runs two of its train steps
    "weights",
}
ROWS = [
    pytest.param(
        page,
        marks=pytest.mark.slow
        if page.stem in LONG
        else pytest.mark.quick
        if page == ROOT / "README.md"
        else (),
    )
    for page in WITH_CODE
]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED = re.compile(r"(?<![\w/.])(?:tests|examples|benchmarks|jaxfp8|notebooks|docs)/[\w/.-]*\w")
TAGS = {("python",), ("python", "no-run"), ("bash",), ("diff",), ("text",), ("yaml",)}


@pytest.mark.usefixtures("standard_promotion")  # what its readers have
@pytest.mark.parametrize("page", ROWS, **IDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """One fence after another, in one namespace. `<!-- printed -->` marks what the last printed."""
    monkeypatch.chdir(tmp_path)  # what it writes, it writes here
    namespace = {"__name__": "__main__"}
    for fence in fences(page.read_text()):
        if fence.mark == "printed":
            assert capsys.readouterr().out == fence.code
        if fence.tags != ("python",):
            continue
        capsys.readouterr()
        # The empty lines give a traceback the line numbers of the page.
        exec(compile("\n" * fence.above + fence.code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", WITH_CODE, **IDS)
def test_what_does_not_run_compiles(page):
    for fence in fences(page.read_text(), "python", "no-run"):
        compile(fence.code, str(page), "exec")


@pytest.mark.parametrize("page", WITH_CODE, **IDS)
def test_names_and_arguments_exist(page):
    """Each name of jaxfp8 in the code of a page, and the arguments that the page gives to it."""
    found, text = {}, page.read_text()
    for fence in (*fences(text, "python"), *fences(text, "python", "no-run")):
        for name, call in uses(ast.parse(fence.code), found):
            target = eval(name, found)
            if call is not None and (signature := signature_of(target)) is not None:
                try:
                    signature.bind(*call.args, **{each.arg: each for each in call.keywords})
                except TypeError as error:
                    pytest.fail(f"{page.name} calls {ast.unparse(call)}: {error}")


def uses(tree, found):
    """Dotted names of jaxfp8, and their calls without stars. Adds the imports to `found`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and "jaxfp8" in ast.unparse(node):
            exec(ast.unparse(node), found)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name) and name.split(".")[0] in found:
                yield name, None
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            stars = [each for each in node.args if isinstance(each, ast.Starred)]
            stars += [each for each in node.keywords if each.arg is None]
            if re.fullmatch(r"[\w.]+", name) and name.split(".")[0] in found and not stars:
                yield name, node


def signature_of(target):
    """None for classes of C and others that have no signature."""
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def test_pages_have_code():
    assert len(WITH_CODE) > 8
    assert {page.stem for page in WITH_CODE} > LONG
    assert {fence.tags for page in DOCS for fence in fences(page.read_text())} == TAGS


@pytest.mark.parametrize("page", PAGES, **IDS)
def test_links_lead_somewhere(page):
    """Files and sections that a page links, and files that it names."""
    for target, anchor in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links {target}, which does not exist"
        assert not anchor or anchor in headings(path.read_text()), (
            f"{page.name} links section {anchor!r} of {path.name}, which has none"
        )
    if page.name != "CHANGELOG.md":  # it may name what is gone, and a diff what is new
        text = page.read_text()
        for fence in fences(text, "diff"):
            text = text.replace(fence.code, "")
        for named in NAMED.findall(text):
            beside = page.parent / named
            written = named.endswith(".json")  # by the command that names it
            assert written or (ROOT / named).exists() or beside.exists(), (
                f"{page.name} names {named}, which does not exist"
            )


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def commands():
    """Each command of a page, also between backticks."""
    for page in DOCS:
        yield from re.findall(r"`(python [^`]+)`", page.read_text())
        for fence in fences(page.read_text()):
            if fence.tags == ("yaml",):
                yield re.search(r'"(python [^"]*)"', fence.code)[1].replace("\n", " ")
            elif fence.tags == ("bash",):
                yield from fence.code.replace("\\\n", " ").splitlines()


def sources(script):
    """The text of a script, and of the modules beside it that it imports."""
    text = script.read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    beside = (script.parent / f"{name}.py" for name in names)
    return "".join([text, *(sources(module) for module in beside if module.exists())])


def test_commands_exist():
    """Each script is there, and it or what it imports beside it knows each option."""
    found = 0
    for command in commands():
        words = shlex.split(command.rstrip("& "), comments=True)
        scripts = [word for word in words if word.endswith(".py")]
        for script in scripts:
            path = ROOT / script
            assert path.exists(), command
            known = sources(path)
            for option in (word for word in words if word.startswith("--")):
                assert f'"{option}"' in known, f"{script} has no {option}"
            found += 1
    assert found >= 6


@pytest.mark.quick
@pytest.mark.usefixtures("standard_promotion")
def test_the_diff():
    """Three lines change. Both sides run, the second one in FP8 and with kernels of an H200."""
    diff = marked("the diff")
    assert [line[0] for line in diff.splitlines()].count("+") == 3
    losses = []
    for code in sides_of(diff):
        namespace = {}
        exec(code, namespace)
        x = np.random.default_rng(0).normal(size=(128, 256)).astype(np.float32)
        params = jax.jit(namespace["layer"].init)(jax.random.key(1), x)
        loss, grads = namespace["step"](params, x)
        assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
        losses.append(float(loss))
    before, after = losses
    assert before != after
    assert after == pytest.approx(before, rel=0.01)
    assert namespace["layer"].kernels == namespace["kernels"] == fp8.Kernels("h200")


def test_the_choices():
    printed = marked("the choices")
    recipe, kernels = fp8.recipes.blockwise(), fp8.Kernels("h200")
    choices = str(kernels.choices(recipe, (8192, 4096, 4096)))
    if jax.__version_info__ >= (0, 11):
        assert printed == f"{choices}\n"
    else:  # XLA's kernels, with the reason once
        assert choices.splitlines()[:2] == printed.splitlines()[:2]
        assert choices.count("mosaic cannot: ") == 1
        assert choices.count(" [1]") == 6


def test_sides_of_a_diff():
    assert sides_of(" a\n-b\n+c\n \n-d\n") == ("a\nb\n\nd\n", "a\nc\n\n")


def test_fences():
    text = (
        "a\n```python\nx = 1\n```\n```bash\nls\n```\n"
        "<!-- two -->\n```python no-run\nx = 2\n```\n```python\ny = x\n```\n"
    )
    assert [(f.above, f.code) for f in fences(text, "python")] == [(2, "x = 1\n"), (12, "y = x\n")]
    assert [f.mark for f in fences(text)] == [None, None, "two", None]


def test_headings():
    assert headings("# A `b`: C-d\n```\n# no\n```\n## e?\n") == {"a-b-c-d", "e"}
