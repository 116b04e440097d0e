"""Master weights inside of, around and beside what others wrote: optax, flax's optimizers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optim_cases import KINDS, gradient, params32
from same_bits import assert_same_bits

from jaxfp8.optim import BFloat16Plus, Float32, init_master_weights, master_weights
from jaxfp8.optim import with_master_weights as with_masters

pytestmark = pytest.mark.usefixtures("standard_promotion")
SGD = optax.sgd(2.0**-9)  # exact products: the same bits in every program

# Masters that are arrays, and masters with a scale.
SOME_KINDS = [
    pytest.param(kind, marks=() if kind in ("bfloat16 + 8", "float16") else pytest.mark.slow)
    for kind in KINDS
]


def start(tx):
    return jax.jit(lambda params: init_master_weights(tx, params))(params32())


def one_step(tx, weights, opt_state, seed=0):
    updates, opt_state = tx.update(gradient(params32(), seed), opt_state, weights)
    return optax.apply_updates(weights, updates), opt_state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "after",
    [optax.scale(2.0), optax.scale(-1), optax.scale_by_learning_rate(0.1), optax.clip(1.0)],
    ids=["scale", "sign", "learning rate", "clip"],
)
def test_a_transformation_of_new_weights_is_an_error(kind, after):
    tx = optax.chain(with_masters(SGD, master=KINDS[kind]), after)
    with pytest.raises(ValueError, match="Put that transformation inside"):
        jax.eval_shape(lambda: one_step(tx, *start(tx)))


@pytest.mark.parametrize(
    ("after", "error"),
    [
        (optax.add_decayed_weights(0.1), ValueError),
        (optax.clip_by_global_norm(1.0), AttributeError),
        (optax.trace(0.9), ValueError),
    ],
    ids=["decay", "norm", "momentum"],
)
def test_a_transformation_that_reads_updates_is_an_error(after, error):
    tx = optax.chain(with_masters(SGD, master=Float32()), after)
    with pytest.raises(error):
        jax.eval_shape(lambda: one_step(tx, *start(tx)))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_multi_steps_around(kind):
    """Weights and masters move at the last microbatch only, as if there had been one step."""
    inner = with_masters(SGD, master=KINDS[kind])
    tx = optax.MultiSteps(inner, every_k_schedule=2)
    weights, opt_state = start(tx)
    first, opt_state = jax.jit(lambda *args: one_step(tx, *args))(weights, opt_state)
    assert_same_bits(first, weights)
    assert_same_bits(master_weights(opt_state, first), master_weights(start(tx)[1], weights))
    second, opt_state = one_step(tx, first, opt_state)  # the same gradient, so their mean is it too
    expected, reference = one_step(inner, *start(inner))
    assert_same_bits(second, expected)
    assert_same_bits(master_weights(opt_state, second), master_weights(reference, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_multi_steps_inside(kind):
    tx = with_masters(
        optax.MultiSteps(SGD, every_k_schedule=2).gradient_transformation(), master=KINDS[kind]
    )
    plain = with_masters(SGD, master=KINDS[kind])
    weights, opt_state = start(tx)
    first, opt_state = one_step(tx, weights, opt_state)
    assert_same_bits(first, weights)
    second, _ = one_step(tx, first, opt_state)
    assert_same_bits(second, one_step(plain, *start(plain))[0])


def test_apply_if_finite_inside():
    tx = with_masters(optax.apply_if_finite(SGD, 3), master=BFloat16Plus())
    weights, opt_state = start(tx)
    nans = jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), weights)
    updates, opt_state = tx.update(nans, opt_state, weights)
    assert_same_bits(optax.apply_updates(weights, updates), weights)
    assert_same_bits(master_weights(opt_state, weights), params32())


def test_apply_if_finite_around_is_an_error():
    tx = optax.apply_if_finite(with_masters(SGD, master=BFloat16Plus()), 3)
    with pytest.raises(TypeError, match="Overwrite"):
        jax.eval_shape(lambda: one_step(tx, *start(tx)))


@pytest.mark.parametrize("kind", KINDS)
def test_partition_and_masks(kind):
    labels = {"dense": {"kernel": "masters", "bias": "frozen"}, "scale": "plain"}
    tx = optax.partition(
        {
            "masters": with_masters(SGD, master=KINDS[kind]),
            "plain": SGD,
            "frozen": optax.set_to_zero(),
        },
        labels,
    )
    keep = lambda path, x: path != "dense/kernel"
    weights, opt_state = init_master_weights(tx, params32(), keep_float32=keep)
    new, _ = one_step(tx, weights, opt_state)
    whole = with_masters(SGD, master=KINDS[kind])
    expected, _ = one_step(whole, *init_master_weights(whole, params32(), keep_float32=keep))
    assert_same_bits(new["dense"]["kernel"], expected["dense"]["kernel"])
    assert_same_bits(new["scale"], expected["scale"])
    assert_same_bits(new["dense"]["bias"], weights["dense"]["bias"])


def test_maps_over_parameters_of_a_state():
    """`optax.tree_map_params` finds master weights beside moments: for shardings by parameter."""
    tx = with_masters(optax.adam(0.1), master=BFloat16Plus())
    weights, opt_state = start(tx)
    where = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), weights)
    named = optax.tree.map_params(
        tx, lambda leaf, path: path, opt_state, where, is_leaf=lambda x: x is None
    )
    assert named.masters.low == where
    assert named.inner[0].mu == where


@pytest.mark.parametrize("kind", KINDS)
def test_train_state_of_flax(kind):
    tx = with_masters(SGD, master=KINDS[kind])
    weights, opt_state = start(tx)
    state = TrainState(step=0, apply_fn=None, params=weights, tx=tx, opt_state=opt_state)
    state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, gradient(params32(), 0))
    expected, reference = one_step(tx, weights, opt_state)
    assert_same_bits((state.params, state.opt_state), (expected, reference))


class Model(nnx.Module):
    def __init__(self, dtype):
        self.a = nnx.Linear(4, 8, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(8, 2, param_dtype=jnp.float32, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(self.a(x).astype(jnp.float32))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_optimizer_of_nnx(kind):
    model = Model(jnp.bfloat16)
    tx = with_masters(SGD, master=KINDS[kind])
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = nnx.as_pure(nnx.state(model, nnx.Param))
    x = jnp.ones((3, 4), jnp.bfloat16)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return grads

    def plain_step(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    plain_step = jax.jit(plain_step)
    opt_state = tx.init(before)
    for _ in range(3):
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        grads = nnx.as_pure(step(model, optimizer))
        expected, opt_state = plain_step(grads, opt_state, params)
        after = nnx.as_pure(nnx.state(model, nnx.Param))
        assert_same_bits(after, expected)
    assert after["a"]["kernel"].dtype == jnp.bfloat16
    masters = master_weights(nnx.as_pure(optimizer.opt_state), after)
    assert_same_bits(masters, master_weights(opt_state, expected))
    assert np.any(np.asarray(masters["a"]["kernel"]) != after["a"]["kernel"].astype(jnp.float32))


def test_boxes_of_linen():
    """Parameters with the names of their axes, and the specs of the optimizer state."""
    names = ("in", "out")
    params = {"w": nn.Partitioned(params32()["dense"]["kernel"], names)}
    tx = with_masters(optax.adam(0.1), master=BFloat16Plus(bits=8))
    weights, opt_state = init_master_weights(tx, params)
    grads = jax.tree.map(jnp.ones_like, weights)
    updates, opt_state = tx.update(grads, opt_state, weights)
    new = optax.apply_updates(weights, updates)
    assert new["w"].names == names
    assert new["w"].value.dtype == jnp.bfloat16
    assert nn.get_partition_spec(opt_state).masters.low["w"] == jax.sharding.PartitionSpec(*names)
