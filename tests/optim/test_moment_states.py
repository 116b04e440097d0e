"""States of stored moments: saved, of other formats, of other frameworks, and what is refused."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moment_cases import MIXED, PAIRS, SHAPE, params, train
from optim_cases import bytes_of
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.optim import (
    FP8,
    BFloat16,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    Float32,
    Int8,
    adamw,
    init_master_weights,
    master_weights,
    scale_by_adam,
    with_master_weights,
    with_moment_formats,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


# What is computed on a mesh: test_moments.
@pytest.mark.parametrize("on", ["one device", pytest.param("a mesh", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", PAIRS)
def test_save_restore_and_go_on_is_bit_equal(pair, on):
    mu, nu = PAIRS[pair]
    tx = adamw(1e-2, mu=mu, nu=nu)
    update = jax.jit(tx.update)
    init = jax.jit(tx.init)
    start, state = train(tx, params(), state=init(params()), update=update)
    saved = flax.serialization.to_bytes((start, state))
    back, restored = flax.serialization.from_bytes((start, init(start)), saved)
    restored = jax.tree.map(jnp.asarray, (back, restored))
    if on == "a mesh":
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        spec = lambda x: P("data") if x.shape[:1] == (32,) else P()
        restored = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), restored)
        update = tx.update  # op by op the bits do not depend on the mesh
    back, restored = restored
    assert_same_bits(
        train(tx, back, state=restored, first=3, update=update),
        train(tx, start, state=state, first=3, update=update),
    )


def test_the_seed_decides_stochastic_bits():
    mu, nu = PAIRS["stochastic"]
    first = adamw(1e-2, mu=mu, nu=nu)
    update = jax.jit(first.update)  # the seed is in the state
    one, again, other = (
        train(tx, params(), 2, state=jax.jit(tx.init)(params()), update=update)[0]["w"]
        for tx in (first, first, adamw(1e-2, mu=mu, nu=nu, seed=1))
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_each_step_and_each_array_has_its_own_random_bits():
    """A trace without decay is the gradient, the same at each step."""
    tx = with_moment_formats(optax.trace(0.0), {"trace": BFloat16("stochastic")})
    x = params()["w"]
    update, grads = jax.jit(tx.update), {"w": x, "v": x}
    _, first = update(grads, jax.jit(tx.init)(grads))
    _, second = update(grads, first)
    w, v = first.inner.trace["w"], first.inner.trace["v"]
    assert np.any(np.asarray(w) != second.inner.trace["w"])
    assert np.any(np.asarray(w) != v)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: adamw(1e-3, nu=FP8()), ValueError, "cannot store a second moment"),
        (lambda: adamw(1e-3, nu=Int8(companding=False)), ValueError, "linear steps"),
        (lambda: adamw(1e-3, mu=jnp.bfloat16), TypeError, "must be one of Float32"),
        (
            lambda: with_moment_formats(optax.sgd(0.1), {"mu": FP8()}).init(params()),
            ValueError,
            "has no field",
        ),
        (
            lambda: with_moment_formats(optax.sm3(0.1), {"nu": Int8()}).init(params()),
            ValueError,
            "in SM3 'mu' is a second moment",
        ),
        (
            lambda: with_moment_formats(optax.contrib.sophia(0.1), {"nu": Int8()}).init(params()),
            ValueError,
            "can be negative. Store 'mu' alone",
        ),
        (
            lambda: with_master_weights(optax.sgd(0.1), master=FP8()),
            ValueError,
            "loses updates below",
        ),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_muon_for_matrices_alone_has_a_second_moment_without_arrays():
    tx = with_moment_formats(optax.contrib.muon(1e-2), {"mu": Int8(companding=False), "nu": Int8()})
    start = {"w": params()["w"]}
    updates, state = jax.eval_shape(lambda w: tx.update(w, tx.init(w), w), start)
    assert updates["w"].shape == SHAPE
    assert np.dtype("uint8") not in {x.dtype for x in jax.tree.leaves(state)}


ALL = (FP8(), Float16(), BFloat16(), Int8(), ExpandedFP8(), Int8(64), Int8(32))


@pytest.mark.parametrize("saved", ALL, ids=str)
def test_a_state_of_another_format_is_refused(saved):
    init = with_moment_formats(optax.trace(0.9), {"trace": saved}).init
    state = jax.eval_shape(init, params())
    for format in (*ALL, Float32(), FP8(fp8.E5M2)):
        tx = with_moment_formats(optax.trace(0.9), {"trace": format})
        if format == saved:
            jax.eval_shape(tx.update, params(), state)
        else:
            with pytest.raises(ValueError, match="another format has stored"):
                jax.eval_shape(tx.update, params(), state)


def test_memory_report_counts_stored_moments():
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    tx = adamw(1e-3, mu=FP8(), nu=Int8())

    def step(params, opt_state, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = jax.eval_shape(tx.init, w)
    report = fp8.memory_report(step, w, state, jax.ShapeDtypeStruct((8, 256), jnp.float32))
    assert report.fp8["moments"] == bytes_of(state)
    assert report.fp8["weights"] == bytes_of(w)


def test_second_moments_of_other_names_stay_above_zero():
    """Adagrad and AMSGrad divide by the root of them."""
    size = np.where(np.arange(SHAPE[1]) % 16 == 0, 1.0, 1e-6)
    grads = {"w": np.broadcast_to(size, SHAPE).astype(np.float32)}
    for make, field in ((optax.adagrad, "sum_of_squares"), (optax.amsgrad, "nu_max")):

        def largest(tx, steps):
            def step(state, _):
                updates, state = tx.update(grads, state, grads)
                return state, jnp.max(jnp.abs(updates["w"]))

            return jax.jit(lambda: jax.lax.scan(step, tx.init(grads), length=steps)[1][-1])()

        want = largest(make(0.1), 1)
        for format in (Int8(), ExpandedFP8(), Float16()):
            tx = with_moment_formats(make(0.1), {field: format})
            assert largest(tx, 3) <= 1.2 * want
        with pytest.raises(ValueError, match="cannot store a second moment"):
            with_moment_formats(make(0.1), {field: FP8()})


def test_float16_keeps_a_second_moment_above_zero():
    """Of gradients 2^-21 of the largest one, for many steps."""
    grads = {"w": np.full((64, 64), 5e-5, np.float32)}
    grads["w"][0, 0] = 100.0
    tx = scale_by_adam(mu=Float32(), nu=Float16())

    def step(state, _):
        updates, state = tx.update(grads, state)
        return state, jnp.max(jnp.abs(updates["w"]))

    largest = jax.jit(lambda: jax.lax.scan(step, tx.init(grads), length=300)[1])()
    assert np.max(largest) < 1.1


def test_nnx_optimizer():
    """It turns stored moments into states of nnx. Two models, the other in plain JAX."""
    for name in ("fp8, int8", "expanded, float16"):  # states of each sort
        mu, nu = MIXED[name]
        model = nnx.Linear(*SHAPE, use_bias=False, rngs=nnx.Rngs(0))
        tx = adamw(1e-2, mu=mu, nu=nu)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        pure = nnx.as_pure(nnx.state(model, nnx.Param))
        state = tx.init(pure)
        gradient_of = nnx.jit(nnx.grad(lambda model: jnp.mean(model(jnp.ones((2, SHAPE[0]))) ** 2)))
        for _ in range(3):
            grads = gradient_of(model)
            updates, state = tx.update(nnx.as_pure(grads), state, pure)
            pure = optax.apply_updates(pure, updates)
            optimizer.update(model, grads)
        assert_same_bits(nnx.as_pure(nnx.state(model, nnx.Param)), pure)


def test_a_mean_dtype_beside_a_format_is_refused():
    with pytest.raises(ValueError, match="contradicts mu="):
        scale_by_adam(mu_dtype=jnp.bfloat16)
    # Of another optimizer, it is that of arrays that are not stored.
    tx = with_moment_formats(optax.adam(1e-2, mu_dtype=jnp.bfloat16), {"mu": Int8(), "nu": Int8()})
    _, state = jax.eval_shape(lambda w: train(tx, w), params())
    assert [x.dtype for x in jax.tree.leaves(state.inner[0].mu["b"])] == [jnp.bfloat16]


def test_moments_of_float64_parameters_keep_their_types():
    with jax.enable_x64(True):
        start = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float64)}
        for mu, nu in PAIRS.values():
            tx = scale_by_adam(mu=mu, nu=nu)
            state = jax.eval_shape(tx.init, start)
            _, after = jax.eval_shape(tx.update, start, state, start)
            types = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
            assert types(after) == types(state)


@pytest.mark.parametrize("format", [Int8(min_size=0), ExpandedFP8(min_size=0)], ids=str)
def test_numbers_and_empty_arrays_are_not_stored(format):
    start = {"n": jnp.float32(2), "none": jnp.zeros((0, 4))}
    tx = with_moment_formats(optax.trace(0.9), {"trace": format})
    updates, state = tx.update(start, tx.init(start))
    assert updates["n"] == 2
    assert state.inner.trace["n"].dtype == jnp.float32


def test_a_float32_state_is_refused():
    state = jax.eval_shape(adamw(1e-2, mu=Float32(), nu=Float32()).init, params())
    for format in (Int8(), BFloat16(), FP8()):
        tx = adamw(1e-2, mu=format, nu=Float32())
        with pytest.raises(ValueError, match="another format has stored"):
            jax.eval_shape(tx.update, params(), state, params())


def test_seeds_of_64_bits():
    tx = with_moment_formats(optax.trace(0.9), {"trace": BFloat16("stochastic")}, seed=2**40 + 7)
    assert jax.jit(tx.init)(params()).seed == 7


def test_an_fp8_master_that_is_forced_loses_small_updates():
    """The reason why it is refused: each update is 2^-6 of a weight."""
    start, grads = {"w": np.ones((64, 128), jnp.bfloat16)}, {"w": np.ones((64, 128), np.float32)}
    start["w"][0, 0], grads["w"][0, 0] = 1.75, 0
    found = {}
    for master in (FP8(force=True), FP8(fp8.E5M2, force=True), BFloat16Plus(bits=8)):
        tx = with_master_weights(optax.sgd(2.0**-6), master=master)
        weights, state = jax.jit(functools.partial(init_master_weights, tx))(start)
        update = jax.jit(tx.update)
        for _ in range(8):
            updates, state = update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
        found[str(master)] = float(np.asarray(weights["w"])[1, 1])
        held = np.asarray(master_weights(state, weights)["w"])
        assert_same_bits(weights["w"], held.astype(jnp.bfloat16))
    e4m3, e5m2, right = found.values()
    assert right == 1 - 8 * 2**-6
    assert e4m3 == e5m2 == 1
    with pytest.raises(ValueError, match="no key"):
        with_master_weights(optax.sgd(0.1), master=FP8(rounding="stochastic", force=True))
