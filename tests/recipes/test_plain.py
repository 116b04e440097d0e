"""A recipe that was written and read again is the same recipe: dicts, JSON, TOML, text."""

import dataclasses
import json
import tomllib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.quantizers import AbstractQuantizer, Current, Delayed, Identity, Static
from jaxfp8.recipes._presets import PRESETS, parameters_of
from jaxfp8.recipes._text import _READERS

STATIC = {"x_scale": 0.1, "w_scale": 0.2, "g_scale": 0.3}
DEFAULTS = [fp8.recipes.get(name, **(STATIC if name == "static" else {})) for name in PRESETS]
SCALES = st.floats(2.0**-126, 2.0**126)
VALUES = {
    "forward": st.sampled_from([fp8.E4M3, fp8.E5M2]),
    "gradient": st.sampled_from([fp8.E4M3, fp8.E5M2]),
    "history_length": st.integers(1, 2048),
    "algorithm": st.sampled_from(["max", "most_recent"]),
    "margin": st.integers(0, 64),
    "power_of_two": st.booleans(),
    "scale_rounding": st.sampled_from(["rceil", "floor"]),
    "gradient_rounding": st.sampled_from(["nearest", "stochastic"]),
    "high_precision_wgrad": st.booleans(),
    "x_tile_dim": st.sampled_from([1, 2]),
    "w_tile_dim": st.sampled_from([1, 2]),
    "g_tile_dim": st.sampled_from([1, 2]),
    "x_scale": SCALES | st.integers(1, 9) | SCALES.map(np.float32),
    "w_scale": SCALES,
    "g_scale": SCALES,
}


@st.composite
def of_presets(draw):
    """A recipe that a preset makes."""
    name = draw(st.sampled_from(sorted(PRESETS)))
    fields = {field: draw(VALUES[field]) for field in parameters_of(name)}
    try:
        return fp8.recipes.get(name, **fields)
    except ValueError:  # two 2D tiles or two E5M2 operands
        hypothesis.reject()


@st.composite
def changed(draw):
    """A recipe with the matmuls of several recipes, or with another name."""
    recipe, *others = draw(st.lists(of_presets(), min_size=1, max_size=3))
    fields = {"name": draw(st.sampled_from([recipe.name, "mine", "current", 'a "b"\n#']))}
    for other in others:
        matmul = draw(st.sampled_from(["fprop", "dgrad", "wgrad"]))
        fields[matmul] = getattr(other, matmul)
    try:
        return dataclasses.replace(recipe, **fields)
    except ValueError:  # two lengths of histories
        hypothesis.reject()


def toml(plain, path=()):
    """A dict as TOML: values first, then tables. JSON's strings, numbers and lists are TOML's."""
    values = {key: value for key, value in plain.items() if not isinstance(value, dict)}
    lines = [f"[{'.'.join(path)}]"] if path else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    for key in plain.keys() - values.keys():
        lines += toml(plain[key], (*path, key))
    return lines


def assert_same(recipe, again):
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.rows == recipe.rows
    assert [r.fingerprint for r in again.rows] == [r.fingerprint for r in recipe.rows]
    assert repr(again.rows) == repr(recipe.rows)


def assert_round_trip(recipe):
    plain = fp8.recipes.to_dict(recipe)
    assert_same(recipe, fp8.recipes.from_dict(plain))
    assert_same(recipe, fp8.recipes.from_dict(json.loads(json.dumps(plain, allow_nan=False))))
    document = "\n".join(toml({"recipe": plain}))
    assert_same(recipe, fp8.recipes.from_dict(tomllib.loads(document)["recipe"]))
    return plain


@pytest.mark.parametrize("recipe", DEFAULTS, ids=lambda recipe: recipe.name)
def test_defaults(recipe):
    plain = assert_round_trip(recipe)
    assert plain["preset"] == recipe.name
    assert plain.keys() == {"preset", *parameters_of(recipe.name)}
    text = fp8.recipes.to_string(recipe)
    static = "static(x_scale=0.1, w_scale=0.2, g_scale=0.3)"
    assert text == (static if recipe.name == "static" else f"{recipe.name}()")


@hypothesis.given(of_presets())
def test_every_field_of_every_preset(recipe):
    plain = assert_round_trip(recipe)
    assert plain["preset"] == recipe.name
    assert all(type(value) in (str, int, float, bool) for value in plain.values())
    assert_same(recipe, fp8.recipes.parse(fp8.recipes.to_string(recipe)))


@hypothesis.given(changed())
def test_changed_recipes(recipe):
    plain = assert_round_trip(recipe)
    if "preset" in plain:
        assert_same(recipe, fp8.recipes.parse(fp8.recipes.to_string(recipe)))
    else:
        with pytest.raises(ValueError, match="to_dict"):
            fp8.recipes.to_string(recipe)


def test_a_new_field_of_a_preset_has_a_reader():
    fields = {field for name in PRESETS for field in parameters_of(name)}
    assert fields == _READERS.keys() == VALUES.keys()


@pytest.mark.parametrize(
    "quantizer",
    [
        Current(format=fp8.E4M3, granularity=fp8.quantizers.PerRow()),
        Current(
            format=fp8.E5M2,
            granularity=fp8.PerBlock((32, 32)),
            scale_format=fp8.E8M0,
            scale_rounding="floor",
        ),
        Delayed(format=fp8.E4M3, history_length=3, margin=2, rounding="stochastic"),
        Static(format=fp8.E4M3, scale=np.float32(0.1)),
        Identity(),
    ],
    ids=["rows", "square tiles", "delayed", "static", "identity"],
)
def test_quantizers(quantizer):
    operands = fp8.recipes.Operands(lhs=quantizer, rhs=Identity())
    assert_round_trip(fp8.Recipe(name="mine", fprop=operands, dgrad=operands, wgrad=operands))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(AbstractQuantizer):
    granularity: fp8.PerTensor = fp8.PerTensor()
    value_format: fp8.quantizers.Format = fp8.E4M3
    levels: tuple = (1, (2.5, "E"))
    label: str = "plain"


def of(quantizer):
    operands = fp8.recipes.Operands(lhs=quantizer, rhs=quantizer)
    return fp8.Recipe(name="mine", fprop=operands, dgrad=operands, wgrad=operands)


def test_own_quantizers():
    recipe, own = of(Mine(levels=((1,), 0.5))), {"mine": Mine}
    with pytest.raises(TypeError, match=mentions("Mine", "quantizers={'Mine': Mine}")):
        fp8.recipes.to_dict(recipe)
    plain = fp8.recipes.to_dict(recipe, quantizers=own)
    assert plain["fprop"]["lhs"]["class"] == "mine"
    assert fp8.recipes.from_dict(json.loads(json.dumps(plain)), quantizers=own) == recipe
    with pytest.raises(ValueError, match=mentions("unknown class 'mine'", "quantizers=")):
        fp8.recipes.from_dict(plain)
    for bad in (Mine(label=None), Mine(label="E5M2"), Mine(label=b"bytes"), Mine(label=object)):
        with pytest.raises(ValueError, match="plain"):
            fp8.recipes.to_dict(of(bad), quantizers=own)
    with pytest.raises(ValueError, match="'Current'"):
        fp8.recipes.to_dict(recipe, quantizers={"Current": Mine})


def test_dicts_of_earlier_versions():
    recipe = dataclasses.replace(fp8.recipes.identity(), name="mine")
    plain = fp8.recipes.to_dict(recipe)
    earlier = plain | {
        matmul: {side: fields | {"granularity": {"class": "PerTensor"}}
                 for side, fields in plain[matmul].items()}
        for matmul in ("fprop", "dgrad", "wgrad")
    }  # fmt: skip
    assert fp8.recipes.from_dict(earlier) == recipe
    earlier["fprop"]["lhs"]["granularity"] = {"class": "PerRow"}
    with pytest.raises(ValueError, match=mentions("fprop.lhs", "'granularity'")):
        fp8.recipes.from_dict(earlier)


FULL = fp8.recipes.to_dict(dataclasses.replace(fp8.recipes.current(), name="mine"))


def with_lhs(**fields):
    return FULL | {"fprop": {**FULL["fprop"], "lhs": FULL["fprop"]["lhs"] | fields}}


@pytest.mark.parametrize(
    ("plain", "parts"),
    [
        ({}, ("preset", "Missing are ['name', 'fprop', 'dgrad', 'wgrad']")),
        ({"present": "current"}, ("unknown are ['present']", "Did you mean 'preset'?")),
        ({"preset": "curent"}, ("'curent'", "'identity'", "Did you mean 'current'?")),
        ({"preset": 3}, ("preset=3", "string")),
        ({"preset": "current", "margin": 1}, ("['margin']", "'forward'")),
        ({"preset": "mxfp8", "w_tiledim": 2}, ("w_tiledim", "Did you mean 'w_tile_dim'?")),
        ({"preset": "mxfp8", "w_tile_dim": 3}, ("w_tile_dim=3", "32x32")),
        ({"preset": "current", "forward": "e4m3"}, ("forward='e4m3'", "Did you mean 'E4M3'?")),
        ({"preset": "current", "forward": "E8M0"}, ("E8M0", "use one of")),
        ({"preset": "static", "x_scale": 1.0}, ("w_scale", "g_scale")),
        ({"preset": "current", "name": "mine"}, ("['name']",)),
        (FULL | {"more": 1}, ("unknown are ['more']",)),
        (FULL | {"name": 1}, ("name=1", "string")),
        (FULL | {"fprop": "x"}, ("fprop is 'x'", "['lhs', 'rhs']")),
        (FULL | {"fprop": {"lhs": {}}}, ("Missing are ['rhs']",)),
        (FULL | {"fprop": {"lhs": {}, "rhs": {}}}, ("fprop.lhs={}", "a class")),
        (with_lhs(**{"class": "Curent"}), ("fprop.lhs", "'Curent'", "mean 'Current'?")),
        (with_lhs(margin=1), ("fprop.lhs", "'margin'", "'power_of_two'")),
        (with_lhs(format="E3M4"), ("fprop.lhs", "E3M4")),
        (with_lhs(granularity={"class": "PerAxis"}), ("fprop.lhs.granularity", "'PerRow'")),
        (with_lhs(granularity={"class": "PerBlock", "tile": [1]}), ("granularity", "tile=(1,)")),
    ],
)
def test_wrong_dicts(plain, parts):
    with pytest.raises(ValueError, match=mentions(*parts)):
        fp8.recipes.from_dict(plain)


@pytest.mark.parametrize(
    ("function", "argument", "part"),
    [
        (fp8.recipes.from_dict, "current", "fp8.recipes.parse"),
        (fp8.recipes.parse, {"preset": "current"}, "fp8.recipes.from_dict"),
        (fp8.recipes.to_dict, "current", "fp8.recipes.current()"),
        (fp8.recipes.to_string, fp8.recipes.current, "fp8.recipes.current()"),
    ],
)
def test_wrong_types(function, argument, part):
    with pytest.raises(TypeError, match=mentions(part)):
        function(argument)
