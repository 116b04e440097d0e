"""Optimizers with stored moments: against optax, inside optax, on meshes, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moment_cases import MIXED, PAIRS, SHAPE, gradients, params, train
from optim_cases import bytes_of
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.optim import (
    FP8,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    Float32,
    Int8,
    adamw,
    init_master_weights,
    scale_by_adam,
    scale_by_muon,
    with_master_weights,
    with_moment_formats,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_float32_is_optax_bit_for_bit():
    mine = train(adamw(1e-2, mu=Float32(), nu=Float32()), params())
    theirs = train(optax.adamw(1e-2), params())
    assert_same_bits(mine[0], theirs[0])
    assert_same_bits(mine[1].inner, theirs[1])


def some_params(pair):
    """A vector beside the matrix in two pairs. Op by op each shape has programs of its own."""
    return params() if pair in ("fp8-lm", "int8") else {"w": params()["w"]}


def wide(format, stored):
    """In float32. Formats of 8 bits leave a small array there."""
    if isinstance(stored, jax.Array) and stored.dtype == jnp.float32:
        assert stored.size < format.min_size
        return stored
    return format.unpack(stored)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_step_is_that_of_optax_with_the_moments_that_were_stored(pair):
    mu, nu = PAIRS[pair]
    tx = scale_by_adam(mu=mu, nu=nu)
    _, state = train(tx, some_params(pair))
    read = state.inner._replace(
        mu={name: wide(mu, x) for name, x in state.inner.mu.items()},
        nu={name: wide(nu, x) for name, x in state.inner.nu.items()},
    )
    grads = {name: gradients(9)[name] for name in some_params(pair)}
    mine, _ = tx.update(grads, state)
    theirs, _ = optax.scale_by_adam().update(grads, read)
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize("pair", PAIRS)
def test_updates_are_near_those_of_float32(pair):
    mu, nu = PAIRS[pair]
    start = {"w": params()["w"]}
    mine, _ = train(adamw(1e-2, mu=mu, nu=nu), start, 8)
    theirs, _ = train(optax.adamw(1e-2), start, 8)
    moved = np.abs(np.asarray(theirs["w"] - params()["w"])).mean()
    assert np.abs(np.asarray(mine["w"] - theirs["w"])).mean() < 0.15 * moved


def test_bytes_of_a_parameter():
    """FP8-LM 6 with an FP8 gradient, COAT at most 2.19, and 5.1 with gradients released."""
    w = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    n = 1024 * 1024
    init = lambda tx: jax.eval_shape(tx.init, w)
    lm = with_master_weights(adamw(1e-3, mu=FP8(), nu=Float16()), master=Float16())
    gradient = jax.eval_shape(lambda w: fp8.quantize(w, fp8.E4M3), w["w"])
    assert bytes_of((init(lm), gradient)) / n == pytest.approx(6, abs=1e-4)
    coat = adamw(1e-3, mu=ExpandedFP8(), nu=ExpandedFP8())
    assert bytes_of(init(coat)) / n == pytest.approx(2.125, abs=1e-4)
    assert bytes_of(init(adamw(1e-3))) / n <= 2.1
    flash = with_master_weights(adamw(1e-3), master=BFloat16Plus(bits=8))
    assert bytes_of((w, init(flash))) / n <= 5.1


def test_gradients_may_be_quantized():
    tx = with_master_weights(adamw(1e-2, mu=FP8(), nu=Float16()), master=Float16())
    weights, state = init_master_weights(tx, params())
    grads = {
        name: fp8.quantize(g, fp8.E4M3) if name == "w" else g for name, g in gradients(0).items()
    }
    mine, state_of_mine = tx.update(grads, state, weights)
    high = {"w": grads["w"].dequantize(), "b": grads["b"]}
    theirs, state_of_theirs = tx.update(high, state, weights)
    apply = optax.apply_updates
    assert_same_bits(
        (apply(weights, mine), state_of_mine), (apply(weights, theirs), state_of_theirs)
    )


def test_tiny_gradients():
    """Gradients of 1e-8 beside some of 1: FP8 loses the second moment, and steps explode."""
    draw = np.random.default_rng(0)
    size = np.where(np.arange(SHAPE[1]) % 16 == 0, 1.0, 1e-8)

    def largest_step(mu, nu):
        tx = scale_by_adam(mu=mu, nu=nu, eps=1e-30)
        state = tx.init(jnp.zeros(SHAPE))
        for _ in range(20):
            step, state = tx.update(jnp.asarray(draw.normal(size=SHAPE) * size), state)
        return float(jnp.max(jnp.abs(step)))

    assert largest_step(Float32(), Float32()) < 5
    assert largest_step(Float32(), FP8(force=True)) > 1e3
    for pair in ("coat", "int8"):
        assert largest_step(*PAIRS[pair]) < 20


@pytest.mark.parametrize(
    "pair",
    ["fp8, int8", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp8-lm", "coat", "int8"))],
)
def test_inside_optax(pair):
    """Optax maps functions over states of two sorts: quantized tensors, and named tuples."""
    mu, nu = (MIXED | PAIRS)[pair]
    make = functools.partial(adamw, mu=mu, nu=nu)
    decay = {"w": True, "b": False}
    transformations = [
        optax.chain(optax.clip_by_global_norm(1.0), make(optax.cosine_decay_schedule(1e-2, 10))),
        make(1e-2, mask=decay, b2=0.95, nesterov=True),
        optax.MultiSteps(make(1e-2), 2),
        optax.partition({"a": make(1e-2), "z": optax.sgd(1e-2)}, {"w": "a", "b": "z"}),
        optax.masked(make(1e-2), decay),
        optax.inject_hyperparams(make)(learning_rate=optax.linear_schedule(1e-2, 0.0, 10)),
        with_master_weights(make(1e-2), master=BFloat16Plus()),
    ]
    # NumPy's arrays: inside the program, values of jax would be two programs more for each.
    grads = [jax.tree.map(np.asarray, gradients(i)) for i in range(2)]
    for tx in transformations:
        start = jax.tree.map(np.asarray, params())
        if tx is transformations[-1]:
            start = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start)

        def steps(start, state, tx=tx):
            for each in grads[: 2 if isinstance(tx, optax.MultiSteps) else 1]:
                updates, state = tx.update(each, state, start)
                start = optax.apply_updates(start, updates)
            return start, state

        types = jax.eval_shape(tx.init, start)
        trained, state = jax.jit(lambda start, run=steps, tx=tx: run(start, tx.init(start)))(start)
        # What a step leaves, the next one takes.
        assert jax.tree.structure(state) == jax.tree.structure(types)
        like = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
        assert like(state) == like(types)
        assert not np.array_equal(trained["w"], start["w"])
        assert np.all(np.isfinite(np.asarray(trained["w"], np.float32)))


@pytest.mark.parametrize("pair", ["fp8, int8", "stochastic"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(pair):
    mu, nu = MIXED[pair]
    tx = optax.apply_if_finite(adamw(1e-2, mu=mu, nu=nu), 3)
    update = jax.jit(tx.update)
    start, state = train(tx, params(), state=jax.jit(tx.init)(params()), update=update)
    for bad in (np.inf, np.nan):
        grads = jax.tree.map(np.array, gradients(5))
        grads["w"][3, 4] = bad
        updates, after = update(grads, state, start)
        assert_same_bits(optax.apply_updates(start, updates), start)
        assert_same_bits(after.inner_state, state.inner_state)
        assert after.total_notfinite == 1


def test_muon():
    start = {"w": params()["w"]}

    def run(tx):
        w, state = start["w"], tx.init(start)
        for i in range(4):
            updates, state = tx.update({"w": gradients(i)["w"]}, state, start)
            w = w - 0.01 * updates["w"]
        return w - start["w"], state

    exact, _ = run(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()}
        )
    )
    mine, state = run(scale_by_muon())
    assert bytes_of(state.inner.mu) <= 1.04 * start["w"].size
    assert jnp.linalg.norm(mine - exact) < 0.05 * jnp.linalg.norm(exact)
    with pytest.raises(ValueError, match=r"\['w'\] has shape \[4, 8, 8\], which is no matrix"):
        scale_by_muon().update({"w": jnp.ones((4, 8, 8))}, scale_by_muon().init({"w": start["w"]}))
    both = with_moment_formats(optax.contrib.muon(1e-2), {"mu": Int8(), "nu": Int8()})
    _, state = train(both, params())
    codes = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int8]
    assert [x.shape for x in codes] == [SHAPE]


@functools.partial(jax.jit, static_argnums=1)
def stored(x, formats, key):
    """What formats store of a first and of a second moment."""
    return [
        format.pack(each, None, signed=signed, key=key if format.is_stochastic else None)
        for format in formats
        for each, signed in ((x, True), (jnp.abs(x), False))
    ]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_stored_bits_do_not_depend_on_the_mesh(axis_type):
    formats = (*{format for pair in PAIRS.values() for format in pair},)
    x = np.asarray(gradients(0)["w"])
    wanted = stored(x, formats, jax.random.key(3))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
        assert_same_bits(stored(x, formats, jax.random.key(3)), wanted)
        # What reads them gives an update of the type of x, with the axes of an Explicit mesh.
        for mu, nu in PAIRS.values():
            tx = scale_by_adam(mu=mu, nu=nu)
            program = jax.make_jaxpr(lambda x, tx=tx: tx.update(x, tx.init(x))[0])(x)
            assert program.out_avals == [jax.typeof(x)]


def on_meshes():
    """What is stored, and the types of an update: `test_stored_bits_do_not_depend_on_the_mesh`."""
    for pair in {**MIXED, **PAIRS}:
        for axis_type in (AxisType.Auto, AxisType.Explicit):
            for spec in (P("data", "model"), P("data"), P(None, "model")):
                name = f"{spec}-{axis_type.name}-{pair}"
                quick = (pair, axis_type, spec) == ("int8", AxisType.Auto, P("data", "model"))
                marks = () if quick else pytest.mark.slow
                yield pytest.param(pair, axis_type, spec, id=name, marks=marks)


@pytest.mark.parametrize(("pair", "axis_type", "spec"), list(on_meshes()))
def test_bits_do_not_depend_on_the_mesh(pair, axis_type, spec):
    mu, nu = (MIXED | PAIRS)[pair]
    tx = scale_by_adam(mu=mu, nu=nu)
    start = {"w": params()["w"]}
    gradient = lambda i: {"w": gradients(i)["w"]}

    def trained(state, put):
        for i in range(3):
            updates, state = tx.update(put(gradient(i)), state)
        return updates, state

    wanted = trained(tx.init(start), lambda tree: tree)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    put = lambda tree: jax.device_put(tree, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        assert_same_bits(trained(tx.init(put(start)), put), wanted)


@pytest.mark.parametrize(
    "pair",
    [
        "fp8, int8",
        "expanded, float16",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp8-lm", "coat", "int8", "bfloat16")),
    ],
)
def test_inside_shard_map(pair):
    """State made outside, groups and scales as on one device."""
    mu, nu = (MIXED | PAIRS)[pair]
    tx = adamw(1e-2, mu=mu, nu=nu)
    start = {"w": params()["w"]}
    state = tx.init(start)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def spec(x):
        return P("data", "model") if jnp.ndim(x) == 2 else P()

    specs = jax.tree.map(spec, (start, state))
    step = jax.shard_map(
        lambda start, state, grads: tx.update(grads, state, start),
        mesh=mesh, in_specs=(*specs, specs[0]), out_specs=specs,
    )  # fmt: skip
    wanted = jax.jit(tx.update)
    for i in range(3):
        grads = {"w": gradients(i)["w"]}
        mine = jax.jit(step)(start, state, grads)
        theirs = wanted(grads, state, start)
        stored = (mine[1], theirs[1])
        for one, other in zip(*map(jax.tree.leaves, stored), strict=True):
            assert one.dtype == other.dtype
            a, b = (np.asarray(x).astype(np.float32) for x in (one, other))
            # XLA may contract products and sums differently in the two programs.
            close = np.isclose(a, b, rtol=1e-4, atol=0) if one.dtype == jnp.float32 else a == b
            assert np.mean(~close) < 0.03
        state = theirs[1]


def test_a_group_on_two_devices_is_refused():
    tx = adamw(1e-2)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        lambda w: tx.init({"w": w}).inner[0].mu["w"].roots,
        mesh=mesh, in_specs=P(None, "model"), out_specs=P(None, "model"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="group=128 does not divide"):
        jax.eval_shape(step, params()["w"])
