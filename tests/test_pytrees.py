"""Every node of a pytree goes into a file of `jax.export` and comes back, as data alone."""

import ast
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import own_quantizer
from messages import Message, check

import jaxfp8 as fp8
from jaxfp8 import _pytrees
from jaxfp8.comms._auto_scaled import GradientSumState
from jaxfp8.conversion._read import Extra
from jaxfp8.diagnostics._arguments import _Packed
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.matmul._arrays import Copy, KnownAmaxes, Rows
from jaxfp8.matmul._stats import CastStats, SumStats
from jaxfp8.moe._router import Choices
from jaxfp8.optim import _eight_bit_formats as formats
from jaxfp8.optim import _masters as masters
from jaxfp8.plugs._state_bytes import StateBytes
from jaxfp8.prologues._prologue import Gathered, Produced
from jaxfp8.recipes._recipe import Row
from jaxfp8.state._state import Probe, SeenAmax
from jaxfp8.weights import QuantizedWeight, WeightAxes

ROOT = Path(__file__).parent.parent / "jaxfp8"
DELAYED = fp8.recipes.delayed(algorithm="most_recent", margin=1)
MIXED = dataclasses.replace(fp8.recipes.mxfp8(), name="mixed", dgrad=fp8.recipes.identity().dgrad)
SCALES = fp8.recipes.static(x_scale=0.5, w_scale=2.0, g_scale=4.0)
ONE = np.float32(1)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def there_and_back(tree: Any) -> Any:
    """The structure of a tree, after a program that takes it went through bytes."""
    types = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), tree)
    exported = jax.export.export(jax.jit(lambda tree: ()), platforms=["cpu"])(types)
    again = jax.export.deserialize(bytearray(exported.serialize()))
    ((found,),) = [each.children() for each in again.in_tree.children()[:1]]
    return found


def quantized(granularity: Any, **options: Any) -> Any:
    return fp8.quantize(jnp.ones((4, 4)), fp8.E4M3, granularity, **options)


def weight(recipe: fp8.Recipe, axes: WeightAxes) -> QuantizedWeight:
    arrays = (ONE, ONE)
    return QuantizedWeight(
        values=arrays, scales=arrays, amaxes=None, original=ONE, recipe=recipe, axes=axes,
        dtype=jnp.dtype(jnp.bfloat16), scale_axes=((0, None), ()),
    )  # fmt: skip


def released() -> fp8.optim.Released:
    """Parameters with the structure of an optimizer state, which is a static field."""
    state = {"mu": (formats.Int8State(ONE, ONE), None), "count": [ONE, ()]}
    dtypes = tuple(map(jnp.dtype, ("int8", "float32", "int32")))
    return fp8.optim.Released({"w": ONE}, [(ONE,), (ONE, ONE)], ONE, dtypes, structure(state))


def tuples(kind: Any) -> Callable[[], list[Any]]:
    return lambda: [kind(*[ONE] * len(kind._fields))]


# For each class the values that go through a file.
SAMPLES: dict[type, Callable[[], list[Any]]] = {
    fp8.QuantizedTensor: lambda: [
        quantized(fp8.PerTensor()),
        quantized(fp8.PerAxis(0, -1)),
        quantized(fp8.PerBlock((2, 2)), power_of_two=True),
        fp8.QuantizedTensor(ONE, ONE, fp8.quantizers.PerRow(), jnp.dtype(jnp.float8_e5m2)),
    ],
    fp8.state.MatmulState: lambda: [
        fp8.init_state(DELAYED),
        fp8.freeze(fp8.init_state(fp8.recipes.delayed(gradient=fp8.E4M3))),
        {"stacked": (fp8.init_state(DELAYED),)},
    ],
    Probe: lambda: [Probe(ONE, ONE, ("data", "fsdp"), "gradient"), Probe(None, ONE, None)],
    SeenAmax: lambda: [SeenAmax(ONE, DELAYED.rows)],
    QuantizedWeight: lambda: [
        weight(MIXED, WeightAxes(contracted=(0, 1), batch=(2,), stacked=1, reduce_axes=("x",))),
        weight(SCALES, WeightAxes(shard=fp8.Shard(0, ("a", "b"), False))),
        *(weight(fp8.recipes.get(name), WeightAxes(shard=fp8.Shard(-1, "a")))
          for name in ("current", "rowwise", "blockwise", "identity")),
    ],
    fp8.optim.Overwrite: lambda: [fp8.optim.Overwrite(ONE, ONE)],
    fp8.optim.Released: lambda: [released()],
    fp8.moe.Route: lambda: [
        fp8.moe.route(jnp.array([[2, 0]]), experts=3),
        fp8.moe.Route(*[ONE] * 7, choices=1, experts=4, axis="experts"),
    ],
    StateBytes: lambda: [StateBytes(fp8.init_state(DELAYED))],
    Extra: lambda: [Extra(), Extra(fp8.init_state(DELAYED), ONE)],
    Groups: lambda: [Groups.of(jnp.array([2, 1]), tokens=4, tile=2)],
    Gathered: lambda: [Gathered(ONE, ONE, ONE, ONE)],
    Produced: lambda: [
        Produced(ONE, (ONE, ONE), fp8.prologues.RMSNorm(epsilon=2.0**-20)),
        Produced(ONE, (ONE, ONE), fp8.prologues.SwiGLU()),
    ],
    Copy: lambda: [Copy(ONE, ("fprop", "wgrad"), 2, True)],
    Rows: lambda: [Rows(Groups.of(jnp.array([1]), tokens=2, tile=2), None, "x")],
    KnownAmaxes: lambda: [KnownAmaxes(((None, fp8.PerAxis(1)), (2, fp8.PerTensor())), (ONE, ONE))],
    CastStats: lambda: [CastStats(*[ONE] * 7, "x", ("fprop",), 16)],
    SumStats: lambda: [SumStats(ONE, ONE, ONE, ("wgrad",), 8, 4, "promoted")],
    _Packed: lambda: [_Packed((ONE, ONE), ("weights", None))],
    **{
        kind: tuples(kind)
        for kind in (
            masters.Float32State, masters.BFloat16PlusState, masters.Float16State,
            masters.FP8State, fp8.optim.MasterWeightsState, fp8.optim.MomentFormatsState,
            formats.Int8State, formats.LinearInt8State, formats.ExpandedFP8State,
            GradientSumState, fp8.moe.ExpertsOutput, fp8.moe.MoEStats, Choices,
            fp8.quantizers.RowState, KnownScale,
        )
    },
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_a_node_goes_through_a_file(kind):
    samples = SAMPLES[kind]()
    found, wanted = there_and_back(samples), structure(samples)
    assert found == wanted
    # Equal numbers of other types, 1 and 1.0, would be equal. Their text is not.
    assert str(found) == str(wanted)


def test_every_node_is_tested_here():
    assert {each.kind for each in _pytrees.NODES.values()} == {*SAMPLES}


# Residuals that never leave a trace. They hold types and functions of JAX.
STATIC_NODES = {"_Types", "_Plan"}
# NamedTuples of arrays that live inside of a trace. No public function takes or returns them.
INSIDE = {
    "CastExtras", "Place", "Tile", "QuantizerArrays", "HeldCopies", "Arrays", "Quantized",
    "Sums", "ScaleInputs",
}  # fmt: skip


@functools.cache
def classes() -> list[ast.ClassDef]:
    trees = [ast.parse(path.read_text()) for path in ROOT.rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


def test_no_node_is_forgotten():
    """A pytree that only JAX knows cannot be in a program that goes into a file."""
    calls = {
        path.name
        for path in ROOT.rglob("*.py")
        if path.name != "_pytrees.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith(("register_dataclass", "register_pytree"))
    }
    assert not calls, "make it a node by jaxfp8._pytrees.register_node"
    static = {node.name for node in classes() if "jax.tree_util.register_static" in names(node)}
    assert static == STATIC_NODES
    words = lambda field: ast.unparse(field.annotation).replace(".", " ").split()
    unknown = {
        node.name
        for node in classes()
        if "NamedTuple" in map(ast.unparse, node.bases) and not node.name.startswith("_")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and {"Array", "PyTree", "OptState"} & {*words(field)}
        if "register_node" not in names(node)
    }
    assert unknown - INSIDE == set(), "decorate it with jaxfp8._pytrees.register_node"
    assert INSIDE - unknown == set(), "drop it from INSIDE"


# What files have today. A later version has to read it.
OLD = {
    fp8.QuantizedTensor: (
        '{"arrays": ["values", "scale"], "static": {"granularity": {"PerBlock": {"tile": [1, 32]}},'
        ' "dtype": {"dtype": "bfloat16"}, "power_of_two": true}}',
        lambda: fp8.QuantizedTensor(
            ONE, ONE, fp8.PerBlock((1, 32)), jnp.dtype(jnp.bfloat16), power_of_two=True
        ),
    ),
    fp8.state.MatmulState: (
        '{"arrays": ["scale", "amax_history", "nonfinite_steps", "fingerprint", "probe"], "static":'
        ' {"rows": [{"Row": {"tensor": "x", "quantizer": {"Delayed": {"format": {"Format": {"name":'
        ' "E4M3"}}, "history_length": 16, "algorithm": "max", "margin": 0, "power_of_two": false,'
        ' "rounding": "nearest"}}}}], "frozen": false, "settled": true}}',
        lambda: fp8.state.MatmulState(
            ONE, ONE, ONE, ONE, None, fp8.recipes.delayed().rows[:1], settled=True
        ),
    ),
    fp8.optim.MasterWeightsState: (
        '{"arrays": ["masters", "inner"], "static": {}}',
        lambda: fp8.optim.MasterWeightsState(ONE, ONE),
    ),
}  # fmt: skip


def read(kind: type, text: str | bytes) -> Any:
    data = text.encode() if isinstance(text, str) else text
    return _pytrees._read(_pytrees.NODES[f"jaxfp8.{kind.__name__}"], data)


@pytest.mark.parametrize("kind", OLD, ids=lambda kind: kind.__name__)
def test_old_files_are_read(kind):
    text, make = OLD[kind]
    known, node = _pytrees.NODES[f"jaxfp8.{kind.__name__}"], make()
    assert read(kind, text) == tuple(getattr(node, name) for name in known.static)
    assert _pytrees._write(known, structure(node).node_data()[1] if known.static else None) == (
        text.encode()
    )


def test_a_new_field_gets_its_default():
    text, _ = OLD[fp8.QuantizedTensor]
    assert read(fp8.QuantizedTensor, text.replace(', "power_of_two": true', ""))[-1] is False


TENSOR, STATE = (OLD[kind][0] for kind in (fp8.QuantizedTensor, fp8.state.MatmulState))
DAMAGED = {
    "cut": (TENSOR[:-3], "Expecting"),
    "bytes": (b"\xff\xfe\xfd", "can't decode"),
    "number": ("3", "other keys"),
    "deep": ("[" * 100_000, "recursion"),
    "arrays": (TENSOR.replace('"scale"', '"scales"'), "'scales'"),
    "field": (TENSOR.replace("power_of_two", "power_of_2"), "'power_of_2'"),
    "missing": (TENSOR.replace('"dtype": {"dtype": "bfloat16"}, ', ""), "no ['dtype']"),
    "class": (TENSOR.replace("PerBlock", "os.system"), "'os.system'"),
    "of another kind": (TENSOR.replace('{"PerBlock": {"tile": [1, 32]}}', '"x"'), "granularity"),
    "dtype": (TENSOR.replace("bfloat16", "f4,f4"), "'f4,f4'"),
    "objects": (TENSOR.replace("bfloat16", "object"), "'object'"),
    "bool": (TENSOR.replace("true", "1"), "power_of_two=1"),
    "tile": (TENSOR.replace("[1, 32]", "[1, 0]"), "(1, 0)"),
    "two classes": (TENSOR.replace('"bfloat16"}', '"bfloat16", "a": 1}'), "['dtype', 'a']"),
    "literal": (STATE.replace('"max"', '"most"'), "'most'"),
    "tensor": (STATE.replace('"x"', '"y"'), "'y'"),
    "row": (STATE.replace("[{", "[3, {"), "rows"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_named(damage):
    text, needle = DAMAGED[damage]
    kind = fp8.state.MatmulState if "amax_history" in str(text) else fp8.QuantizedTensor
    check(
        Message(ValueError, lambda: read(kind, text), kind.__name__, needle, "Export the program")
    )


def test_a_class_whose_module_is_reloaded_is_registered_again():
    """As `%autoreload` of IPython does it. jax.export has the first class."""
    first = _pytrees.NODES["jaxfp8.StateBytes"].kind
    body = {"__module__": first.__module__, "__annotations__": {"state": Any}}
    again: Any = dataclasses.dataclass(frozen=True)(type("StateBytes", (), body))
    assert _pytrees.register_node(again) is again
    assert jax.tree.leaves(again(ONE)) == [ONE]
    assert _pytrees.NODES["jaxfp8.StateBytes"].kind is first


def test_a_bool_is_no_number():
    node = SAMPLES[fp8.moe.Route]()[1]
    text = _pytrees._write(_pytrees.NODES["jaxfp8.Route"], structure(node).node_data()[1]).decode()
    assert read(fp8.moe.Route, text) == (1, 4, "experts")
    with pytest.raises(ValueError, match="choices=True"):
        read(fp8.moe.Route, text.replace('"choices": 1', '"choices": true'))


def test_a_damaged_structure_is_named():
    known = _pytrees.NODES["jaxfp8.Released"]
    text = json.loads(_pytrees._write(known, structure(released()).node_data()[1]))
    text["static"]["treedef"]["treedef"] = "AAAA"
    check(
        Message(
            ValueError, lambda: read(fp8.optim.Released, json.dumps(text)), "Released", "treedef",
            "Export the program",
        )
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Named(own_quantizer.Smoothed):
    """A quantizer of users that has a name in files."""


def test_own_quantizers_need_a_name():
    own = fp8.init_state(own_quantizer.recipe())
    check(
        Message(
            TypeError, lambda: there_and_back(own), "rows[0].quantizer=Smoothed(",
            "cannot be written", "register_quantizer_serialization(",
        )
    )  # fmt: skip
    register: Any = fp8.quantizers.register_quantizer_serialization
    register(Named, serialized_name="tests.Named")
    row = fp8.init_state(
        fp8.Recipe(
            **dict.fromkeys(("fprop", "dgrad", "wgrad"), both(Named(decay=0.25))), name="own"
        )
    )
    assert there_and_back(row) == structure(row)
    for name in ("tests.Named", "Delayed", "dtype"):
        check(
            Message(
                ValueError,
                functools.partial(register, own_quantizer.Smoothed, serialized_name=name),
                f"serialized_name={name!r}", "taken", "Choose another name",
            )
        )  # fmt: skip
    check(
        Message(
            TypeError, lambda: register(own_quantizer.Smoothed, serialized_name=""),
            "serialized_name=''", "a name", "'my_project.Smoothed'",
        )
    )  # fmt: skip
    check(
        Message(
            TypeError, lambda: register(int, serialized_name="tests.int"), "kind=<class 'int'>",
            "AbstractQuantizer", "dataclasses.dataclass",
        )
    )  # fmt: skip
    # An array in a field could not be hashed, and NumPy's numbers would come back as others.
    odd = fp8.QuantizedTensor(ONE, ONE, fp8.PerTensor(), ONE)
    check(Message(TypeError, lambda: there_and_back(odd), "dtype=", "cannot be written", "dtypes"))


OTHER_E4M3 = dataclasses.replace(fp8.E4M3, max=240.0)


@dataclasses.dataclass(frozen=True)
class Narrow(own_quantizer.Smoothed):
    """A quantizer whose format has the name of another one."""

    narrow: Any = OTHER_E4M3


@dataclasses.dataclass(frozen=True)
class Misannotated(own_quantizer.Smoothed):
    """A quantizer whose field has another type than it says."""

    steps: int = 0.5  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "needle"), [(Narrow, "come back as"), (Misannotated, "steps=0.5 is no")]
)
def test_what_would_be_read_as_another_value_is_not_written(kind, needle):
    fp8.quantizers.register_quantizer_serialization(kind, serialized_name=f"tests.{kind.__name__}")
    row = fp8.state.MatmulState(ONE, ONE, ONE, ONE, None, (Row("x", kind(decay=0.25)),))
    check(Message(TypeError, lambda: there_and_back(row), "quantizer", needle, "Use the formats"))


def both(quantizer: Any) -> fp8.recipes.Operands:
    return fp8.recipes.Operands(lhs=quantizer, rhs=quantizer)
