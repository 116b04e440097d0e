"""What `benchmarks/clients` counts and refuses. `nox -s clients` runs the frameworks themselves."""

import importlib
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxfp8 as fp8

ROOT = Path(__file__).parents[2]
FOLDER, DOCS = ROOT / "benchmarks" / "clients", ROOT / "docs"


@pytest.fixture(autouse=True)
def beside_the_clients(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


X, W = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
E4M3 = jnp.float8_e4m3fn


def dense(recipe):
    return lambda x, w: fp8.dot(x, w, recipe=recipe)


def scanned(x, w):
    body = lambda x, w: (jnp.tanh(dense(fp8.recipes.current())(x, w)), None)
    return jax.lax.scan(jax.checkpoint(body), x, jnp.stack([w, w]))[0]


def fake(x, w):
    return (x.astype(E4M3).astype(x.dtype) * 2) @ w


def attention(x, w):
    x = dense(fp8.recipes.current())(x, w)
    return x @ x.T


FORWARD = {  # and the matmuls of its loss and gradients: of 0, 1 and 2 operands in FP8
    "bfloat16": (lambda x, w: x @ w, (3, 0, 0)),
    "current": (dense(fp8.recipes.current()), (0, 0, 3)),
    "blockwise": (dense(fp8.recipes.blockwise()), (0, 0, 3)),
    "mxfp8": (dense(fp8.recipes.mxfp8()), (0, 0, 3)),
    "scan and remat": (scanned, (0, 0, 4)),
    "fake quantization of one operand": (fake, (1, 2, 0)),
    "scores of attention": (attention, (3, 0, 3)),
}


@pytest.fixture
def compiled_anew():
    """XLA dumps nothing for a program that is in the cache."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("name", FORWARD)
def test_matmuls_that_read_fp8(name, tmp_path):
    from _matmuls import counts

    forward, expected = FORWARD[name]
    step = jax.jit(jax.grad(lambda x, w: jnp.sum(forward(x, w) ** 2), argnums=(0, 1)))
    dumps = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    step.lower(X, W).compile(compiler_options=dumps)
    found = counts(tmp_path)
    assert (found["matmuls"], found["one_operand_fp8"], found["fp8"]) == (
        sum(expected),
        *expected[1:],
    )


PRINTS = {  # what a command does, and what the runner says of it
    "print('loss 1.5'); print('loss 1.25')": "matmuls: ",  # it has no program
    "print('loss 1.5')": "printed 1 losses, and should print 2",
    "print('loss 1.5'); print('loss nan')": "should print 2",
    "print('loss 1.5'); print('loss 1.25'); 1 / 0": "ZeroDivisionError: division by zero",
}


def row_of(code, **options):
    from _client import Client, Row

    row = Row(name="all", recipe="current", arguments=("-c", code), **options)
    client = Client(
        name="none", title="None", python="3", packages=(), command=(), loss=r"loss (\S+)",
        losses=2, program="step", rows=(row,),
    )  # fmt: skip
    return client, row


@pytest.mark.parametrize("code", PRINTS)
def test_a_row_that_is_not_as_it_must_be(code, tmp_path):
    from run import run

    result = run(*row_of(code), Path(sys.executable), tmp_path, tmp_path / "log")
    assert PRINTS[code] in result["error"]


@pytest.mark.parametrize("code", ["raise ValueError('no recipe')", "raise ValueError('other')"])
def test_a_refusal_must_come(code, tmp_path):
    from run import run

    client, row = row_of(code, refuses="no recipe")
    result = run(client, row, Path(sys.executable), tmp_path, tmp_path / "log")
    assert ("error" in result) == ("other" in code)
    assert ("refused" in result) == ("other" not in code)


@pytest.mark.parametrize("last", [1.25, 1.5])
def test_a_resumed_run_repeats_the_whole_one(last):
    from run import compared, key

    _, row = row_of("", like=("all", "whole"))
    result = {"losses": [last]}
    compared({key("all", "whole"): {"losses": [1.5, 1.25]}}, row, result)
    assert ("error" in result) == (last == 1.5)


@pytest.mark.parametrize("name", ["with a baseline", "without"])
@pytest.mark.parametrize("last", [1.41, 1.5, 1.3])  # as it should, not at all, too much
def test_a_loss_falls_as_that_of_a_baseline(name, last):
    from run import compared, key

    _, row = row_of("")
    baseline = {"losses": [1.5, 1.4]} | ({} if "with a" in name else {"error": "killed"})
    result = {"losses": [1.5, last]}
    compared({key("all", "bfloat16"): baseline}, row, result)
    assert ("error" in result) == (last == 1.5 or (last == 1.3 and "with a" in name))


CLIENTS = sorted(path.stem.removesuffix("_client") for path in FOLDER.glob("[a-z]*_client.py"))


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client(name):
    """Packages are pinned, rows differ, and results are those of rows that there are."""
    from run import key

    client = importlib.import_module(f"{name}_client").CLIENT
    assert client.name == name
    assert [each for each in client.packages if not re.search(r"==|@ ", each)] == []
    keys = [key(row.name, row.recipe) for row in client.rows]
    assert len(keys) == len(set(keys))
    for row in client.rows:
        assert row.like is None or key(*row.like) in keys
    saved = json.loads((FOLDER / "results" / f"{name}.json").read_text())
    assert set(saved["rows"]) <= set(keys)
    assert {of for of, result in saved["rows"].items() if "error" in result} == set()
    assert all(patch().startswith("--- ") for patch in client.patches)


PAGES = ("flax-examples", "frameworks", "gemma", "levanter", "maxtext", "tunix")


@pytest.mark.parametrize("page", PAGES)
def test_series_of_losses_in_docs_are_those_of_runs(page):
    saved = [json.loads(file.read_text()) for file in (FOLDER / "results").glob("*.json")]
    runs = [each for one in saved for row in one["rows"].values() for each in row.values()]
    runs = [each for each in runs if isinstance(each, list) and each]
    found = re.findall(r"\d+\.\d{3,5}(?: \d+\.\d{3,5})+", (DOCS / f"{page}.md").read_text())
    assert found
    for series in found:
        digits = len(series.split()[0].split(".")[1])
        texts = [[f"{round(each, digits) + 0.0:.{digits}f}" for each in run] for run in runs]
        ends = [f"{text[0]} {text[-1]}" for text in texts]
        assert series in ends or any(f" {series} " in f" {' '.join(text)} " for text in texts)
