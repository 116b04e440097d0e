"""docs/coming-from.md keeps its word: swaps, tables, and what it says of flax and qwix.

The names of TransformerEngine, torchao and MaxText were read in their sources. Here their sides of
the diffs are only parsed.
"""

import ast
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from pages import ROOT, fences, sides_of

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DotGeneral

PAGE = ROOT / "docs" / "coming-from.md"
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # what readers have
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),  # it uses old names of flax
]

DIFFS = {"te plug", "te layer", "qwix", "flax", "flax, one line", "torchao", "bf16"}
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def relative(a, b) -> float:
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


@pytest.fixture(scope="module")
def diffs(page) -> dict[str, tuple[str, str]]:
    found = {fence.mark: sides_of(fence.code) for fence in fences(page, "diff")}
    assert set(found) == DIFFS
    return found


@pytest.fixture(scope="module")
def names(page) -> dict:
    """What the page has defined before its first diff."""
    namespace = {"__name__": "__main__"}
    for fence in fences(page):
        if fence.tags == ("diff",):
            return namespace
        if fence.tags == ("python",):
            exec(fence.code, namespace)
    raise AssertionError("no diff")


def run(code: str, names: dict) -> dict:
    namespace = dict(names)
    exec(code, namespace)
    return namespace


@pytest.mark.parametrize("mark", sorted(DIFFS))
def test_both_sides_of_each_diff_are_python(diffs, mark):
    before, after = diffs[mark]
    assert ast.dump(ast.parse(before)) != ast.dump(ast.parse(after))
    assert "jaxfp8" not in before.lower()
    assert "fp8.recipes" in after


def test_diff_of_te_plug(diffs, names):
    block = run(diffs["te plug"][1], names)["Block"]()
    y, variables = jax.jit(block.init_with_output)(jax.random.key(1), names["x"])
    assert set(variables) == {"params"}
    plain = jax.jit(nn.Dense(64, dtype=jnp.bfloat16).apply)(
        {"params": variables["params"]["Dense_0"]}, names["x"]
    )
    assert 0.01 < relative(y, plain) < 0.06


def test_diff_of_te_layer(diffs, names):
    ran = run(diffs["te layer"][1], names)
    history = ran["variables"][COLLECTION]["FP8DotGeneral_0"]["fp8"].amax_history
    assert history.shape == (3, 1024)
    assert (history[:, -1] > 0).all()  # the step remembered x, w and g
    again = ran["train_step"](ran["variables"], ran["opt"], names["x"], names["y"])
    assert 0 < float(again[2]) < float(ran["loss"])


@pytest.fixture(scope="module")
def flaxs_side(diffs, names):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run(diffs["flax"][0], names)


def losses_of(ran: dict, names: dict) -> list[float]:
    """Those of three steps. The page has taken the first one."""
    ts, losses = ran["ts"], [float(ran["loss"])]
    for _ in range(2):
        ts, loss = ran["train_step"](ts, names["x"], names["y"])
        losses.append(float(loss))
    return losses


def test_diff_of_flax(diffs, names, flaxs_side):
    """Both sides train alike: not equal, because flax's first step has scales of 1."""
    ran = run(diffs["flax"][1], names)
    assert set(ran["ts"].params["params"]) == {"Dense_0", "Dense_1"}
    theirs, ours = losses_of(flaxs_side, names), losses_of(ran, names)
    assert theirs[0] != ours[0]
    assert ours == pytest.approx(theirs, rel=0.03)
    assert ours[-1] < 0.9 * ours[0]


def test_diff_of_flax_with_a_recipe_without_state(diffs, names, flaxs_side):
    """One line changes: flax's TrainState and the old train step are what they were."""
    before, after = diffs["flax, one line"]
    old = diffs["flax"][0]
    assert old.count(before) == 1
    ran = run(old.replace(before.strip(), after.strip()), names)
    assert set(ran["variables"]) == {"params"}
    assert losses_of(ran, names) == pytest.approx(losses_of(flaxs_side, names), rel=0.03)


@pytest.fixture(scope="module")
def ours_for_qwix(diffs, names):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run(diffs["qwix"][1], names)


def test_diff_of_qwix(ours_for_qwix):
    ours = ours_for_qwix
    assert ours["loss"] > 0
    recipes = {row.path: row.recipe for row in ours["coverage"]}
    assert recipes == {"up": "current", "down": "current", "head": ""}


def test_both_sides_of_qwix(diffs, names, ours_for_qwix):
    pytest.importorskip("qwix")
    theirs = run(diffs["qwix"][0], names)
    assert float(theirs["loss"]) == pytest.approx(float(ours_for_qwix["loss"]), rel=1e-5)
    grads = [jax.tree.leaves(side["grads"]) for side in (theirs, ours_for_qwix)]
    for a, b in zip(*grads, strict=True):
        assert relative(a, b) < 1e-5


def test_diff_of_torchao(diffs, names):
    unchanged = diffs["qwix"][1].split("model, coverage")[0]
    model = run(unchanged, names)["model"]
    coverage = run(diffs["torchao"][1], names | {"model": model})["coverage"]
    recipes = {row.path: row.recipe for row in coverage}
    assert recipes == {"up": "rowwise", "down": "rowwise", "head": ""}


def test_diff_of_bf16(diffs, names):
    layers = [run(code, names)["layer"] for code in diffs["bf16"]]
    before, after = (jax.jit(layer.init)(jax.random.key(1), names["x"]) for layer in layers)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after))


# A recipe in a table is the first code of its cell: a call of a preset, or a name of the page.
CALL = re.compile(r"`((?:delayed|current|rowwise|blockwise|mxfp8|static|identity)\([^`]*\))`")


def test_recipes_in_tables(page, names):
    rows = [line for line in page.splitlines() if line.startswith("|")]
    calls = [call for row in rows for call in CALL.findall(row)]
    assert len(calls) > 35
    space = {name: getattr(fp8.recipes, name) for name in dir(fp8.recipes)} | {"fp8": fp8}
    for call in calls:
        assert isinstance(eval(call, space), fp8.Recipe), call
    for own in ("forward_only", "mx_wgrad_high", "mx_hybrid"):
        assert any(f"`{own}`, above" in row for row in rows)
        assert isinstance(names[own], fp8.Recipe)


def test_names_of_ours(page):
    """Every `fp8.a.b` of the page exists."""
    paths = set(re.findall(r"\bfp8((?:\.[A-Za-z_]\w*)+)", page))
    assert len(paths) > 20
    for path in paths:
        functools.reduce(getattr, path.split(".")[1:], fp8)


# What the page says of flax: it changes with flax only, so these tests are slow.


@functools.cache
def stepper(plug):
    """A step of one layer without an optimizer, in which g does not depend on x."""
    x, g = (jax.random.normal(jax.random.key(k), (64, 128)) for k in range(2))
    layer = nn.Dense(128, dot_general_cls=plug)

    def loss(params, state, growth, factor):
        y = layer.apply({"params": params, COLLECTION: state}, x * growth)
        return factor * jnp.sum(y * g)

    def of_flax(*arguments):
        return None, *jax.grad(loss, (0, 1))(*arguments)

    variables = jax.jit(layer.init)(jax.random.key(1), x)
    step = of_flax if plug is nn.Fp8DirectDotGeneralOp else fp8.value_and_grad(loss)
    return variables["params"], variables[COLLECTION], jax.jit(step)


def after_steps(plug, steps: int, factor: float = 1.0):
    """Gradient of the kernel and the state after some steps, in which x grows."""
    params, state, step = stepper(plug)
    for number in range(steps):
        _, grads, state = step(params, state, 1.0 + number, factor)
    return grads["kernel"], next(iter(state.values()))


DELAYED = FP8DotGeneral.using(fp8.recipes.delayed(history_length=1024))


@pytest.mark.slow
def test_flax_has_the_same_scales_after_the_first_step():
    # flax stores the scales with which a step cast, we store those of the next step
    _, theirs = after_steps(nn.Fp8DirectDotGeneralOp, 4)
    _, ours = after_steps(DELAYED, 3)
    scales = [theirs[f"{name}_scale"][0] for name in ("input", "kernel", "output_grad")]
    np.testing.assert_array_equal(np.stack(scales), ours["fp8"].scale)


@pytest.mark.slow
def test_flax_loses_a_small_first_gradient():
    theirs, _ = after_steps(nn.Fp8DirectDotGeneralOp, 1, 1e-7)
    ours, _ = after_steps(DELAYED, 1, 1e-7)
    assert not theirs.any()
    assert ours.all()


@pytest.mark.slow
def test_flax_adds_the_amaxes_of_a_layer_that_is_used_twice():
    class Twice(nn.Module):
        plug: object

        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(128, dot_general_cls=self.plug)
            return layer(layer(x))

    x = jax.random.normal(jax.random.key(0), (64, 128))
    amax = float(jnp.abs(x).max())
    model = Twice(nn.Fp8DirectDotGeneralOp)
    init = lambda: jax.jit(model.init)(jax.random.key(1), x)
    grads = jax.jit(jax.grad(lambda v: model.apply(v, x).sum()))(init())
    theirs = grads[COLLECTION]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    assert theirs["input_scale"] == 2
    assert theirs["input_amax_history"][0] > 1.5 * amax
    model = Twice(FP8DotGeneral.using(fp8.recipes.delayed()))
    variables = init()
    loss = lambda params, state: model.apply({"params": params, COLLECTION: state}, x).sum()
    step = jax.jit(fp8.value_and_grad(loss))
    _, _, state = step(variables["params"], variables[COLLECTION])
    ours = state["Dense_0"]["FP8DotGeneral_0"]["fp8"].amax_history[0, -1]
    assert amax <= ours <= 1.125 * amax


@pytest.mark.slow
def test_flax_freezes_at_an_infinite_amax():
    scale, history = jnp.ones(1), jnp.zeros(4)
    scales = []
    for amax in (1.0, jnp.inf, *[8.0] * 6):
        scale, history = fp8_ops.update_fp8_meta(jnp.full(1, amax), E4M3, scale, history)
        scales.append(float(scale[0]))
    assert scales[2:6] == [scales[1]] * 4  # four steps later it has left the history
    assert scales[6] > scales[5]


@pytest.mark.slow
def test_flax_and_qwix_refuse_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (64, 128))
    grad = lambda layer: jax.jit(jax.grad(lambda v, x: jnp.sum(layer.apply(v, x))))
    theirs = nn.Dense(64, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    variables = jax.jit(theirs.init)(jax.random.key(1), x)
    with jax.set_mesh(mesh):
        split, whole = jax.device_put(x, jax.P("data")), jax.device_put(variables, jax.P())
        with pytest.raises(Exception, match="sharded and it is ambiguous"):
            grad(theirs)(whole, split)
        ours = FP8Dense(64, recipe=fp8.recipes.current())
        grad(ours)({"params": whole["params"]}, split)
        qwix = pytest.importorskip("qwix")
        rule = qwix.QtRule(weight_qtype=E4M3, act_qtype=E4M3, bwd_qtype=E5M2)
        theirs = qwix.quantize_model(nn.Dense(64), qwix.QtProvider([rule]))
        with pytest.raises(Exception, match="sharded and it is ambiguous"):
            grad(theirs)({"params": whole["params"]}, split)


# What the page says of qwix: (rule, our recipe, whether gradients agree as well).

QWIX = {
    "tensor": (
        {"weight_qtype": E4M3, "bwd_qtype": E5M2, "disable_channelwise_axes": True},
        fp8.recipes.current(),
        True,
    ),
    "channel": (
        {"weight_qtype": E4M3, "bwd_qtype": E5M2},
        fp8.recipes.rowwise(gradient=fp8.E5M2, power_of_two=False),
        False,
    ),
    "tile": (
        {"weight_qtype": E4M3, "bwd_qtype": E5M2, "tile_size": 128},
        fp8.recipes.blockwise(power_of_two=False, w_tile_dim=1),
        False,
    ),
    "mxfp8": ({"weight_qtype": "mxfp8", "tile_size": 32}, fp8.recipes.mxfp8(), False),
    "fixed": (
        {
            "weight_qtype": E4M3,
            "bwd_qtype": E5M2,
            "disable_channelwise_axes": True,
            "act_calibration_method": "fixed,-4,4",
            "weight_calibration_method": "fixed,-0.25,0.25",
            "bwd_calibration_method": "fixed,-8,8",
        },
        fp8.recipes.static(x_scale=4 / 448, w_scale=0.25 / 448, g_scale=8 / 57344),
        False,
    ),
    "forward": ({"weight_qtype": E4M3, "disable_channelwise_axes": True}, None, True),
}


@pytest.mark.parametrize("row", QWIX)
def test_a_rule_of_qwix_and_its_recipe(row, names):
    qwix = pytest.importorskip("qwix")
    fields, recipe, grads_agree = QWIX[row]
    rule = qwix.QtRule(act_qtype=fields["weight_qtype"], **fields)
    x, g = (jax.random.normal(jax.random.key(k), (64, 256)) for k in range(2))
    theirs = qwix.quantize_model(nn.Dense(256), qwix.QtProvider([rule]))
    ours = FP8Dense(256, recipe=recipe or names["forward_only"])
    variables = jax.jit(theirs.init)(jax.random.key(1), x)
    assert set(variables) == {"params"}

    def loss(layer, variables):
        y = layer.apply(variables, x)
        return jnp.sum(y * g), y

    run_of = lambda layer: jax.jit(jax.grad(functools.partial(loss, layer), has_aux=True))
    (a, y_of_qwix), (b, y) = (run_of(layer)(variables) for layer in (theirs, ours))
    assert relative(y_of_qwix, y) < 1e-5
    error = relative(a["params"]["kernel"], b["params"]["kernel"])
    assert (error < 1e-5) == grads_agree


def test_stochastic_rounding_of_qwix_does_nothing_for_fp8():
    qwix = pytest.importorskip("qwix")
    x, g = (jax.random.normal(jax.random.key(k), (64, 256)) for k in range(2))
    rule = qwix.QtRule(
        weight_qtype=E4M3, act_qtype=E4M3, bwd_qtype=E5M2, bwd_stochastic_rounding="uniform"
    )
    theirs = qwix.quantize_model(nn.Dense(256), qwix.QtProvider([rule]))
    ours = FP8Dense(256, recipe=fp8.recipes.current(gradient_rounding="stochastic"))
    for layer, stream, same in ((theirs, "stochastic_rounding", True), (ours, "fp8", False)):
        rngs = {"params": jax.random.key(1), stream: jax.random.key(2)}
        variables = jax.jit(layer.init)(rngs, x)
        loss = lambda v, key, layer=layer, stream=stream: jnp.sum(
            layer.apply(v, x, rngs={stream: key}) * g
        )
        grad = jax.jit(jax.grad(loss))
        a, b = (grad(variables, jax.random.key(k))["params"]["kernel"] for k in (3, 4))
        assert bool((a == b).all()) == same
