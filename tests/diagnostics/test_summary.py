"""Summaries: tables for people, dicts for loggers, rows for code."""

import dataclasses
import functools
import io
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hard_inputs import mentions
from pages import ROOT
from rich.console import Console

import jaxfp8 as fp8
from jaxfp8.diagnostics import CastRow, StateRow, summary
from jaxfp8.linen import COLLECTION, FP8Dense, TrainState

RECIPE = fp8.recipes.delayed()
X = np.arange(32.0, dtype=np.float32).reshape(4, 8)


@functools.cache
def trained():
    """The state of two steps of one matmul."""
    state = fp8.init_state(RECIPE)
    loss = lambda w, state, x: fp8.dot(x, w, recipe=RECIPE, state=state).sum()
    step = jax.jit(fp8.value_and_grad(loss))
    for scale in (1.0, 2.0):
        _, _, state = step(jnp.ones((8, 2)), state, np.float32(scale) * X)
    return state


def test_rows_of_states():
    state = trained()
    bad = dataclasses.replace(state, nonfinite_steps=jnp.array([0.0, 0.0, 2.0]))
    rows = summary({"a": {"up": state}, "b": [bad]}).rows
    assert [(row.layer, row.tensor) for row in rows] == [
        (layer, tensor) for layer in ("a/up", "b/0") for tensor in "xwg"
    ]
    assert all(type(row) is StateRow for row in rows)
    assert [row.amax for row in rows[:3]] == [62.0, 1.0, 1.0]
    assert [(row.amax_min, row.amax_max) for row in rows[:3]] == [(0, 62), (0, 1), (0, 1)]
    assert [row.scale for row in rows[:3]] == [float(each) for each in state.scale]
    assert [row.nonfinite_steps for row in rows[3:]] == [0, 0, 2]
    assert not any(row.unset for row in rows)
    short = fp8.init_state(fp8.recipes.delayed(history_length=1))
    single = summary(short).rows[0]
    assert single.unset
    assert np.isnan(single.amax)
    assert single.layer == "matmul"


def host(tree):
    return jax.tree.map(np.asarray, tree)


def test_stacked_states():
    state = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf, 3 * leaf]), host(trained()))
    rows = summary({"blocks": state}).rows
    assert [row.layer for row in rows[::3]] == ["blocks[0]", "blocks[1]", "blocks[2]"]
    assert [row.amax for row in rows[::3]] == [62.0, 124.0, 186.0]
    twice = jax.tree.map(lambda leaf: np.stack([leaf] * 2), state)
    assert summary({"blocks": twice}).rows[-1].layer == "blocks[1][2]"


def test_two_quantizers_of_one_tensor():
    changed = dataclasses.replace(RECIPE, wgrad=fp8.recipes.delayed(margin=1).wgrad)
    keys = [row.key for row in summary(fp8.init_state(changed)).rows]
    assert keys == ["x/0", "x/1", "w", "g/3", "g/4"]


def places_of_state():
    model = nn.Sequential([FP8Dense(8), FP8Dense(4)])
    variables = jax.jit(model.init)(jax.random.key(0), X)
    train_state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(1.0),
        **dict.fromkeys(("fp8_state",), variables[COLLECTION]),
    )
    return {"collection": variables[COLLECTION], "variables": variables, "TrainState": train_state}


def test_where_states_are():
    for name, place in places_of_state().items():
        layers = {row.layer for row in summary(place).rows}
        prefix = {"TrainState": "fp8_state/"}.get(name, "")
        assert layers == {f"{prefix}layers_0", f"{prefix}layers_1"}, name
    model = nnx.Sequential(
        *(fp8.nnx.FP8Linear(8, 8, recipe=RECIPE, rngs=nnx.Rngs(0)) for _ in "ab")
    )
    assert {row.layer for row in summary(model).rows} == {"layers/0", "layers/1"}


def test_no_state():
    for source in ({}, {"w": X}, fp8.recipes.current(), fp8.nnx.FP8State):
        with pytest.raises(fp8.FP8StateError, match=mentions("no quantizer state", "collect()")):
            summary(source)
    with pytest.raises(fp8.FP8StateError, match=mentions("outside of jax.jit")):
        jax.jit(lambda state: summary(state).rows)(trained())


@functools.cache
def records():
    def loss(w, states):
        used = (("layer 10", RECIPE, states), ("layer 2", fp8.recipes.rowwise(), None))
        return sum(fp8.dot(X, w, recipe=r, state=s, name=name).sum() for name, r, s in used)

    with fp8.diagnostics.collect() as found:
        jax.jit(fp8.value_and_grad(loss))(jnp.ones((8, 2)), fp8.init_state(RECIPE))
    return summary(found)


def test_rows_and_dict_of_casts():
    found = records()
    assert all(type(row) is CastRow for row in found.rows)
    # Numbers in names are ordered by value, and tensors as x, w, g.
    assert [(row.layer, row.key) for row in found.rows] == [
        *(("layer 2", f"{tensor}/{matmul}") for tensor, matmul in (
            ("x", "fprop"), ("x", "wgrad"), ("w", "dgrad"), ("w", "fprop"), ("g", "dgrad"),
            ("g", "wgrad"))),
        *(("layer 10", tensor) for tensor in "xwg"),
    ]  # fmt: skip
    plain = found.as_dict()
    figures = [f.name for f in dataclasses.fields(CastRow)][4:]
    assert plain.keys() == {f"{r.layer}/{r.key}/{f}" for r in found.rows for f in figures}
    assert all(type(value) is float for value in plain.values())
    assert plain["layer 10/x/amax"] == 31.0
    json.dumps(plain, allow_nan=False)
    of_states = summary({"up": trained()}).as_dict()
    assert of_states["up/x/amax"] == 62.0
    assert of_states["up/g/unset"] == 0.0


def test_tables():
    for found, notes in ((records(), 1), (summary({"up": trained()}), 0)):
        lines = str(found).splitlines()
        assert len(lines) == 1 + len(found.rows) + notes
        lines = lines[: 1 + len(found.rows)]
        assert lines[0].startswith("layer")
        assert {line.index(row.key[0]) for line, row in zip(lines[1:], found.rows, strict=True)}
        assert all(line.startswith(r.layer) for line, r in zip(lines[1:], found.rows, strict=True))
        out = io.StringIO()
        Console(file=out, width=200).print(found)
        for row in found.rows:
            assert row.layer in out.getvalue()
    table = str(summary({"up": trained()}))
    assert table == (
        "layer  tensor  scale     amax  history  nonfinite steps  unset\n"
        "up     x       0.138     62    0 to 62  0                no\n"
        "up     w       0.00223   1     0 to 1   0                no\n"
        "up     g       1.74e-05  1     0 to 1   0                no"
    )


def test_marks_of_what_is_not_normal():
    """The limits of docs/diagnostics.md: more than 0.1 % saturated, more than 2 % underflowed."""
    shares = {"normal": (0.001, 0.02), "clipped": (0.00101, 0.0), "lost": (0.0, 0.0201)}
    found = fp8.diagnostics.Summary(
        tuple(
            dataclasses.replace(
                records().rows[0], layer=name, saturated=saturated, underflowed=underflowed
            )
            for name, (saturated, underflowed) in shares.items()
        )
    )
    *table, note = str(found).splitlines()
    assert [line.split()[0] for line in table if "!" in line] == ["clipped", "lost"]
    assert "0.101 % !" in table[2]
    assert "2.01 % !" in table[3]
    assert note == "act above 0.1 % saturated, 2 % underflowed (marked !)"
    out = io.StringIO()
    Console(file=out, width=200).print(found)
    assert note in out.getvalue()
    assert note in (ROOT / "docs" / "diagnostics.md").read_text()
