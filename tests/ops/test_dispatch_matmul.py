"""Dispatch in FP8 and matmul, against dispatch in high precision, cast and matmul."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import moe_cases as cases
import numpy as np
import pytest
from moe_cases import EXACT, RECIPES, E, F, K, T, assert_same, distance, program

import jaxfp8 as fp8

SLOW = pytest.mark.slow
TILED, REMAT = ("mxfp8", "rowwise"), ("mxfp8", "delayed")
STATES = [(name, stacked) for name in RECIPES for stacked in (True, False)]
STATES = [case for case in STATES if case[1] or RECIPES[case[0]].rows]


def rows(*kept):
    """Recipes with the states that they take. Those that are not named are slow."""
    marks = lambda case: () if case in kept else SLOW
    return [pytest.param(*case, marks=marks(case)) for case in STATES]


@functools.cache
def sent(name, stacked, *, forward, backward):
    run = program(name, forward=forward, backward=backward)
    return run(cases.arrays(), cases.states(RECIPES[name], stacked))[:3]


# test_sent_in_fp8.py has the same property of mxfp8, of each matmul alone.
@pytest.mark.parametrize("backward", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize(("name", "stacked"), rows(("delayed", True), ("blockwise", True)))
def test_sent_in_fp8_is_sent_in_high_precision_and_cast(name, stacked, backward):
    """All bits of results, states and gradients, except those of wgrad's second cast."""
    y, (dx, dgates, dw_in, dw_out), state = sent(name, stacked, forward=True, backward=backward)
    want_y, want, want_state = sent(name, stacked, forward=False, backward=False)
    assert_same((y, dx, dgates, state), (want_y, want[0], want[1], want_state))
    if not backward:
        assert_same(dw_out, want[3])
    for mine, other in ((dw_in, want[2]), (dw_out, want[3])):
        if name in EXACT:
            assert_same(mine, other)
        assert distance(mine, other) <= 5e-4  # FP8 itself costs 3e-2
    assert not np.asarray(dw_in[5]).any()  # expert 5 has no tokens


@pytest.mark.parametrize(
    ("name", "stacked"),
    rows(("delayed", False), ("current", True), ("rowwise", True), ("mxfp8", True)),
)
def test_forward_is_ragged_dot_of_sorted_tokens(name, stacked):
    recipe, (x, gates, chosen, w, _, _) = RECIPES[name], cases.arrays()
    order = np.argsort(np.asarray(chosen).reshape(-1), kind="stable")
    sizes = np.bincount(np.asarray(chosen).reshape(-1), minlength=E)

    @jax.jit
    def run(x, gates, chosen, w, state):
        want = fp8.ragged_dot(x[order // 2], w, sizes, recipe=recipe, state=state)
        way = fp8.moe.route(chosen, experts=E)
        got = fp8.moe.dispatch_matmul(x, w, way, recipe=recipe, state=state)
        weights = fp8.moe.dispatch(way.of_choices, gates.reshape(-1))[:, None].astype(x.dtype)
        return got, want, want * weights, fp8.moe.combine(way, want * weights)

    state = cases.states(recipe, stacked)[0]
    got, want, weighted, combined = run(x, gates, chosen, w, state)
    assert_same(got, want)
    # Combined by hand, token by token.
    by_token = np.zeros((T, 2 * F))
    np.add.at(by_token, order // 2, np.asarray(weighted, np.float64))
    np.testing.assert_allclose(np.asarray(combined, np.float64), by_token, rtol=1e-2, atol=1e-3)


def test_experts_are_those_of_a_loop_in_float64():
    x, gates, chosen, w_in, w_out, g = (np.asarray(each, np.float64) for each in cases.arrays())
    want, dx = np.zeros((T, K)), np.zeros((T, K))
    for t in range(T):
        for j in range(2):
            e = int(chosen[t, j])
            a, b = np.split(x[t] @ w_in[e], 2)
            sigmoid = 1 / (1 + np.exp(-np.maximum(a, -700)))
            want[t] += gates[t, j] * (a * sigmoid * b) @ w_out[e]
            dh = gates[t, j] * g[t] @ w_out[e].T
            da = dh * b * (sigmoid + a * sigmoid * (1 - sigmoid))
            dx[t] += np.concatenate([da, dh * a * sigmoid]) @ w_in[e].T
    y, (got_dx, *_), _ = sent("identity", True, forward=True, backward=False)
    assert distance(y, want) < 5e-3
    assert distance(got_dx, dx) < 5e-3
    y, (got_dx, *_), _ = sent("blockwise", True, forward=True, backward=True)
    assert distance(y, want) < 8e-2
    assert distance(got_dx, dx) < 2e-1


@pytest.mark.parametrize("exponent", [-20, -60, 20])
def test_gradients_of_any_size_survive(exponent):
    """A cotangent through an FP8 array would be cast without a scale: 1e-6 would become 0."""
    given, scale = cases.arrays(), 2.0**exponent
    _, want, _ = sent("blockwise", True, forward=True, backward=True)
    g = given[5] * np.asarray(scale, given[5].dtype)
    _, got, *_ = program("blockwise")((*given[:5], g), ((), ()))
    for mine, other in zip(got, want, strict=True):
        assert distance(np.asarray(mine, np.float64) / scale, other) < 1e-6


def test_a_quantizer_that_asks_for_the_amax_of_all_tokens_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Global(fp8.quantizers.AbstractQuantizer):
        granularity: fp8.quantizers.PerRow = fp8.quantizers.PerRow()
        value_format: fp8.quantizers.Format = fp8.E4M3
        rule: ClassVar[fp8.ScaleRule] = fp8.ScaleRule(power_of_two=True)

        def choose_scale(self, inputs, granularity):
            whole = jnp.broadcast_to(inputs.amax(fp8.PerTensor()), (T, 1))
            return self.scale_of_amax(whole)

    one = fp8.recipes.Operands(lhs=Global(), rhs=fp8.quantizers.Current(format=fp8.E4M3))
    recipe = fp8.Recipe(name="global", fprop=one, dgrad=one, wgrad=one)
    with pytest.raises(ValueError, match="amax of a whole"):
        jax.eval_shape(lambda way: call(recipe=recipe, route=way), a_route())


@pytest.mark.parametrize("name", ["blockwise", *(pytest.param(n, marks=SLOW) for n in TILED)])
def test_tokens_of_very_different_sizes(name):
    """Where casts along columns lose most, the second cast loses no more than the first one."""
    given = cases.arrays(spread=2.0), ((), ())
    exact = program("identity", backward=False)(*given)[1]
    want = program(name, forward=False, backward=False)(*given)[1]
    got = program(name)(*given)[1]
    for i in (2, 3):
        assert distance(got[i], exact[i]) <= 1.05 * distance(want[i], exact[i])


@pytest.mark.parametrize("name", ["blockwise", *(pytest.param(n, marks=SLOW) for n in REMAT)])
def test_under_remat_scan_and_vmap(name):
    recipe, state, given = RECIPES[name], cases.states(RECIPES[name], True), cases.arrays()
    want = sent(name, True, forward=True, backward=True)
    parallel = fp8.moe.ExpertParallel(gradient_sent_in_fp8=True)

    def experts(x, gates, chosen, w_in, w_out, state):
        return fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=recipe, states=state, parallel=parallel
        ).y

    def scanned(x, gates, chosen, w_in, w_out, state):
        # One layer that a scan runs, rematerialized from its residuals in FP8.
        stack = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)
        again = jax.checkpoint(experts, policy=fp8.save_fp8_residuals())
        body = lambda x, layer: (again(x, gates, chosen, *layer), None)
        return jax.lax.scan(body, x, stack((w_in, w_out, state)))[0]

    @jax.jit  # of arguments: XLA would compute with constants while it compiles
    def step(given, state):
        x, gates, chosen, w_in, w_out, g = given

        def loss(params, state):
            x, gates, w_in, w_out = params
            y = scanned(x, gates, chosen, w_in, w_out, state)
            return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), y

        (_, y), grads, new = fp8.value_and_grad(loss, has_aux=True)((x, gates, w_in, w_out), state)
        return y, grads, new

    assert_same(step(given, state), want)
    if recipe.rows:
        return  # examples that share a state share its unset scale
    mapped = jax.vmap(experts, in_axes=(0, None, None, None, None, None))
    x, others = given[0], given[1:5]
    twice = 2 * x
    y = np.asarray(jax.jit(mapped)(np.stack([x, twice]), *others, state))
    assert_same(y[0], want[0])
    assert_same(y[1], program(name)((twice, *given[1:]), state)[0])


@SLOW
@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "delayed"])
def test_under_remat_that_saves_nothing(name):
    recipe, state, given = RECIPES[name], cases.states(RECIPES[name], True), cases.arrays()
    want = sent(name, True, forward=True, backward=False)
    x, gates, chosen, w_in, w_out, g = given

    @jax.checkpoint
    def experts(x, gates, w_in, w_out, state):
        return fp8.moe.swiglu_experts(x, gates, chosen, w_in, w_out, recipe=recipe, states=state).y

    def loss(params, state):
        y = experts(*params, state)
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), y

    run = jax.jit(fp8.value_and_grad(loss, has_aux=True))
    (_, y), grads, new = run((x, gates, w_in, w_out), state)
    assert_same((y, grads, new), want)


def test_a_bias_is_that_of_the_expert():
    x, _, chosen, w, _, _ = cases.arrays()
    bias = np.arange(E * 2.0 * F, dtype=np.float32).reshape(E, 2 * F)
    how = {"recipe": RECIPES["current"], "preferred_element_type": jnp.float32}

    @jax.jit
    def run(x, w, chosen, bias):
        way = fp8.moe.route(chosen, experts=E)
        dot = functools.partial(fp8.moe.dispatch_matmul, x, w, way, **how)
        return dot(bias=bias), dot()

    biased, plain = map(np.asarray, run(x, w, chosen, bias))
    np.testing.assert_array_equal(biased, plain + bias[np.sort(np.asarray(chosen).reshape(-1))])


@functools.cache
def a_route():
    return jax.jit(lambda chosen: fp8.moe.route(chosen, experts=E))(cases.arrays()[2])


def call(**changes):
    x, _, _, w, _, _ = cases.arrays()
    given = {"x": x, "w": w, "route": a_route(), "recipe": None, **changes}
    given["recipe"] = given["recipe"] or RECIPES["blockwise"]
    return fp8.moe.dispatch_matmul(**given)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": jnp.ones((T, K + 1))}, ValueError, [f"[{T}, {K + 1}]", f"[{T}, K]"]),
        ({"w": jnp.ones((E + 1, K, F))}, ValueError, [f"[{E + 1}, {K}, {F}]", f"[{E}, K, N]"]),
        ({"route": 3}, TypeError, ["route=3", "fp8.moe.route"]),
        (
            {"recipe": fp8.recipes.rowwise(high_precision_wgrad=True)},
            ValueError,
            ["wgrad", "sent_in_fp8=False"],
        ),
        (
            {"recipe": fp8.recipes.blockwise(power_of_two=False)},
            ValueError,
            ["power_of_two=True", "sent_in_fp8=False"],
        ),
        (
            {"recipe": fp8.recipes.blockwise(x_tile_dim=2, w_tile_dim=1)},
            ValueError,
            ["PerBlock(tile=(128, 128))", "PerBlock((1, T))", "sent_in_fp8=False"],
        ),
        ({"save_original": ("x",)}, ValueError, ["save_original", "sent_in_fp8=False"]),
        ({"x_shard": None}, TypeError, ["x_shard", "options"]),
    ],
)
def test_bad_input_gets_a_clear_error(changes, error, words):
    with pytest.raises(error) as raised:
        call(**changes)
    for word in words:
        assert word in str(raised.value)


IN_HIGH_PRECISION = {
    "high_precision_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "float32_scales": fp8.recipes.blockwise(power_of_two=False),
    "square_tiles": fp8.recipes.blockwise(x_tile_dim=2, w_tile_dim=1),
}


@SLOW  # ../moe/test_moe_init.py shows that they are accepted, and test_ragged_dot.py their results
@pytest.mark.parametrize("name", IN_HIGH_PRECISION)
def test_such_recipes_are_sent_in_high_precision(name):
    recipe, parallel = IN_HIGH_PRECISION[name], fp8.moe.ExpertParallel(sent_in_fp8=False)
    step = functools.partial(cases.step, recipe, parallel)
    _, grads, *_ = jax.jit(step)(cases.arrays(), ((), ()))
    _, want, _ = sent("identity", True, forward=True, backward=False)
    for mine, other in zip(grads, want, strict=True):
        assert distance(mine, other) < 0.25


@pytest.mark.parametrize("name", ["high_precision_wgrad", "float32_scales"])
def test_such_gradients_are_sent_in_high_precision(name):
    parallel = fp8.moe.ExpertParallel(sent_in_fp8=False, gradient_sent_in_fp8=True)
    step = functools.partial(cases.step, IN_HIGH_PRECISION[name], parallel)
    with pytest.raises(ValueError, match="gradient_sent_in_fp8=False"):
        jax.eval_shape(step, cases.arrays(), ((), ()))


def test_casts_are_watched():
    (x, _, _, w, _, _), way = cases.arrays(), a_route()

    def run(recipe):
        with fp8.diagnostics.collect() as records:
            how = {"recipe": recipe, "name": "experts"}
            dot = lambda x, w: fp8.moe.dispatch_matmul(x, w, way, **how)
            jax.block_until_ready(jax.jit(dot)(x, w))
        return {row.tensor: row for row in records.rows()}

    for name in ("current", "blockwise"):
        rows = run(RECIPES[name])
        assert set(rows) == {"x", "w"}
        assert rows["x"].amax == np.abs(np.asarray(x, np.float32)).max()
