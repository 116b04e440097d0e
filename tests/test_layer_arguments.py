"""The arguments of layers: `help` and signatures are complete, and each text is written once."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from flax import linen as nn
from flax import nnx

import jaxfp8 as fp8
from jaxfp8 import _layer_arguments
from jaxfp8._layer_arguments import documented
from jaxfp8.linen._matmul_module import ExpertsModule, MatmulModule
from jaxfp8.matmul._options import LayerOptions, Options, UnshardedOptions

ROOT = Path(__file__).parents[1]
NAMES = ["FP8DotGeneral", "FP8EinsumOp", "FP8Einsum", "FP8MoE", "FP8GroupedLinear"]
LINEN = {
    name: getattr(fp8.linen, name) for name in (*NAMES, "FP8Dense", "FP8DenseGeneral", "TrainState")
}
NNX = {name: getattr(fp8.nnx, name) for name in (*NAMES, "FP8Linear", "FP8LinearGeneral")}
LAYERS = {
    f"{world}.{name}": layer
    for world, layers in {"linen": LINEN, "nnx": NNX}.items()
    for name, layer in layers.items()
}


def parameters_of(layer):
    """The arguments of a layer but `parent` and `name`, which every linen module has."""
    parameters = inspect.signature(layer).parameters
    return {name: each for name, each in parameters.items() if name not in ("parent", "name")}


def texts_of(layer):
    """Reads the entries of `Args:` or `Attributes:`, by name."""
    doc = inspect.cleandoc(layer.__doc__) + "\n"
    section = re.search(r"^(?:Args|Attributes):\n((?:  .*\n)*)", doc, re.MULTILINE)[1]
    return dict(re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE))


def plain(kind):
    """A type that is equal however it was written: `typing.Mapping`, `collections.abc.Mapping`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    origin = typing.Union if origin is types.UnionType else origin
    return (origin, *map(plain, args)) if args else kind


@pytest.mark.parametrize("name", LAYERS)
def test_every_argument_has_a_text_and_nothing_else_does(name):
    texts = texts_of(LAYERS[name])
    assert [*texts] == [*parameters_of(LAYERS[name])]
    assert "see flax's layer." not in texts.values()


@pytest.mark.parametrize(
    ("module", "options"), [(MatmulModule, LayerOptions), (ExpertsModule, UnshardedOptions)]
)
def test_fields_of_linen_are_the_options(module, options):
    """The names, types and defaults that linen declares, nnx declares, and a call has."""
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    kinds = typing.get_type_hints(module)
    own = {field.name: field.default for field in dataclasses.fields(module)}
    for other in ("parent", "name", "recipe"):
        own.pop(other, None)
    assert {name: kinds[name] for name in own} == typing.get_type_hints(options)
    assert own == {name: defaults[name] for name in own}


@pytest.mark.parametrize("name", NNX)
def test_a_signature_of_nnx_has_every_option_and_its_default(name):
    layer, parameters = NNX[name], parameters_of(NNX[name])
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
    sharded = name not in ("FP8MoE", "FP8GroupedLinear")
    options = typing.get_type_hints(LayerOptions if sharded else UnshardedOptions)
    for option, kind in {"recipe": fp8.Recipe | None, **options}.items():
        assert parameters[option].default is None
        assert plain(parameters[option].annotation) == plain(kind)
    assert [*inspect.signature(layer.__init__).parameters] == ["self", *parameters]


@pytest.mark.parametrize(
    ("ours", "flax", "replaced"),
    [
        (fp8.nnx.FP8Linear, nnx.Linear, {"dot_general"}),
        (fp8.nnx.FP8LinearGeneral, nnx.LinearGeneral, {"dot_general", "dot_general_cls"}),
        (fp8.nnx.FP8Einsum, nnx.Einsum, {"einsum_op"}),
    ],
)
def test_a_signature_of_nnx_has_every_argument_of_flax(ours, flax, replaced):
    parameters = parameters_of(ours)
    kinds = typing.get_type_hints(flax.__init__)
    theirs = {**inspect.signature(flax.__init__).parameters}
    del theirs["self"]
    for name in replaced:
        del theirs[name]
    for name, each in theirs.items():
        assert parameters[name].default == each.default, name
        if each.kind is each.KEYWORD_ONLY:
            assert plain(parameters[name].annotation) == plain(kinds[name]), name


def test_a_signature_is_true():
    shown = parameters_of(fp8.nnx.FP8Linear)
    defaults = {
        name: each.default for name, each in shown.items() if each.default is not each.empty
    }
    layer = fp8.nnx.FP8Linear(in_features=8, out_features=4, rngs=nnx.Rngs(0), **defaults)
    assert layer.dot_general.recipe == fp8.recipes.delayed()
    assert [*inspect.signature(layer).parameters] == ["inputs", "out_sharding"]


def test_a_layer_of_a_user_has_its_own_signature():
    class Wide(fp8.nnx.FP8Linear):
        def __init__(self, size: int, rngs: nnx.Rngs):
            super().__init__(size, 4 * size, rngs=rngs)

    assert [*inspect.signature(Wide).parameters] == ["size", "rngs"]


def test_texts_are_shared_and_own_texts_win():
    shared = texts_of(_layer_arguments)
    for layer in (fp8.linen.FP8Dense, fp8.nnx.FP8Linear, fp8.linen.FP8MoE, fp8.nnx.FP8MoE):
        assert texts_of(layer)["kernels"] == shared["kernels"]
    for layer in (fp8.linen.FP8MoE, fp8.nnx.FP8MoE):
        assert "router" in texts_of(layer)["param_dtype"]
        assert "router" not in shared["param_dtype"]


def test_every_shared_text_has_a_reader():
    used = {name for layer in LAYERS.values() for name in parameters_of(layer)}
    assert {*texts_of(_layer_arguments)} <= used


def test_an_argument_that_flax_adds_is_shown():
    @documented
    class Newer(nn.Dense):
        """A layer.

        Attributes:
          features: N.
        """

        axis_name: str = ""

    assert texts_of(Newer)["axis_name"] == "see flax's layer."
    assert texts_of(Newer)["features"] == "N."


def literal_docstrings():
    """Reads the docstrings of layers as the sources have them, which is what an IDE shows."""
    for path in [*(ROOT / "jaxfp8/linen").iterdir(), *(ROOT / "jaxfp8/nnx").iterdir()]:
        for node in ast.parse(path.read_text()).body if path.suffix == ".py" else ():
            if "documented" in map(ast.unparse, getattr(node, "decorator_list", ())):
                yield f"{path.parent.name}.{node.name}", ast.get_docstring(node)


def test_a_literal_docstring_says_where_the_options_are_told():
    literal = dict(literal_docstrings())
    assert {*literal} == {*LAYERS} - {"linen.TrainState"}
    places = ("`fp8.dot_general`", "`fp8.ragged_dot`", "`fp8.moe.swiglu_experts`")
    for name, doc in literal.items():
        assert any(place in doc.split("\n\n")[1] for place in places), name


def test_python_without_docstrings():
    program = (
        "import inspect, jaxfp8 as fp8; "
        "assert fp8.nnx.FP8Linear.__doc__ is None; "
        "print(*inspect.signature(fp8.nnx.FP8Linear).parameters); "
        "print(*inspect.signature(fp8.linen.FP8Dense).parameters)"
    )
    run = subprocess.run(
        [sys.executable, "-OO", "-c", program],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all("kernels" in line for line in run.stdout.splitlines())
