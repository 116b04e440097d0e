"""docs/words.py counts what a reader reads, and fails above its bounds."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SCRIPT = Path(__file__).parent.parent / "docs" / "words.py"
SPEC = importlib.util.spec_from_file_location("words_of_docs", SCRIPT)
words = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(words)

LONG = "This sentence has " + "very " * 50 + "many words."


def found(name, text):
    """(kind, line, words, sentence) of each sentence of a file."""
    path = Path(name)
    return [
        (kind, line, count, sentence)
        for kind, lines in words.texts_of(path, dedent(text))
        for count, _, line, sentence in words.sentences(path, lines)
    ]


def texts(name, text):
    return [sentence for *_, sentence in found(name, text)]


def counts(text):
    return [count for _, _, count, _ in found("page.md", text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "three ends": ("One two three. One two three four? Go go go!", [3, 4, 3]),
        "wrapped lines are one sentence": ("one two\nthree four\nfive.", [5]),
        "brackets, quotes": ('One two three.) "Four five six." Seven eight nine.', [3] * 3),
        "emphasis": ("One two *three.* Four five _six._ Go **go go.** One two three.", [3] * 4),
        "a number is no end": ("It is 0.5 of 3.25 in all.", [7]),
        "e.g.": ("Some values, e.g. zeros, i.e. nothing, cf. Smith et al. and others.", [12]),
        "etc.": ("Layers, ops, etc. are tested.", [5]),
        "an ellipsis": ("Write a, b, ... and so on.", [6]),
        "an abbreviation may close a text": ("Layers, ops, etc.", [3]),
        "a small letter may begin a sentence": ("One two three. x and g differ.", [3, 4]),
        "a semicolon and a colon are no end": ("One two; three four: five six.", [6]),
        "no full stop": ("one two three\n\nfour five six", [3, 3]),
        "one or two words are no sentence": ("No state. Unset scales.", []),
        "signs are no words": ("one - two = three @ four", [4]),
    }.values(),
)
def test_sentences(text, expected):
    assert counts(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "inline code": ("Write `fp8.dot(x, w, recipe=recipe)` in a layer.", [5]),
        "code that holds a full stop": ("Run `pytest . -n 0` and `a. b.` too.", [5]),
        "code over two lines": ("Write `fp8.dot(x,\nw)` in a layer.", [5]),
        "two backticks": ("Write ``a `b` c`` in a layer.", [5]),
        "a lone backtick hides nothing": ("One ` two three. Four five six.", [3, 3]),
        "a formula": ("The scale is $1 / m + 2$ of it.", [6]),
        "a formula of its own": ("One two three:\n\n$$a + b + c + d\n= e$$\n\nOne two.", [3]),
        "a link": ("See [the list of files](docs/a b.md) for more.", [7]),
        "tags": ("About 2<sup>13</sup> values <br> are lost.", [5]),
    }.values(),
)
def test_code_formulas_and_links(text, expected):
    assert counts(text) == expected


@pytest.mark.parametrize(
    "left_out",
    {
        "fence": "```python\nx = one + two + three + four\n```",
        "fence in a list": "   ```sh\n   run one two three\n   ```",
        "tildes": "~~~~\none two three\n~~~\nfour five six\n~~~~",
        "table": "| one two three | four |\n|---|---|\n| five six seven | eight |",
        "table in a list": "  | one two three | four |",
        "heading": "## One two three four",
        "underlined heading": "One two three four\n=====",
        "another underlined heading": "One two three four\n---",
        "comment": "<!-- one two three\nfour five -->",
        "address": "[the page]: https://example.org/page",
    }.values(),
)
def test_left_out_of_markdown(left_out):
    page = f"Before it are five words.\n\n{left_out}\n\nAfter it are five words."
    last = page.count("\n") + 1
    assert [one[1:3] for one in found("page.md", page)] == [(1, 5), (last, 5)]


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "a line that begins with a bar": ("|x| divided by the scale is one.", 7),
        "a word and a colon": ("scale: the number that multiplies it.", 6),
        "a title of one word": ("**Unset.** It has no scale at all.", 6),
        "a bold sentence": ("**It has no scale.**", 4),
        "a quotation": ("> Title:\n>\n> It has no scale at all now.", 7),
        "a rule above": ("---\nIt has no scale at all now.", 7),
    }.values(),
)
def test_kept_of_markdown(text, expected):
    assert counts(text) == [expected]


def test_a_line_that_begins_with_a_word_and_a_colon_does_not_end_a_sentence():
    for text in ("The field is the\nscale: it multiplies.", "Note that this\nReturns:\nnothing."):
        assert len(texts("page.md", text)) == 1
        assert len(texts("file.py", "".join(f"# {line}\n" for line in text.splitlines()))) == 1


def test_lists():
    text = """
        Four things are checked:

        - the whole tree;
        - shapes, which need
          no values:
          1. the first one
          2) the second one
        * **values.** They are read last.
        """
    assert texts("page.md", text) == [
        "Four things are checked:",
        "the whole tree;",
        "shapes, which need no values:",
        "the first one",
        "the second one",
        "They are read last.",
    ]


DOCSTRINGS = '''
"""Module, in three words.

    python script.py --with --many --words

Prose below the command is kept.
"""

NUMBER = 3
"""An attribute has a docstring."""


def function(x, y):
    """One summary of
    two lines: it ends here.

    word: a line of prose may begin like this
        and go on like that.

    tile    a definition is a sentence. Its second one is too.
    name       product     R x C of it
    large     128 x 128   64 x 128 of it

    Args:
      x: the first argument, whose text
        goes on in: another line.

        This paragraph is about x, too.
      y (int): the second argument. It is
        optional: none is fine.
      **options: all that are left.

    Returns:
      A pair (a, b) of
      both: it is one sentence.

    Raises:
      ValueError: for a bad x.

    Example:
      >>> function(1, 2)  # one two three. Four five six.
      'one two three four'
    """
'''


def test_docstrings():
    sentences = found("file.py", DOCSTRINGS)
    assert {kind for kind, *_ in sentences} == {"docstrings"}
    assert [(line, text) for _, line, _, text in sentences] == [
        (2, "Module, in three words."),
        (6, "Prose below the command is kept."),
        (10, "An attribute has a docstring."),
        (14, "One summary of two lines: it ends here."),
        (17, "word: a line of prose may begin like this and go on like that."),
        (20, "tile    a definition is a sentence."),
        (20, "Its second one is too."),
        (25, "the first argument, whose text goes on in: another line."),
        (28, "This paragraph is about x, too."),
        (29, "the second argument."),
        (29, "It is optional: none is fine."),
        (31, "all that are left."),
        (34, "A pair (a, b) of both: it is one sentence."),
        (38, "for a bad x."),
    ]


COMMENTS = """
# A comment that goes on in the
# next line. A second sentence of it.
#
# After an empty line, another text
x = 1  # trailing words of one line
y = 2  # trailing words of a line that
#        is at another column
z = 3  # trailing words that go on
       # in the next line
# type: ignore[one two three]
# noqa: E501 one two three
# - first of a list
# - second of a list
text = "# not a comment at all"
"""


def test_comments():
    assert [(kind, text) for kind, *_, text in found("file.py", COMMENTS)] == [
        ("comments", "A comment that goes on in the next line."),
        ("comments", "A second sentence of it."),
        ("comments", "After an empty line, another text"),
        ("comments", "trailing words of one line"),
        ("comments", "trailing words of a line that"),
        ("comments", "is at another column"),
        ("comments", "trailing words that go on in the next line"),
        ("comments", "first of a list"),
        ("comments", "second of a list"),
    ]


ERRORS = """
CURE = "Pass the scale of the whole tensor."


def check(x, parser, ok):
    if not ok:
        raise ValueError(
            f"x={x!r} has {len('one two three')} values, but "
            f"{max(1, 2):.1f} are needed. Write x[:{2}]\\nor leave it out."
        )
    raise TypeError("the scale has no " + name + ", and it needs one" if ok else "give it a name")


def more(parser, warnings, error):
    parser.error("--rounds must be positive")
    warnings.warn(f"These rows were unset ({rows}).", stacklevel=2)
    error.add_note("the axis belongs to a ledger")
    mistake = FP8StateError("states must be stacked first")
    print("this is a line of output")
    raise Refused("no kernel can do it")
    x = "one" + "two" + 3 * 4 + y
"""


def test_errors():
    assert [(kind, text) for kind, *_, text in found("file.py", ERRORS)] == [
        ("errors", "Pass the scale of the whole tensor."),
        ("errors", "x=value has value values, but value are needed."),
        ("errors", "Write x[:value] or leave it out."),
        ("errors", "the scale has no value, and it needs one"),
        ("errors", "give it a name"),
        ("errors", "--rounds must be positive"),
        ("errors", "These rows were unset (value)."),
        ("errors", "the axis belongs to a ledger"),
        ("errors", "states must be stacked first"),
        ("errors", "no kernel can do it"),
    ]


def notebook(*cells):
    return json.dumps({"cells": [{"cell_type": t, "source": s} for t, s in cells]})


def test_notebooks():
    text = notebook(
        ("markdown", ["# One two three\n", "\n", "Text of the first\n", "cell is here."]),
        ("code", "# a comment of four\nprint('one two three four.')"),
        ("markdown", "Text of the third cell."),
    )
    assert [one[1:] for one in found("notebook.ipynb", text)] == [
        (1, 7, "Text of the first cell is here."),
        (3, 5, "Text of the third cell."),
    ]


def test_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    paths = []
    for name, sentences in {
        "package/one/a.py": 4,  # joins package/two in package
        "package/two/b.py": 1,
        "package/three/c.py": 5,  # stays
        "alone/d.py": 1,  # joins the root
        "docs/page.md": 5,  # stays
        "docs/few.md": 4,
        "docs/fewer.md": 2,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "One sentence of five words. " * sentences
        path.write_text(f'"""{text}"""' if name.endswith(".py") else text)
        paths.append(path)
    rows = {(str(path), kind): len(row) for (path, kind), row in words.rows_of(paths).items()}
    assert rows == {
        ("package", "docstrings"): 5,
        ("package/three", "docstrings"): 5,
        (".", "docstrings"): 1,
        ("docs/page.md", ""): 5,
        ("docs", "pages"): 6,
    }


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def of(length):
    """A sentence of so many words."""
    return "w " * (length - 1) + "w.\n"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("page.md", of(5) * 3, None),
        ("page.md", of(14) * 5, None),
        ("page.md", of(15) * 3 + of(5) * 2, "median 15"),
        ("page.md", of(5) * 8 + of(25) * 2, None),
        ("page.md", of(5) * 8 + of(26) * 2, "90th 26"),
        ("page.md", of(5) * 4 + of(26), "90th 26"),
        ("page.md", of(5) * 9 + of(40).replace(" ", "\n"), None),
        ("page.md", of(5) * 9 + of(41).replace(" ", "\n"), "longest 41"),
        ("page.md", "\n" + "word " * 21, "a line of 105 columns"),
        ("file.py", f'"""{LONG}"""', "longest 55"),
        ("file.py", f"# {LONG}", "longest 55"),
        ("file.py", f"raise ValueError({LONG!r})", "longest 55"),
        ("notebook.ipynb", notebook(("markdown", of(5) * 40)), None),
        ("notebook.ipynb", notebook(("markdown", LONG)), "longest 55"),
    ],
)
def test_exit_status(tmp_path, name, text, fault):
    path = tmp_path / name
    path.write_text(text)
    finished = run(path)
    assert not finished.stderr
    assert finished.returncode == (fault is not None)
    faults = finished.stdout.partition(" faults;")[2]
    assert (fault or "") in faults
    assert run("--longest", 1, path).returncode == 0


@pytest.mark.slow  # nox -s lint runs the script, too
def test_the_whole_repository_is_measured():
    finished = run()
    assert not finished.stderr
    rows = {line.split("  ")[0] for line in finished.stdout.splitlines()}
    notebooks = {
        f"notebooks/{path.name}" for path in (SCRIPT.parents[1] / "notebooks").glob("*.ipynb")
    }
    pages = {"README.md", "CHANGELOG.md", "jaxfp8/README.md", "jaxfp8/state/README.md"}
    code = {f"jaxfp8/ops: {kind}" for kind in ("docstrings", "comments", "errors")}
    assert notebooks | pages | code <= rows
    assert finished.returncode == (" 0 faults;" not in finished.stdout)
