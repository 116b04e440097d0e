"""An optimizer with master weights: bytes, bits, and trees of every sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import ADAMW, KINDS, bytes_of, gradient, params32, quantized, step, train
from same_bits import assert_same_bits

from jaxfp8.optim import (
    BFloat16Plus,
    Float16,
    Float32,
    Overwrite,
    init_master_weights,
    master_weights,
    with_master_weights,
)
from jaxfp8.optim._masters import round_to_bfloat16

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize(
    ("kind", "in_bfloat16", "in_float16", "in_fp8"),
    [
        ("float32", 4, 4, 4),
        ("bfloat16 + 16", 2, 4, 4),
        ("bfloat16 + 8", 1, 3, 3),
        ("float16", 2, 2, 2),
    ],
)
def test_bytes_per_parameter(kind, in_bfloat16, in_float16, in_fp8):
    tx = with_master_weights(optax.sgd(0.1), master=KINDS[kind])
    ones = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    like = lambda dtype: jax.ShapeDtypeStruct(ones.shape, dtype)
    narrow = jax.eval_shape(functools.partial(quantized, primary=False), ones)
    masters_of = lambda w: jax.eval_shape(tx.init, {"w": w}).masters
    scale = 4 if kind == "float16" else 0
    for weight, expected in (
        (like(jnp.bfloat16), in_bfloat16),
        (like(jnp.float16), in_float16),
        (narrow, in_fp8),
    ):
        assert bytes_of(masters_of(weight)) == expected * 64 * 64 + scale
    assert bytes_of(masters_of(ones)) == 0


OPTIMIZERS = {
    "adamw": ADAMW,
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3, weight_decay=0.1),
    # All products are exact, so their sums are the same with and without contraction.
    "powers of two": optax.sgd(2.0**-7, momentum=0.5),
}


masters_of = jax.jit(master_weights)


def started(tx, params, **how):
    """`init_master_weights` as one program."""
    return jax.jit(functools.partial(init_master_weights, tx, **how))(params)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name in ("adamw", "powers of two") else pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_16_bits_train_as_float32_does(optimizer):
    runs = []
    for master in (Float32(), BFloat16Plus(bits=16)):
        tx = with_master_weights(OPTIMIZERS[optimizer], master=master)
        params, opt_state = started(tx, params32(), keep_float32=lambda path, x: path == "scale")
        jit = optimizer == "powers of two"
        params, opt_state = train(tx, params, opt_state, 50, jit=jit)
        runs.append((params, masters_of(opt_state, params), opt_state.inner))
    assert_same_bits(runs[1], runs[0])
    params, masters, _ = runs[0]
    assert_same_bits(params["dense"], jax.tree.map(round_to_bfloat16, masters["dense"]))
    moved = np.asarray(masters["dense"]["kernel"]) - np.asarray(params32()["dense"]["kernel"])
    assert np.abs(moved).max() > 0.01


def test_float32_master_weights_train_as_float32_parameters_do():
    tx = with_master_weights(ADAMW, master=Float32())
    params, opt_state = init_master_weights(tx, params32())
    params, opt_state = train(tx, params, opt_state, 10, jit=False)
    # The gradients are the same, so float32 parameters must be the master weights.
    opt32 = ADAMW.init(params32())
    params, plain = params32(), params
    for i in range(10):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), gradient(params32(), i))
        updates, opt32 = ADAMW.update(grads, opt32, params)
        params = optax.apply_updates(params, updates)
    assert_same_bits(master_weights(opt_state, plain), params)


@pytest.mark.parametrize(("kind", "bound"), [("bfloat16 + 8", 2e-4), ("float16", 4e-3)])
def test_shorter_masters_stay_near(kind, bound):
    runs = []
    for master in (Float32(), KINDS[kind]):
        tx = with_master_weights(ADAMW, master=master)
        params, opt_state = started(tx, params32())
        params, opt_state = train(tx, params, opt_state, 100)
        masters = masters_of(opt_state, params)
        runs.append(np.asarray(masters["dense"]["kernel"]))
        assert_same_bits(params, jax.tree.map(round_to_bfloat16, masters))
    exact, short = runs
    assert 0 < np.linalg.norm(short - exact) / np.linalg.norm(exact) < bound


def test_bfloat16_without_a_master_weight_stands_still():
    """The control: steps below half a spacing are lost, and a master weight keeps them."""
    params, grads = {"w": np.ones(4, jnp.bfloat16)}, {"w": np.ones(4, jnp.bfloat16)}
    inner = optax.sgd(2.0**-10)
    plain = jax.jit(functools.partial(step, inner))
    lost, _ = train_on(plain, params, inner.init(params), grads, 32)
    assert float(lost["w"][0]) == 1
    for kind in KINDS:
        init, run = sgd(kind, 2.0**-10)
        kept, _ = train_on(run, params, init(params), grads, 32)
        assert float(kept["w"][0]) == 1 - 2.0**-5, kind


@functools.cache
def sgd(kind, rate):
    """The init and the step of an optimizer: two programs for all tests of a kind."""
    tx = with_master_weights(optax.sgd(rate), master=KINDS[kind])
    return jax.jit(tx.init), jax.jit(functools.partial(step, tx))


def train_on(run, params, opt_state, grads, steps):
    for _ in range(steps):
        params, opt_state = run(grads, opt_state, params)
    return params, opt_state


@pytest.mark.parametrize("kind", KINDS)
def test_the_wrapped_optimizer_sees_float32(kind):
    def look(updates, state, params):
        assert {leaf.dtype for leaf in jax.tree.leaves((updates, params))} == {jnp.dtype("float32")}
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        return updates, state

    tx = with_master_weights(
        optax.GradientTransformation(lambda params: (), look), master=KINDS[kind]
    )
    dtypes = {"a": jnp.bfloat16, "b": jnp.float16, "c": jnp.float32}
    params = {name: jax.ShapeDtypeStruct((2,), dtype) for name, dtype in dtypes.items()}
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e5m2):
        grads = jax.tree.map(lambda p, dtype=dtype: jax.ShapeDtypeStruct(p.shape, dtype), params)
        jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, params), params)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_weights(kind):
    init, run = sgd(kind, 2.0**-10)
    params = {"w": np.ones(3, jnp.float16)}
    params, opt_state = train_on(run, params, init(params), params, 2)
    assert params["w"].dtype == jnp.float16
    assert float(params["w"][0]) == 1 - 2.0**-9
    assert float(masters_of(opt_state, params)["w"][0]) == 1 - 2.0**-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.0])
def test_gradients_that_are_not_finite_reach_the_weights(kind, value):
    init, run = sgd(kind, 1.0)
    params = {"w": np.zeros(3, jnp.bfloat16)}
    grads = {"w": np.array([value, 1, 0], jnp.bfloat16)}
    params, opt_state = train_on(run, params, init(params), grads, 1)
    expected = np.array([-value, -1, 0], np.float32)
    np.testing.assert_array_equal(np.asarray(params["w"]).astype(np.float32), expected)
    np.testing.assert_array_equal(masters_of(opt_state, params)["w"], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params",
    [
        {},
        None,
        {"a": None},
        {"a": jnp.ones((), jnp.bfloat16)},
        {"a": jnp.ones((0, 2), jnp.float16)},
    ],
    ids=["empty", "None", "None leaf", "scalar", "no elements"],
)
def test_small_trees(kind, params):
    tx = with_master_weights(ADAMW, master=KINDS[kind])
    if params is None:
        assert jax.tree.leaves(tx.init(params).masters) == []
        return
    new, _ = jax.eval_shape(lambda p: step(tx, p, tx.init(p), p), params)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, params)


def test_leaves_that_are_no_floats_go_to_the_wrapped_optimizer():
    seen = {}

    def look(updates, state, params):
        seen.update(updates=updates, params=params)
        return updates, state

    tx = with_master_weights(
        optax.GradientTransformation(lambda params: (), look), master=Float32()
    )
    params = {"w": jnp.ones(2, jnp.bfloat16), "step": jnp.int32(3), "on": np.True_}
    grads = {"w": jnp.ones(2), "step": jnp.int32(1), "on": np.False_}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert seen["updates"]["step"] is grads["step"]
    assert seen["params"]["step"] is params["step"]
    assert updates["step"] is grads["step"]
    assert isinstance(updates["w"], Overwrite)


def test_extra_arguments_reach_the_wrapped_optimizer():
    def scale(updates, state, params=None, *, value, **extra):
        assert extra == {"other": 1}
        return jax.tree.map(lambda u: -u * value, updates), state

    tx = with_master_weights(
        optax.GradientTransformationExtraArgs(lambda params: (), scale), master=Float32()
    )
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    updates, _ = tx.update(params, tx.init(params), params, value=0.5, other=1)
    assert float(updates["w"].value[0]) == 0.5


# ------------------------------------------------------------------------------------------ errors
LOW = {"w": jnp.ones(3, jnp.bfloat16)}


def update_error(state_of, params, master):
    tx = with_master_weights(optax.sgd(0.1), master=master)
    return tx.update(params, tx.init(state_of), params)


@pytest.mark.parametrize(
    ("state_of", "params", "master", "message"),
    {
        "no master": ({"w": jnp.ones(3)}, LOW, Float32(), "it stores nothing"),
        "a master": (
            LOW | {"v": LOW["w"]},
            {"w": jnp.ones(3), "v": LOW["w"]},
            Float32(),
            r"params\['w'\] is float32\[3\].*it stores float32\[3\]",
        ),
        "shape": ({"w": LOW["w"][:2]}, LOW, Float16(), r"bfloat16\[3\].*float16\[2\]"),
        "high part": (
            {"w": jnp.ones(3, jnp.float16)},
            LOW,
            BFloat16Plus(),
            r"stores bfloat16\[3\], uint16\[3\]",
        ),
        "no high part": (LOW, {"w": jnp.ones(3, jnp.float16)}, BFloat16Plus(bits=8), "uint8"),
        "all float32": (
            {"w": jnp.ones(3)}, {"w": jnp.ones(3)}, Float32(), "all in float32.*init_master",
        ),
    }.values(),
    ids=["no master", "a master", "shape", "high part", "no high part", "all float32"],
)  # fmt: skip
def test_a_state_of_other_parameters(state_of, params, master, message):
    with pytest.raises(ValueError, match=message):
        update_error(state_of, params, master)


def test_update_needs_params():
    tx = with_master_weights(optax.sgd(0.1), master=Float32())
    with pytest.raises(ValueError, match="params=None"):
        tx.update(LOW, tx.init(LOW))


@pytest.mark.parametrize("master", [Float32, "float32", None])
def test_master_must_be_a_kind(master):
    with pytest.raises(TypeError, match="must be one of Float32"):
        with_master_weights(optax.sgd(0.1), master=master)


@pytest.mark.parametrize("bits", [0, 15, 16.0, True, "8"])
def test_bits(bits):
    with pytest.raises(ValueError, match="use 16 or 8"):
        BFloat16Plus(bits=bits)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_an_fp8_array_has_no_scale(dtype):
    tx = with_master_weights(optax.sgd(0.1), master=Float32())
    with pytest.raises(ValueError, match=r"params\['w'\] is an array of float8.*has no scale"):
        tx.init({"w": jnp.ones(2, dtype)})


def test_gradients_of_another_tree():
    tx = with_master_weights(optax.sgd(0.1), master=Float32())
    with pytest.raises(ValueError, match="v"):
        tx.update({"v": jnp.ones(3)}, tx.init(LOW), LOW)
