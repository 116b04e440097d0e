"""Rules, kinds of layers that are kept, blocks, and the error for each mistake."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from zoo import LM, NNXLM, TOKENS, WIDTH

import jaxfp8 as fp8
from jaxfp8.conversion import Rule
from jaxfp8.conversion._convert import _ends_of
from jaxfp8.conversion._rule import Layer

CURRENT, BLOCKWISE = fp8.recipes.current(), fp8.recipes.blockwise()
LINEN = LM(attention=False)
MODELS = {"linen": LINEN, "nnx": NNXLM(nnx.Rngs(0), attention=False)}


@pytest.fixture(params=MODELS)
def convert(request):
    model = MODELS[request.param]
    return functools.partial(fp8.convert, model, CURRENT, inputs=(TOKENS,))


def recipes(coverage):
    return {row.path: row.recipe for row in coverage}


def test_the_first_match_decides(convert):
    _, coverage = convert(
        rules=[
            (r"blocks.0/up", None),
            (r"blocks.\d/up", BLOCKWISE),
            (lambda path, shape: shape[1:] == (64, WIDTH), fp8.recipes.mxfp8()),
        ]
    )
    ups = [row for row in coverage if row.path.endswith("up")]
    assert [row.recipe for row in ups] == ["", "blockwise", "blockwise"]
    assert ups[0].reason == "rule 'blocks.0/up'"
    downs = [row.recipe for row in coverage if row.path.endswith("down")]
    assert downs == ["mxfp8"] * 3
    assert recipes(coverage)["mix"] == "current"


def test_a_class_selects_its_layers():
    _, coverage = fp8.convert(LM(), CURRENT, inputs=(TOKENS,), rules=[(nn.DenseGeneral, None)])
    assert all((row.recipe == "") == ("Attention" in row.path) for row in list(coverage)[1:-1])


def test_a_rule_comes_before_what_is_kept(convert):
    _, coverage = convert(rules=[("head", BLOCKWISE)])
    assert recipes(coverage)["head"] == "blockwise"


def test_a_rule_has_options():
    """They replace those of `fp8.convert`."""
    h200, b200 = fp8.Kernels("h200"), fp8.Kernels("b200")
    rule = Rule(".*/up", BLOCKWISE, kernels=h200)
    for general in (None, b200):
        how = {"rules": [rule], "kernels": general, "keep": ()}
        mine, _ = fp8.convert(MODELS["nnx"], CURRENT, inputs=(TOKENS,), **how)
        assert mine.blocks[0].up.dot_general.kernels == h200
        assert mine.blocks[0].down.dot_general.kernels == general


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("blcoks_0/up", r"rule 'blcoks_0/up' matches no layer\. The nearest paths are \['blocks"),
        ("up", r"rule 'up' matches no layer.*must match the whole path: write '\.\*up\.\*'"),
        (nn.Conv, r"rule Conv matches no layer\. The types are \["),
        (lambda path, shape: False, r"rule .*<lambda> matches no layer\. The paths are \["),
    ],
)
def test_a_rule_that_matches_nothing(convert, match, message):
    with pytest.raises(ValueError, match=message):
        convert(rules=[(match, None)])


def test_a_rule_that_is_never_reached(convert):
    with pytest.raises(ValueError, match=r"rule '\.\*/up' decides no layer: earlier rules match"):
        convert(rules=[("blocks.*", None), (".*/up", BLOCKWISE)])


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ([("(", None)], ValueError, r"rule '\(' is no regular expression"),
        ([(3, None)], TypeError, "rule 3 is of type int"),
        ([("head", "current")], TypeError, "recipe='current' is of type str"),
        (["head"], TypeError, r"rules holds 'head'\. Each rule is"),
        ("head", TypeError, "rules='head' must be a sequence"),
        ([(lambda path, shape: 1, None)], TypeError, "returned 1 for layer"),
    ],
)
def test_what_is_no_rule(convert, rules, error, message):
    with pytest.raises(error, match=message):
        convert(rules=rules)


def test_an_unknown_option():
    with pytest.raises(TypeError, match="a rule has no option kernel="):
        Rule("head", CURRENT, kernel=1)
    with pytest.raises(TypeError, match=r"fp8\.convert has no option kernel="):
        fp8.convert(LINEN, CURRENT, inputs=(TOKENS,), kernel=1)


def test_a_layer_that_cannot_take_a_recipe(convert):
    with pytest.raises(ValueError, match=r"layer 'embedding', of type Embed, which cannot take it"):
        convert(rules=[("embedding", BLOCKWISE)])


def test_a_layer_with_a_matmul_of_its_own():
    model = nn.Dense(4, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k))
    x = jnp.ones((2, WIDTH))
    with pytest.raises(ValueError, match="has a matmul of its own, dot_general="):
        fp8.convert(model, CURRENT, inputs=(x,))
    ours = fp8.linen.FP8DenseGeneral(4)
    with pytest.raises(ValueError, match="an FP8 layer already"):
        fp8.convert(ours, CURRENT, inputs=(x,))
    with pytest.raises(ValueError, match="an FP8 layer already"):
        fp8.convert(fp8.nnx.FP8Linear(WIDTH, 4, rngs=nnx.Rngs(0)), CURRENT)


def test_an_error_in_a_matmul_names_the_layer():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, precision=("high", "default"), name="odd")(x)

    with pytest.raises(ValueError, match="precision") as error:
        fp8.convert(Odd(), CURRENT, inputs=(jnp.ones((4, 16)),))
    assert error.value.__notes__[0] == "fp8.convert: in layer 'odd', a Dense."


KINDS = {
    "router": "router", "router_logits": "router", "gate": "router", "gate_proj": "",
    "lm_head": "lm_head", "logits_dense": "lm_head", "output": "lm_head", "up": "", "heads": "",
    "any_size_of_a_vocabulary": "lm_head",
}  # fmt: skip


@functools.cache
def with_kinds(**options):
    """The coverage of a model that has a layer of each name."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Embed(96, 8)(jnp.zeros(3, jnp.int32))
            nn.Dense(64, name="always")(x)
            return [nn.Dense(96 if "vocabulary" in name else 8, name=name)(x) for name in KINDS]

    return fp8.convert(Net(), CURRENT, inputs=(jnp.ones((4, 64)),), **options)[1]


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_are_kept(name):
    assert with_kinds()[name].reason == (f"kept: {KINDS[name]}" if KINDS[name] else "")
    assert with_kinds(keep=())[name].recipe == "current"


def test_a_gate_as_wide_as_a_layer_is_no_router():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(128, name="gate")(x) * nn.Dense(128, name="up")(x)

    _, coverage = fp8.convert(Net(), CURRENT, inputs=(jnp.ones((4, 64)),))
    assert recipes(coverage) == {"gate": "current", "up": "current"}


def test_slow_layers_are_kept_where_a_chip_is_named():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            bf16 = {"param_dtype": jnp.bfloat16}
            return nn.Dense(4096, name="wide", **bf16)(x), nn.Dense(64, name="narrow", **bf16)(x)

    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    h200 = fp8.Kernels("h200")
    _, coverage = fp8.convert(Net(), CURRENT, inputs=(x,), kernels=h200)
    assert recipes(coverage) == {"wide": "current", "narrow": ""}
    assert coverage["narrow"].reason.startswith("kept: slow: estimated 0.")
    _, coverage = fp8.convert(Net(), CURRENT, inputs=(x,), kernels=h200, keep=("lm_head",))
    assert recipes(coverage) == {"wide": "current", "narrow": "current"}


def test_first_and_last_blocks_are_kept(convert):
    _, coverage = convert(keep_first=1, keep_last=1)
    for row in coverage:
        if row.path.startswith("blocks"):
            assert bool(row.recipe) == row.path.startswith(("blocks_1", "blocks/1"))


def test_blocks_of_one_end_are_kept():
    stacks = [["h_0", "h_1", "h_2"], ["g/0", "g/1", "g/2"]]
    assert _ends_of(stacks, 1, 0) == {"h_0", "g/0"}
    assert _ends_of(stacks, 0, 2) == {"h_1", "h_2", "g/1", "g/2"}


@pytest.mark.parametrize(
    ("model", "numbers", "message"),
    [
        (LINEN, {"keep_first": -1}, "keep_first=-1 must be a number of blocks"),
        (LINEN, {"keep_last": True}, "keep_last=True must be a number of blocks"),
        (LINEN, {"keep_first": 2, "keep_last": 1}, "leave no block of 'blocks_0' to 'blocks_2'"),
        (LM("scan", attention=False), {"keep_first": 1}, "the model has no numbered blocks"),
    ],
)
def test_blocks_that_cannot_be_kept(model, numbers, message):
    with pytest.raises(ValueError, match=message):
        fp8.convert(model, CURRENT, inputs=(TOKENS,), **numbers)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": LM(), "inputs": None}, TypeError, "linen LM, which makes its layers when it is"),
        ({"model": LM(), "inputs": TOKENS}, TypeError, "Write inputs=\\(x,\\)"),
        ({"model": LM(), "keep": "router"}, ValueError, "keep='router' must be a sequence"),
        ({"model": LM(), "keep": ("heads",)}, ValueError, "keep=\\('heads',\\) must be"),
        ({"model": LM(), "layers": [1]}, TypeError, "layers=\\[1\\] must be a dict of classes"),
        ({"model": LM(), "layers": {1: 2}}, TypeError, "A class and a function of"),
        ({"model": LM().apply}, TypeError, "model is of type method"),
        ({"model": LM(), "rules": [(".*", None)]}, ValueError, "no layer of the LM would run"),
        ({"model": LM().bind({})}, TypeError, "model is a bound LM"),
    ],
)
def test_arguments_that_cannot_be(arguments, error, message):
    given = {"inputs": (TOKENS,), "recipe": CURRENT} | arguments
    with pytest.raises(error, match=message):
        fp8.convert(**given)


class Wrapper:
    """As in transformers: parameters, and the linen module that takes them."""

    module = LINEN
    params: dict = {}  # noqa: RUF012


def test_a_wrapper_is_refused_with_its_module():
    with pytest.raises(TypeError, match=r"type Wrapper, which wraps the linen LM\. .*\.module, "):
        fp8.convert(Wrapper(), CURRENT, inputs=(TOKENS,))


def test_a_stack_along_another_axis():
    """State is stacked as the parameters are, and its rows are its last axis."""
    model = nn.vmap(
        nn.Dense, variable_axes={"params": 1}, split_rngs={"params": True}, axis_size=5,
        in_axes=None,
    )(8)  # fmt: skip
    with pytest.raises(fp8.FP8StateError, match="States of several layers or experts must be"):
        fp8.convert(model, fp8.recipes.delayed(), inputs=(jnp.ones((4, 16)),))
    fp8.convert(model, CURRENT, inputs=(jnp.ones((4, 16)),))


def test_a_function_is_asked_about_layers_with_a_shape():
    """An embedding has none, so `shape[1]` must not fail for it."""
    rule = Rule(lambda path, shape: shape[1] < 32, None)
    assert not rule.matches(Layer(path="embed", type=nn.Embed, obstacle="a lookup"))
    assert rule.matches(Layer(path="up", type=nn.Dense, shape=(8, 16, 4)))


def test_names_of_heads_in_a_scanned_block_are_no_heads():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(WIDTH, name="output")(x), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Embed(WIDTH, 8)(jnp.zeros(3, jnp.int32))  # as many positions as features
            nn.Embed(2 * WIDTH, 8)(jnp.zeros(3, jnp.int32))
            stack = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = stack(name="blocks")(x, None)
            return nn.Dense(2 * WIDTH, name="last")(x)

    _, coverage = fp8.convert(Net(), CURRENT, inputs=(jnp.ones((4, WIDTH)),))
    assert coverage["blocks/output"].recipe == "current"
    assert coverage["last"].reason == "kept: lm_head"


def test_blocks_of_several_types_are_one_stack():
    class First(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(x)

    class Other(First):
        pass

    class Net(nn.Module):
        def setup(self):
            self.layer = [First(), Other(), Other()]

        def __call__(self, x):
            for layer in self.layer:
                x = layer(x)
            return x

    _, coverage = fp8.convert(
        Net(), CURRENT, inputs=(jnp.ones((4, WIDTH)),), keep_first=1, keep_last=1
    )
    assert [row.recipe for row in coverage] == ["", "current", ""]
