"""linen layers: flax's own parameters and values, with a recipe.

And state through flax's own transformations.
"""

import functools

import chex
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from linen_made import made

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DenseGeneral, FP8DotGeneral, FP8Einsum

DELAYED = fp8.recipes.delayed(history_length=4)
IDENTITY = fp8.recipes.identity()
KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)


def attention(cls):
    plug = {} if cls is None else {"qkv_dot_general_cls": cls, "out_dot_general_cls": cls}
    return nn.MultiHeadDotProductAttention(num_heads=2, **plug)


def by_class(theirs, ours, *args, **kwargs):
    return lambda: theirs(*args, **kwargs), lambda recipe: ours(*args, recipe=recipe, **kwargs), 1


def by_plug(theirs, *args, **kwargs):
    return (
        lambda: theirs(*args, **kwargs),
        lambda r: theirs(*args, dot_general_cls=FP8DotGeneral.using(r), **kwargs),
        1,
    )


# name -> (flax's layer, ours with a recipe, how many states)
LAYERS = {
    "Dense": by_class(nn.Dense, FP8Dense, 4),
    "Dense_bf16": by_class(nn.Dense, FP8Dense, 4, dtype=jnp.bfloat16, use_bias=False),
    "DenseGeneral": by_class(nn.DenseGeneral, FP8DenseGeneral, (2, 3), axis=(-2, -1)),
    "DenseGeneral_batch": by_class(nn.DenseGeneral, FP8DenseGeneral, 3, axis=-1, batch_dims=(0,)),
    "Einsum": by_class(nn.Einsum, FP8Einsum, (8, 2, 4), "bsd,dhk->bshk"),
    "Dense_plugged": by_plug(nn.Dense, 4),
    "DenseGeneral_plugged": by_plug(nn.DenseGeneral, (2, 3)),
    "Attention_plugged": (lambda: attention(None), lambda r: attention(FP8DotGeneral.using(r)), 4),
}
# flax's nn.Einsum takes no dot_general_cls=: FP8Einsum is the only way.


def assert_same(a, b):
    chex.assert_trees_all_equal(a, b, strict=True)


def square(model, extra=lambda state: {COLLECTION: state}):
    def loss(params, state, x):
        y = model.apply({"params": params, **extra(state)}, x)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return loss


@pytest.mark.parametrize("layer", LAYERS)
def test_parameters_and_initial_values_are_flax_s(layer):
    theirs, ours, states = LAYERS[layer]
    both = jax.jit(lambda *given: (theirs().init(*given), ours(DELAYED).init(*given)))
    want, got = both(KEY, X)
    assert_same(got["params"], want["params"])
    found = jax.tree.leaves(got[COLLECTION], is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    assert len(found) == states
    # init sees data, but is no step
    assert all(not s.scale.any() and not s.amax_history.any() for s in found)
    assert set(jax.eval_shape(ours(IDENTITY).init, KEY, X)) == {"params"}


@pytest.mark.parametrize("layer", LAYERS)
def test_identity_is_bit_equal(layer):
    theirs, ours, _ = LAYERS[layer]
    params = made(theirs(), X)["params"]
    steps = (
        jax.value_and_grad(square(model, lambda _: {}), (0, 2))
        for model in (ours(IDENTITY), theirs())
    )
    assert_same(*jax.jit(lambda *given: [step(*given) for step in steps])(params, None, X))


SLOW = pytest.mark.slow
QUICK = ("Dense_bf16", "DenseGeneral_batch", "Einsum", "Attention_plugged")


@pytest.mark.parametrize(
    "layer",
    [pytest.param(name, marks=() if name in QUICK else SLOW) for name in LAYERS],
)
def test_a_bf16_checkpoint_loads_unchanged_and_trains(layer):
    theirs, ours, _ = LAYERS[layer]
    old = made(theirs(), X)["params"]
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), old)
    variables = made(ours(DELAYED), X, recipe=DELAYED)
    params = flax.serialization.from_bytes(
        jax.tree.map(np.zeros_like, variables["params"]), flax.serialization.to_bytes(low)
    )
    params = jax.tree.map(lambda p: np.asarray(p, np.float32), params)

    @jax.jit
    def both(params, state):
        got = fp8.value_and_grad(square(ours(DELAYED)))(params, state, X)
        return *got, jax.value_and_grad(square(theirs(), lambda _: {}))(params, None, X)

    loss, grads, state, (want_loss, want) = jax.device_get(both(params, variables[COLLECTION]))
    np.testing.assert_allclose(loss, want_loss, rtol=0.1)
    for got_leaf, want_leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        # bias of the key projection: softmax does not see it, its gradient is rounding
        if np.linalg.norm(want_leaf) > 1e-3:
            assert np.linalg.norm(got_leaf - want_leaf) / np.linalg.norm(want_leaf) < 0.15
    assert all(
        s.scale.all()
        for s in jax.tree.leaves(state, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    )


def test_layer_equals_the_function():
    model, state = FP8Dense(4, use_bias=False, recipe=DELAYED), fp8.init_state(DELAYED)
    variables = made(model, X)
    got = jax.jit(fp8.value_and_grad(square(model)))(variables["params"], variables[COLLECTION], X)
    loss = lambda w, s, x: jnp.sum(jnp.square(fp8.dot(x, w, recipe=DELAYED, state=s)))
    want = jax.jit(fp8.value_and_grad(loss))(variables["params"]["kernel"], state, X)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want))


def test_collection_missing_in_apply():
    model = FP8Dense(4, recipe=DELAYED, name="up")
    params = made(model, X)["params"]
    with pytest.raises(
        fp8.FP8StateError, match=r"missing from collection '_overwrite_with_gradient'.*model.apply"
    ):
        model.apply({"params": params}, X)


def test_init_does_not_depend_on_the_data():
    init = jax.jit(FP8Dense(4, recipe=DELAYED).init)
    assert_same(init(KEY, X)[COLLECTION], init(KEY, np.full_like(X, np.nan))[COLLECTION])


def test_evaluation_changes_nothing():
    model = FP8Dense(4, recipe=DELAYED)
    variables = made(model, X)
    evaluate = jax.jit(functools.partial(model.apply, mutable=[COLLECTION]))
    _, mutated = evaluate(variables, X)
    assert_same(mutated[COLLECTION], variables[COLLECTION])


@pytest.mark.parametrize(
    "given", [{"dot_general": jax.lax.dot_general}, {"dot_general_cls": nn.Dense}]
)
@pytest.mark.parametrize("layer", [FP8Dense, FP8DenseGeneral])
def test_another_matmul_is_refused(layer, given):
    with pytest.raises(ValueError, match=f"{layer.__name__} brings its own dot_general"):
        layer(4, **given)


class Block(nn.Module):
    recipe: fp8.Recipe = DELAYED

    @nn.compact
    def __call__(self, x, _=None):
        return nn.tanh(FP8Dense(8, use_bias=False, recipe=self.recipe)(x)), None


def stack(transform=lambda block: block, axes=0, length=2, recipe=DELAYED):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            both = ("params", COLLECTION)
            how = (
                {"variable_axes": dict.fromkeys(both, 0)}
                if axes == 0
                else {"variable_broadcast": both}
            )
            block = nn.scan(
                transform(Block), length=length, split_rngs={"params": axes == 0}, **how
            )
            return block(recipe)(x, None)[0]

    return Model()


def loop(params, state, x, recipe=DELAYED, length=2, shared=False):
    at = lambda tree, i: tree if shared else jax.tree.map(lambda leaf: leaf[i], tree)
    for i in range(length):
        variables = {
            "params": at(params, i)["ScanBlock_0"],
            COLLECTION: at(state, i)["ScanBlock_0"],
        }
        x, _ = Block(recipe).apply(variables, x)
    return jnp.sum(jnp.square(x))


LOOPED = jax.jit(fp8.value_and_grad(loop))  # one program for all rows


REMAT = lambda block: nn.remat(block, policy=fp8.save_fp8_residuals(), prevent_cse=False)


@pytest.mark.parametrize(
    "transform",
    [pytest.param(lambda b: b, marks=SLOW), REMAT, pytest.param(nn.jit, marks=SLOW)],
    ids=["scan", "remat in scan", "jit in scan"],
)
def test_scan_over_layers(transform):
    model = stack(transform)
    variables = made(model, X[0], recipe=DELAYED)
    params, state = variables["params"], variables[COLLECTION]
    name = next(iter(params))
    rename = lambda tree: {"ScanBlock_0": tree[name]}
    scanned = jax.jit(fp8.value_and_grad(square(model)))
    for _ in range(2):
        got = scanned(params, state, X[0])
        want = LOOPED(rename(params), rename(state), X[0])
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            rename(got[1]),
            want[1],
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), rename(got[2]), want[2]
        )
        state = got[2]


def test_scan_with_broadcast_parameters_is_bounded():
    recipe = fp8.recipes.delayed(history_length=4, power_of_two=True)
    model = stack(axes="broadcast", recipe=recipe)
    variables = made(model, X[0], recipe=recipe)
    got = jax.jit(fp8.value_and_grad(square(model)))(
        variables["params"], variables[COLLECTION], X[0]
    )[2]
    shared = lambda *args: loop(*args, recipe=recipe, shared=True)
    want = jax.jit(fp8.value_and_grad(shared))(variables["params"], variables[COLLECTION], X[0])[2]
    got, want = (
        jax.tree.leaves(t, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))[0]
        for t in (got, want)
    )
    np.testing.assert_array_equal(got.scale, want.scale)
    assert (got.amax_history[:, -1] >= want.amax_history[:, -1] / 1.126).all()


def test_scan_without_the_collection_s_axis():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(
                Block, variable_axes={"params": 0}, length=2, split_rngs={"params": True}
            )()(x, None)[0]

    cure = "Under nn.scan or nn.vmap add '_overwrite_with_gradient' to variable_axes"
    with pytest.raises(fp8.FP8StateError, match=cure):
        Model().init(KEY, X[0])
    variables = made(stack(), X[0], recipe=DELAYED)
    with pytest.raises(fp8.FP8StateError, match=cure):
        Model().apply(variables, X[0])


@pytest.mark.parametrize("shared", [False, True], ids=["experts", "examples"])
def test_vmap(shared):
    axis = None if shared else 0

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.vmap(
                FP8Dense,
                variable_axes={"params": axis, COLLECTION: axis},
                split_rngs={"params": not shared},
                in_axes=0,
            )(4, recipe=DELAYED)(x)

    variables = made(Model(), X, recipe=DELAYED)
    _, _, new = jax.jit(fp8.value_and_grad(square(Model())))(
        variables["params"], variables[COLLECTION], X
    )
    (state,) = jax.tree.leaves(new, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    want = np.max(np.abs(X), axis=None if shared else (1, 2))
    np.testing.assert_array_equal(state.amax_history[..., 0, -1], want)


def test_tied_layer():
    recipe = fp8.recipes.delayed(power_of_two=True)

    class Model(nn.Module):
        def setup(self):
            self.layer = FP8Dense(8, use_bias=False, recipe=recipe)

        def __call__(self, x):
            return self.layer(nn.tanh(self.layer(x)))

    variables = made(Model(), X, recipe=recipe)
    assert len(jax.tree.leaves(variables["params"])) == 1
    _, _, new = jax.jit(fp8.value_and_grad(square(Model())))(
        variables["params"], variables[COLLECTION], X
    )
    (state,) = jax.tree.leaves(new, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    true = np.max(np.abs(X))
    assert true <= state.amax_history[0, -1] <= 1.125 * true


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return FP8Dense(2, recipe=DELAYED, name="down")(
            nn.relu(FP8Dense(8, recipe=DELAYED, name="up")(x))
        )


MODEL = MLP()  # one, and one optimizer, or each train state would compile a step of its own
APPLY = MODEL.apply
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1e-2), optax.adamw(1e-2, weight_decay=0.3))


def train_state():
    return TrainState.create(apply_fn=APPLY, params=made(MODEL, X, recipe=DELAYED), tx=OPTIMIZER)


@jax.jit
def train_step(ts, x):
    def loss(params, state, x):
        return jnp.sum(jnp.square(ts.apply_fn({"params": params, COLLECTION: state}, x)))

    _, grads, state = fp8.value_and_grad(loss)(ts.params["params"], ts.params[COLLECTION], x)
    return ts.apply_gradients(grads={"params": grads, COLLECTION: state})


def run(ts, steps):
    for i in steps:
        ts = train_step(ts, X * np.float32(2.0 ** (i % 4)))
    return ts


def test_stock_train_state_does_not_touch_state(standard_promotion):
    ts = train_state()
    assert COLLECTION not in str(jax.tree.structure(ts.opt_state))
    new = run(ts, range(3))
    first = new.params[COLLECTION]["up"]["FP8DotGeneral_0"]["fp8"]
    np.testing.assert_allclose(
        first.amax_history[0], [0, *(np.max(np.abs(X)) * 2.0 ** np.arange(3))]
    )
    np.testing.assert_allclose(first.scale[0], first.amax_history[0, -1] / 448, rtol=1e-6)
    assert jax.tree.structure(new) == jax.tree.structure(ts)


@pytest.mark.parametrize("through", ["bytes", "orbax"])
def test_train_state_saved_and_restored_in_mid_window(through, tmp_path, standard_promotion):
    ts = run(train_state(), range(2))
    if through == "bytes":
        restored = flax.serialization.from_bytes(train_state(), flax.serialization.to_bytes(ts))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(
                tmp_path / "ts", {"params": ts.params, "opt_state": ts.opt_state, "step": ts.step}
            )
            checkpointer.wait_until_finished()
            like = {"params": ts.params, "opt_state": ts.opt_state, "step": ts.step}
            restored = train_state().replace(**checkpointer.restore(tmp_path / "ts", like))
    assert_same(
        jax.tree.leaves(run(restored, range(2, 12))), jax.tree.leaves(run(ts, range(2, 12)))
    )
