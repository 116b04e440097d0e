"""`check_state(params=)`: no state is used with weights that its scales do not fit.

Before there was this check, a state of weights 1000 times smaller passed. The loss of the next step
and of all evaluations was below 1e-10 of the right one: the weights of two layers saturated.
"""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from contracts import own_quantizer
from flax import nnx
from linen.linen_made import made
from state.saved_states import fresh, recipe

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.state._init import make_concrete
from jaxfp8.state._state import is_state

RECIPE = recipe()
MISFIT = "does not fit the weights of params"


def remembers(amax, like):
    """The states after some steps whose tensors all had this amax, as NumPy arrays."""

    def one(state):
        scales = [np.asarray(row.quantizer.scale_of_amax(amax).scale) for row in state.rows]
        history = np.full(state.amax_history.shape, amax, np.float32)
        if history.shape[-1] > 1:
            history[..., 0] = 0  # the staging slot
        scale = np.array(np.broadcast_to(np.stack(scales), state.scale.shape))
        return dataclasses.replace(state, scale=scale, amax_history=history)

    return jax.tree.map(one, like, is_leaf=is_state)


class MLP(nn.Module):
    """Two layers. The second starts at 0 and grows most."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(FP8Dense(16, recipe=RECIPE, use_bias=False, name="up")(x))
        zeros = nn.initializers.zeros
        return FP8Dense(4, recipe=RECIPE, kernel_init=zeros, use_bias=False, name="down")(x)


X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
Y = 3.0 * X[:, :4]


def loss_fn(params, state):
    return jnp.mean((MLP().apply({"params": params, COLLECTION: state}, X) - Y) ** 2)


def true_loss(params):
    up, down = (np.asarray(params[name]["kernel"], np.float64) for name in ("up", "down"))
    return np.mean((np.maximum(X @ up, 0) @ down - Y) ** 2)


@pytest.fixture(scope="module")
def run():
    """Each step of a run with warm-up from 0: parameters and state, and the compiled step."""
    like = jax.jit(MLP().init)(jax.random.key(1), X)
    params, state = like["params"], like[COLLECTION]
    grad = jax.jit(fp8.value_and_grad(loss_fn))
    saved = []
    with jax.numpy_dtype_promotion("standard"):  # optax.adam
        tx = optax.adam(optax.linear_schedule(0.0, 0.1, 10))
        update, opt = jax.jit(tx.update), tx.init(params)
        for _ in range(8):
            _, grads, state = grad(params, state)
            updates, opt = update(grads, opt, params)
            params = optax.apply_updates(params, updates)
            saved.append((params, state))
    return like[COLLECTION], saved, grad


def test_every_step_of_a_run_passes(run):
    """Also the second steps of a layer that starts at 0: its weight is 3 times larger then."""
    like, saved, _ = run
    growth = []
    for params, state in saved:
        checked = fp8.check_state(state, like, params=params)
        jax.tree.map(np.testing.assert_array_equal, checked, state)
        amax = np.abs(params["down"]["kernel"]).max()
        scale = np.asarray(state["down"]["FP8DotGeneral_0"]["fp8"].scale)[1]
        growth.append(amax / (448 * scale) if scale else 1.0)
    assert max(growth) > 2.5, "the run has the case"


def test_other_weights_are_refused_and_a_fresh_state_is_right(run):
    like, saved, grad = run
    params, state = saved[-1]
    other = jax.tree.map(lambda leaf: 1000 * leaf, params)
    right = true_loss(other)
    evaluate = jax.jit(loss_fn)
    for wrong in (grad(other, state)[0], evaluate(other, state)):
        assert wrong < 1e-10 * right, "the fault that the check is for"
    amaxes = [np.abs(leaf).max() for leaf in jax.tree.leaves(other)]
    shown = [f"{amax:.4g}" for amax in amaxes]
    match = (
        rf"(?s){MISFIT} \(2 scales\).*\['down'\]\['FP8DotGeneral_0'\]\['fp8'\]\.scale\[1\] = .*"
        rf"amax of down/kernel is {re.escape(shown[0])}, and this scale is for amaxes up to .*"
        rf"up/kernel is {re.escape(shown[1])}.* fresh state, such as like"
    )
    with pytest.raises(fp8.FP8StateError, match=match):
        fp8.check_state(state, like, params=other)
    with pytest.raises(fp8.FP8StateError, match="repair=True does not mend it"):
        fp8.check_state(state, like, params=other, repair=True)
    fp8.check_state(like, like, params=other)
    for loss in (grad(other, like)[0], evaluate(other, like)):
        np.testing.assert_allclose(loss, right, rtol=0.05)


E4M3, E5M2 = 3584.0, 2.0**11 * 57344  # the largest value, in units of 8 smallest normal ones


def weights_in_e5m2():
    x, w = (fp8.quantizers.Delayed(format=f) for f in (fp8.E4M3, fp8.E5M2))
    pair = fp8.recipes.Operands
    return fp8.Recipe(
        name="e5m2", fprop=pair(lhs=x, rhs=w), dgrad=pair(lhs=x, rhs=w), wgrad=pair(lhs=x, rhs=x)
    )


@pytest.mark.parametrize(
    ("options", "weight", "passes"),
    [
        ({}, 3.9, True), ({}, 4.1, False), ({}, 1e30, False), ({}, np.inf, False),
        ({}, np.nan, False), ({}, 0.0, True), ({}, 1e-46, True),
        ({}, 1.05 / E4M3, True), ({}, 0.95 / E4M3, False),
        ("e5m2", 3.9, True), ("e5m2", 4.1, False),
        ("e5m2", 1.05 / E5M2, True), ("e5m2", 0.95 / E5M2, False),
        ({"margin": 3}, 31.0, True), ({"margin": 3}, 33.0, False),  # 8 times the room
        ({"margin": 13}, 1.0, True), ({"margin": 13}, 0.2, False),  # few normal values, as asked
        ({"power_of_two": True}, 4.5, True), ({"power_of_two": True}, 8.1, False),
        ({"algorithm": "most_recent"}, 4.1, False),
    ],
)  # fmt: skip
def test_the_limits(options, weight, passes):
    like = fp8.init_state(weights_in_e5m2() if options == "e5m2" else recipe(**options))
    state, weight = remembers(jnp.float32(1e6), like), -1e6 * weight
    for array in (np.full((2, 2), weight, np.float32), jnp.full((2, 2), weight)):
        fp8.check_state(like, like, params=array)  # unset
        if passes:
            fp8.check_state(state, like, params=array)
        else:
            with pytest.raises(fp8.FP8StateError, match=r"state\.scale\[1\].*params is"):
                fp8.check_state(state, like, params=array)


@pytest.mark.parametrize(
    ("times", "error"), [(1, 0.026), (2, 0.07), (4, 0.32), (2.0**-12, 0.031), (2.0**-13, 0.05)]
)
def test_errors_of_a_weight_under_an_old_scale(times, error):
    """The figures of docs/state.md: a weight that is so many times larger than its scale knows."""
    w = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    q = fp8.quantize(jnp.asarray(times * w), fp8.E4M3, scale=float(np.abs(w).max() / 448))
    off = np.asarray(q.dequantize(), np.float64) - times * w
    np.testing.assert_allclose(np.linalg.norm(off) / np.linalg.norm(times * w), error, rtol=0.1)


class Own(nn.Module):
    """A layer of the user's: one weight of any name, and a bias of two axes."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (4, 4))
        return fp8.linen.FP8EinsumOp(recipe=RECIPE, name="op")("bk,kn->bn", x, w)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.with_partitioning(nn.initializers.ones, (None, "tp"))
        plug = fp8.linen.FP8DotGeneral.using(RECIPE)
        return nn.Dense(4, dot_general_cls=plug, kernel_init=init)(x), None


def scanned():
    axes = {"params": 0, COLLECTION: 0}
    return nn.scan(
        Block, variable_axes=axes, split_rngs={"params": True}, length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()  # fmt: skip


x2, x3 = np.ones((8, 4), np.float32), np.ones((1, 8, 4), np.float32)
LINEN = {
    "dense": (lambda: FP8Dense(4, recipe=RECIPE), x2),
    "general": (lambda: fp8.linen.FP8DenseGeneral((2, 2), recipe=RECIPE), x2),
    "einsum": (lambda: fp8.linen.FP8Einsum((4, 4), "bd,dk->bk", recipe=RECIPE), x2),
    "own layer": (Own, x2),
    "scanned, in boxes": (scanned, x2, None),
    "grouped": (lambda: fp8.linen.FP8GroupedLinear(4, recipe=RECIPE), x2, np.array([3, 5])),
    "grouped, one state": (
        lambda: fp8.linen.FP8GroupedLinear(4, recipe=RECIPE, state_per_group=False),
        x2, np.array([3, 5]),
    ),
    "experts": (lambda: fp8.linen.FP8MoE(experts=2, hidden=4, k=1, shared=4, recipe=RECIPE), x2),
    "attention": (
        lambda: nn.MultiHeadDotProductAttention(
            2, qkv_dot_general_cls=fp8.linen.FP8DotGeneral.using(RECIPE),
            out_dot_general_cls=fp8.linen.FP8DotGeneral.using(RECIPE),
        ),
        x3,
    ),
    "converted": (
        lambda: fp8.convert(nn.MultiHeadDotProductAttention(2), RECIPE, inputs=(x3,))[0], x3,
    ),
}  # fmt: skip


@nnx.vmap(in_axes=0, out_axes=0)
def stack_of_nnx(keys):
    return fp8.nnx.FP8Linear(4, 4, recipe=RECIPE, rngs=nnx.Rngs(keys))


NNX = {
    "linear": lambda: fp8.nnx.FP8Linear(4, 4, recipe=RECIPE, rngs=nnx.Rngs(0)),
    "einsum": lambda: fp8.nnx.FP8Einsum("bd,dk->bk", (4, 4), recipe=RECIPE, rngs=nnx.Rngs(0)),
    "stack": lambda: stack_of_nnx(jax.random.split(jax.random.key(0), 3)),
    "grouped": lambda: fp8.nnx.FP8GroupedLinear(2, 4, 4, recipe=RECIPE, rngs=nnx.Rngs(0)),
    "experts": lambda: fp8.nnx.FP8MoE(2, 4, 4, 1, shared=4, recipe=RECIPE, rngs=nnx.Rngs(0)),
    "converted": lambda: fp8.convert(
        nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)), RECIPE, inputs=(x3,)
    )[0],
}


def variables_of(kind, name):
    """Unset states and the parameters of a model. Nothing is computed."""
    if kind == "linen":
        make, *inputs = LINEN[name]
        variables = made(make(), *inputs, recipe=RECIPE)
        return variables[COLLECTION], variables["params"]
    model = nnx.eval_shape(NNX[name])
    return make_concrete(nnx.state(model, fp8.nnx.FP8State)), nnx.state(model, nnx.Param)


def names_and_arrays(params):
    """The parameters in order: whether each is the weight of an FP8 matmul, and its name."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        parts = [str(getattr(k, "key", k)) for k in path if not hasattr(k, "name")]
        yield parts[-1] in ("kernel", "w"), "/".join(parts), leaf


@pytest.mark.parametrize(
    ("kind", "name"), [*(("linen", name) for name in LINEN), *(("nnx", name) for name in NNX)]
)
def test_the_weight_of_each_layer_is_found(kind, name):
    """One array of a model is 1000 times larger: that of a matmul is refused by its name."""
    like, params = variables_of(kind, name)
    state, tree = remembers(jnp.float32(1), like), jax.tree.structure(params)
    named = [*names_and_arrays(params)]
    assert sum(weight for weight, *_ in named) == len(jax.tree.leaves(like, is_leaf=is_state))
    for large, (weight, place, _) in enumerate(named):
        leaves = [
            np.full(leaf.shape, 1000.0 if i == large else 1.0, leaf.dtype)
            for i, (_, _, leaf) in enumerate(named)
        ]
        given = jax.tree.unflatten(tree, leaves)
        if weight:
            with pytest.raises(fp8.FP8StateError, match=f"amax of {place} is 1000, ") as error:
                fp8.check_state(state, like, params=given)
            assert "(1 scale)" in str(error.value)
        else:
            fp8.check_state(state, like, params=given)


def test_a_tree_of_your_own():
    """At the path of the state, or below it. None says that a matmul has no weight."""
    like = fresh(RECIPE)
    state, one = remembers(jnp.float32(1), like), np.ones((4, 4), np.float32)
    stack = np.stack([one, 1000 * one])
    good = {"one": {"w": one, "b": 1000 * one[0]}, "stack": np.stack([one, one]), "more": stack}
    others = (None, one.astype(ml_dtypes.bfloat16), {"w": {"value": one}, "b": {"value": one[0]}})
    for params in (good, *(good | {"one": other} for other in others)):
        fp8.check_state(state, like, params=params)
    in_fp8 = lambda params: fp8.quantize_params(
        params, RECIPE, state=like, primary=True,
        rules=[("one", fp8.weights.WeightAxes()), ("stack", fp8.weights.WeightAxes(stacked=1))],
    )  # fmt: skip
    for bad in ({"one": one, "stack": stack}, in_fp8({"one": one, "stack": stack})):
        with pytest.raises(
            fp8.FP8StateError, match=r"\['stack'\]\.scale\[1, 1\] = 0.002232: .* 1000,"
        ):
            fp8.check_state(state, like, params=bad)
    fp8.check_state(state, like, params=in_fp8({"one": one, "stack": np.stack([one, one])}))


@pytest.mark.parametrize("size", [2, 4])  # of rows: as many as layers, or more
def test_layers_may_share_a_weight(size):
    like = fresh(RECIPE)["stack"]
    w = np.full((size, 4), 1e-5, np.float32)
    w[0] = 1
    fp8.check_state(remembers(jnp.float32(1), like), like, params=w)
    with pytest.raises(fp8.FP8StateError, match=r"\(2 scales|1 more layers"):
        fp8.check_state(remembers(jnp.float32(1), like), like, params=1000 * w)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (
            {"one": 1.0},
            r"one is of type float(?s:.*)'stack'\]: params has no weight there",
        ),
        ({"stack": np.ones((2, 4, 4))}, r"1 of 2 states(?s:.*)\['one'\]: params has no weight"),
        ({"one": np.ones((4, 4)), "stack": np.ones((4, 2, 4))}, r"\[4, 2, 4\].*stacked as \[2\]"),
        (
            {"one": {"a": np.ones((4, 4)), "b": np.ones((4, 4))}, "stack": None},
            r"each of one/a, one/b may be its weight(?s:.*)path of its state, here \{'one': w\}",
        ),
        ({"params": {"one": np.ones((4, 4)), "stack": None}}, "2 of 2 states"),
        ({"one": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, "outside of jit"),
    ],
    ids=str,
)
def test_a_state_without_a_weight_is_named(params, match):
    like = fresh(RECIPE)
    with pytest.raises(fp8.FP8StateError, match=match):
        fp8.check_state(like, like, params=params)


def test_two_states_beside_one_weight():
    """Which of them it belongs to, nobody can see. The user says it."""
    ops = {"scores": {"fp8": fp8.init_state(RECIPE)}, "q": {"fp8": fp8.init_state(RECIPE)}}
    like, w = {"attention": ops}, np.ones((4, 4), np.float32)
    state, params = remembers(jnp.float32(1), like), {"attention": {"w_q": w}}
    with pytest.raises(fp8.FP8StateError, match="w_q may be the weight of another state, too"):
        fp8.check_state(state, like, params=params)
    explicit = {"attention": {"q": {"fp8": w}, "scores": {"fp8": None}}}
    fp8.check_state(state, like, params=params | explicit)


def test_values_have_to_be_at_hand():
    like = fp8.init_state(RECIPE)
    with pytest.raises(fp8.FP8StateError, match=r"params is .*outside of jit"):
        jax.jit(lambda w: fp8.check_state(like, like, params=w))(jnp.ones((4, 4)))


def test_recipes_without_a_row_of_weights():
    """No state remembers their weights. `static()` has its scales in the recipe."""
    static = fp8.recipes.static(x_scale=1.0, w_scale=1.0, g_scale=1.0)
    weights = {"w": np.full((4, 4), 1e6, np.float32)}
    for preset in (fp8.recipes.current(), static):
        like = {"w": fp8.init_state(preset)}
        assert fp8.check_state(like, like, params=weights) == like


def test_a_quantizer_of_your_own():
    like = fp8.init_state(own_quantizer.recipe())
    state = remembers(jnp.float32(1), like)
    fp8.check_state(state, like, params=np.full((4, 4), 3.9, np.float32))
    with pytest.raises(fp8.FP8StateError, match=MISFIT):
        fp8.check_state(state, like, params=np.full((4, 4), 4.1, np.float32))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_weights_that_a_mesh_splits(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("pipe", "tp"), axis_types=(kind, kind))
    like = {"stack": fresh(RECIPE)["stack"]}
    state = remembers(jnp.float32(1), like)
    values = np.ones((2, 4, 8), np.float32)
    placed = jax.NamedSharding(mesh, jax.P("pipe", None, "tp"))
    fp8.check_state(state, like, params={"stack": jax.device_put(values, placed)})
    values[1, 3, 7] = 9
    with pytest.raises(fp8.FP8StateError, match=r"scale\[1, 1\].*amax of stack is 9, .*up to 1\."):
        fp8.check_state(state, like, params={"stack": jax.device_put(values, placed)})
