"""Rows, layouts, and how the axes of a tensor lie in a parameter."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from messages import Message, check

from jaxfp8 import checkpoint
from jaxfp8.checkpoint import Row
from jaxfp8.checkpoint._names import AxisMap, entries_of


@st.composite
def axis_maps(draw):
    """A text of axes, and the sizes of all."""
    names = draw(st.permutations(["a", "b", "c", "d", "e"]))[: draw(st.integers(1, 5))]
    stacked, inside = names[: draw(st.integers(0, len(names) - 1))], None
    inside = names[len(stacked) :]
    cuts = draw(st.sets(st.integers(1, max(len(inside) - 1, 1)), max_size=2))
    ends = [0, *sorted(cut for cut in cuts if cut < len(inside)), len(inside)]
    groups = [inside[i:j] for i, j in itertools.pairwise(ends)]
    left = " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in groups)
    right = draw(st.permutations(names))
    sizes = {name: draw(st.integers(1, 4)) for name in names}
    return f"{left} -> {' '.join(right)}", groups, stacked, right, sizes


@hypothesis.given(axis_maps(), st.randoms())
def test_axes_are_those_of_the_text(drawn, random):
    """Beside indices that are computed one by one."""
    text, groups, stacked, right, sizes = drawn
    axes = AxisMap.parse(text)
    shape = tuple(sizes[name] for name in right)
    parameter = np.arange(np.prod(shape)).reshape(shape)
    at = {name: random.randrange(sizes[name]) for name in stacked}
    region = axes.region(shape, at, slice(0, axes.file_shape(shape)[0]))
    tensor = axes.to_file(parameter[region])
    assert tensor.shape == axes.file_shape(shape)
    for index in itertools.product(*(range(sizes[n]) for g in groups for n in g)):
        where = dict(zip([n for g in groups for n in g], index, strict=True)) | at
        flat = []
        for group in groups:
            position = 0
            for name in group:
                position = position * sizes[name] + where[name]
            flat.append(position)
        assert tensor[tuple(flat)] == parameter[tuple(where[name] for name in right)]
    part = tuple(r.stop - r.start for r in region)
    np.testing.assert_array_equal(axes.from_file(tensor, part), parameter[region])
    # Rows of the file, where they are whole indices of the first axis.
    step = axes.step(shape)
    first = random.randrange(sizes[groups[0][0]])
    rows = slice(first * step, (first + 1) * step)
    np.testing.assert_array_equal(
        axes.to_file(parameter[axes.region(shape, at, rows)]), tensor[rows]
    )


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "a -> a a",
        "a -> b",
        "(a b -> a b",
        "a, b -> a b",
        "a a -> a",
        "((a) b) -> a b",
        "-> ",
    ],
)
def test_texts_that_are_no_axes(text):
    if text == "-> ":
        assert AxisMap.parse(text) == AxisMap((), ())
        return
    with pytest.raises(ValueError, match="axes="):
        AxisMap.parse(text)


def test_stacked_layers_and_experts_are_tensors_of_their_own():
    rows = [
        Row(
            name="layers.{layer}.experts.{expert}.up.weight", path="moe/{layer}/up", kind="linear",
            axes="out in -> expert in out",
        ),
        Row(name="scan.{layer}.bias", path="scan/bias"),
        Row(name="head.weight", path="head", kind="head"),
    ]  # fmt: skip
    parameters = {
        "moe/3/up": np.zeros((2, 8, 16)), "scan/bias": np.zeros((3, 5)), "head": np.zeros((8, 96))
    }  # fmt: skip
    entries = entries_of(rows, parameters)
    assert {entry.name: (dict(entry.at), entry.file_shape) for entry in entries} == {
        "layers.3.experts.0.up.weight": ({"expert": 0}, (16, 8)),
        "layers.3.experts.1.up.weight": ({"expert": 1}, (16, 8)),
        "scan.0.bias": ({"layer": 0}, (5,)),
        "scan.1.bias": ({"layer": 1}, (5,)),
        "scan.2.bias": ({"layer": 2}, (5,)),
        "head.weight": ({}, (96, 8)),
    }


def test_indices_are_in_the_order_of_the_stacked_axes():
    axes = "out in -> stage layer in out"
    row = Row(name="{layer}.{stage}.weight", path="w", kind="linear", axes=axes)
    entries = entries_of([row], {"w": np.zeros((2, 3, 8, 16))})
    assert [tuple(entry.at.items()) for entry in entries[:4]] == [
        (("stage", 0), ("layer", 0)), (("stage", 0), ("layer", 1)), (("stage", 0), ("layer", 2)),
        (("stage", 1), ("layer", 0)),
    ]  # fmt: skip


def test_modules_of_a_layout_move_with_all_below():
    rows = checkpoint.names(
        "qwen",
        {
            "model": "",
            "model.layers.{layer}": "blocks/{layer}",
            "model.layers.{layer}.self_attn": "blocks/{layer}/attention",
            "model.layers.{layer}.self_attn.q_proj": "blocks/{layer}/attention/query",
        },
        axes={"model.layers.{layer}.self_attn.q_proj": "(n h) d -> d n h"},
    )
    found = {row.name: (row.found_at, row.axes) for row in rows}
    layer = "model.layers.{layer}."
    assert found["model.norm.weight"] == ("norm/scale", "")
    assert found["lm_head.weight"] == ("lm_head/kernel", "")
    assert found[f"{layer}mlp.up_proj.weight"] == ("blocks/{layer}/mlp/up_proj/kernel", "")
    assert found[f"{layer}self_attn.k_proj.bias"] == ("blocks/{layer}/attention/k_proj/bias", "")
    query = "blocks/{layer}/attention/query"
    assert found[f"{layer}self_attn.q_proj.weight"] == (f"{query}/kernel", "(n h) d -> d n h")
    assert found[f"{layer}self_attn.q_proj.bias"] == (f"{query}/bias", "(n h) -> n h")
    # Without a placeholder in the path, layers are stacked.
    scanned = checkpoint.names("llama", {"model.layers.{layer}": "blocks"})
    assert {row.stacked for row in scanned} == {(), ("layer",)}


@pytest.mark.parametrize("layout", checkpoint.LAYOUTS)
def test_names_and_paths_of_a_layout_are_unique(layout):
    rows = checkpoint.names(layout)
    assert len({row.name for row in rows}) == len({row.found_at for row in rows}) == len(rows)
    merged = {row.merged: {r.parallel for r in rows if r.merged == row.merged} for row in rows}
    assert all(len(parallel) == 1 for name, parallel in merged.items() if name)


def roles(layout):
    """The linear modules of a layout, with how engines split and merge them."""
    prefix = "model.layers.{layer}."
    linear = [row for row in checkpoint.names(layout) if row.kind == "linear"]
    return {row.module.removeprefix(prefix): (row.parallel, row.merged) for row in linear}


QKV = {f"self_attn.{n}_proj": ("columns", "qkv") for n in "qkv"} | {
    "self_attn.o_proj": ("rows", None)
}
COLUMNS, ROWS = ("columns", "gate_up"), ("rows", None)


def swiglu(block, gate="gate_proj", up="up_proj", down="down_proj"):
    return {f"{block}.{gate}": COLUMNS, f"{block}.{up}": COLUMNS, f"{block}.{down}": ROWS}


MLA = {
    "self_attn.q_proj": ("columns", None),
    "self_attn.q_a_proj": (None, "qkv_a"),
    "self_attn.kv_a_proj_with_mqa": (None, "qkv_a"),
    "self_attn.q_b_proj": ("columns", None),
    "self_attn.kv_b_proj": ("columns", None),
    "self_attn.o_proj": ROWS,
}
ROLES = {
    "llama": QKV | swiglu("mlp"),
    "qwen": QKV | swiglu("mlp") | swiglu("mlp.experts.{expert}"),
    "gemma": QKV | swiglu("mlp"),
    "mixtral": QKV | swiglu("block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
    "deepseek": MLA | swiglu("mlp") | swiglu("mlp.experts.{expert}")
    | swiglu("mlp.shared_experts"),
    "gpt_oss": QKV,
}  # fmt: skip
KEPT = {"lm_head": "head", "model.embed_tokens": "embedding", "model.norm": "norm"}
ROUTERS = {"qwen": "mlp.gate", "mixtral": "block_sparse_moe.gate", "deepseek": "mlp.gate",
           "gpt_oss": "mlp.router"}  # fmt: skip


@pytest.mark.parametrize("layout", checkpoint.LAYOUTS)
def test_what_each_matrix_of_a_layout_is(layout):
    assert roles(layout) == ROLES[layout]
    kinds = {
        row.module: row.kind for row in checkpoint.names(layout) if row.name.endswith(".weight")
    }
    assert {name: kinds[name] for name in KEPT} == KEPT
    routers = [
        name.removeprefix("model.layers.{layer}.") for name, k in kinds.items() if k == "router"
    ]
    assert routers == ([ROUTERS[layout]] if layout in ROUTERS else [])


def test_axes_of_an_embedding_are_its_own():
    module = "model.embed_tokens"
    (row,) = [
        row
        for row in checkpoint.names("llama", axes={module: "vocab width -> width vocab"})
        if row.module == module
    ]
    assert row.axis_map(2) == AxisMap((("vocab",), ("width",)), ("width", "vocab"))


MESSAGES = {
    "braces": Message(
        ValueError, lambda: Row(name="a.{}.weight"), "'a.{}.weight' has braces", "placeholder",
        "{layer}",
    ),
    "reserved": Message(
        ValueError, lambda: Row(name="a.{in}.b", path="a"), "'a.{in}.b'", "placeholder", "{layer}"
    ),
    "kind": Message(
        ValueError, lambda: Row(name="a", kind="dense"), "kind='dense'", "one of", "linear"
    ),
    "suffix": Message(
        ValueError, lambda: Row(name="a.kernel", kind="linear"), "name='a.kernel'", ".weight",
        "kind",
    ),
    "placeholders": Message(
        ValueError, lambda: Row(name="a.weight", path="b/{i}"), "path='b/{i}'", "['i']",
        "name of its own",
    ),
    "stacked": Message(
        ValueError, lambda: Row(name="a.{i}.w", path="a/w", axes="x -> x"), "axes='x -> x'",
        "['i']", "after the arrow",
    ),
    "layout": Message(
        ValueError, lambda: checkpoint.names("bert"), "layout='bert'", "unknown", "'llama'"
    ),
    "module": Message(
        ValueError, lambda: checkpoint.names("llama", {"model.layer": "x"}), "'model.layer'",
        "no name of layout", "model.layers.{layer}",
    ),
    "no_parameter": Message(
        ValueError, lambda: checkpoint.export({}, "nowhere", format=None), "params",
        "no parameter", "variables['params']",
    ),
    "no_array": Message(
        TypeError, lambda: checkpoint.export({"a": 1.0}, "nowhere", format=None), "a is 1.0",
        "arrays", "parameters only",
    ),
    "two_rows": Message(
        ValueError,
        lambda: entries_of([Row(name="x", path="a"), Row(name="y", path="a")], {"a": jnp.ones(2)}),
        "a is the parameter of", "['x', 'y']", "one row",
    ),
    "axes": Message(
        ValueError,
        lambda: entries_of([Row(name="x.weight", path="a", kind="linear")], {"a": jnp.ones(2)}),
        "a has 1 axes", "'in out'", "Row(axes=)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_refused(name):
    check(MESSAGES[name])
