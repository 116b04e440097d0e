"""The Triton kernel of AdamW, interpreted: against optax, and no write outside of its arrays."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from triton_interpreter import interpreted, needs_triton

from jaxfp8.optim import BFloat16Plus, ExpandedFP8, Int8, adamw, fused_adamw, with_master_weights


@pytest.fixture(autouse=True)
def triton():
    """Before a test prepares anything."""
    needs_triton()


MOMENTS = {"int8": Int8(min_size=0), "expanded": ExpandedFP8(min_size=0)}
MASTERS = {"float32": None, "8": BFloat16Plus(bits=8), "16": BFloat16Plus(bits=16)}
OPTIONS = {"learning_rate": 1e-2, "b2": 0.95, "weight_decay": 0.1}


def optimizer(fused, moments, master):
    if fused:
        return fused_adamw(**OPTIONS, moments=MOMENTS[moments], master=MASTERS[master])
    tx = adamw(**OPTIONS, mu=MOMENTS[moments], nu=MOMENTS[moments])
    return tx if master == "float32" else with_master_weights(tx, master=MASTERS[master])


def step(fused, moments, master, grads, state, w, **extra):
    """New weight, and new state as a list of its leaves. A fused update is an `Overwrite`."""
    tx = optimizer(fused, moments, master)
    with jax.numpy_dtype_promotion("standard"):
        structure = jax.tree.structure(jax.eval_shape(tx.init, w))
        state = jax.tree.unflatten(structure, map(jnp.asarray, state))
        update, new = tx.update(jnp.asarray(grads), state, jnp.asarray(w), **extra)
        return [jnp.asarray(w) + update, *jax.tree.leaves(new)]


plain = jax.jit(functools.partial(step, False), static_argnums=(0, 1))


def skipped(*given):
    return step(*given, skip=True)


@functools.cache
def case(moments, master, shape, dtype=np.float32, steps=2):
    """Gradients, state and weight after two steps of the plain optimizer, as NumPy arrays."""
    draw = np.random.default_rng(1)
    w = draw.normal(size=shape).astype(np.float32 if master == "float32" else jnp.bfloat16)
    state = jax.device_get(jax.tree.leaves(jax.jit(optimizer(False, moments, master).init)(w)))

    def gradient():
        # Neighbours differ by many powers of two. One group is all zeros.
        g = draw.normal(size=shape) * 2.0 ** draw.integers(-20, 1, size=shape)
        g.reshape(-1, 128)[1] = 0
        return g.astype(dtype)

    for _ in range(steps):
        w, *state = jax.device_get(plain(moments, master, gradient(), state, w))
    return gradient(), state, w


def assert_near(mine, theirs):
    """Codes differ by 1 at most, and in few places. XLA contracts products and sums."""
    for ours, leaf in zip(mine, theirs, strict=True):
        leaf = np.asarray(leaf)
        ours = ours.view(leaf.dtype).reshape(leaf.shape)
        if leaf.dtype.itemsize == 1 or leaf.dtype == np.uint16:
            a, b = (x.view(np.uint8 if x.dtype.itemsize == 1 else x.dtype) for x in (ours, leaf))
            differs = a != b
            assert np.mean(differs) < (1.0 if leaf.dtype == np.uint16 else 0.02)
            if leaf.dtype != np.uint16 and a.size:
                steps = np.abs(a.astype(np.int32) - b.astype(np.int32))
                assert np.all((steps <= 1) | (steps == 255))
        else:
            a, b = ours.astype(np.float64), leaf.astype(np.float64)
            rtol = 2**-8 if leaf.dtype.itemsize == 2 else 1e-5
            near = np.isclose(a, b, rtol=rtol, atol=1e-6, equal_nan=True)
            # A power depends on the smallest moment, a sum in which most digits may have cancelled.
            assert np.mean(near) > 0.98
            np.testing.assert_allclose(a, b, rtol=max(rtol, 1e-3), atol=1e-6)


DEFAULT = {("int8", "8"), ("expanded", "16"), ("expanded", "float32")}


@pytest.mark.parametrize(
    ("moments", "master"),
    [
        pytest.param(*pair, marks=() if pair in DEFAULT else pytest.mark.slow)
        for pair in itertools.product(MOMENTS, MASTERS)
    ],
)
def test_is_the_step_of_optax(moments, master):
    """Of 66 groups, the last program has two."""
    shape, dtype = ((11, 768), np.float32) if master == "8" else ((2, 3, 1408), jnp.bfloat16)
    given = case(moments, master, shape, dtype)
    mine = interpreted(step, True, moments, master, *given)
    assert_near(mine, plain(moments, master, *given))


def test_a_skipped_step_changes_nothing():
    g, state, w = case("int8", "8", (8, 256))
    mine = interpreted(skipped, True, "int8", "8", np.full_like(g, np.nan), state, w)
    for ours, leaf in zip(mine, [w, *state], strict=True):
        np.testing.assert_array_equal(ours, np.atleast_1d(leaf).view(np.uint8))


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_group_with_a_value_that_is_not_finite(moments, bad):
    g, state, w = case(moments, "float32", (3, 256))
    g = g.copy()
    g[1, 130] = bad
    mine = interpreted(step, True, moments, "float32", g, state, w)
    theirs = plain(moments, "float32", g, state, w)
    for ours, leaf in zip(mine, theirs, strict=True):
        leaf = np.asarray(leaf)
        ours = ours.view(leaf.dtype).reshape(leaf.shape)
        if leaf.dtype == np.float32:
            np.testing.assert_array_equal(np.isnan(ours), np.isnan(leaf))
    assert np.isnan(np.asarray(theirs[0])).sum() in (1, 128)
    # Read again, the group is NaN as a whole.
    again = interpreted(step, True, moments, "float32", np.zeros_like(g), _states(mine, theirs), w)
    weight = again[0].view(np.float32).reshape(w.shape)
    assert np.isnan(weight[1, 128:]).all()
    assert np.isfinite(np.delete(weight, 1, 0)).all()


def _states(mine, theirs):
    return [
        ours.view(np.asarray(leaf).dtype).reshape(np.shape(leaf))
        for ours, leaf in zip(mine[1:], theirs[1:], strict=True)
    ]


def on_a_mesh(fused, kind, moments, master, g, state, w):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    spec = P("a", "b")
    specs = [spec if np.ndim(x) else P() for x in state]
    run = lambda g, state, w: step(fused, moments, master, g, state, w)
    with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)):
        if kind == "shard_map":
            run = jax.shard_map(run, in_specs=(spec, specs, spec), out_specs=[spec, *specs])
        state = [*map(jax.device_put, state, specs)]
        return jax.jit(run)(jax.device_put(g, spec), state, jax.device_put(w, spec))


# XLA:CPU crashes on a callback inside of custom_partitioning: tests/deviceless has the Auto mesh.
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_on_a_mesh(kind):
    given = case("int8", "8", (8, 512))
    mine = interpreted(on_a_mesh, True, kind, "int8", "8", *given)
    assert_near(mine, interpreted(step, True, "int8", "8", *given))


AXES = [(0, 0, 0), (0, None, None), (0, 0, None), (0, None, 0), (None, 0, 0), (None, None, 0)]


def mapped(fused, axes, g, state, w):
    one = lambda g, state, w: step(fused, "int8", "float32", g, state, w)
    return jax.vmap(one, axes)(g, state, w)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_under_vmap(axes):
    """What is not mapped is shared."""
    cases = [case("int8", "float32", (4, 256), steps=steps) for steps in (1, 3, 4)]
    stacked = jax.tree.map(lambda *each: np.stack(each), *cases)
    given = [
        several if axis == 0 else one
        for several, one, axis in zip(stacked, cases[0], axes, strict=True)
    ]
    mine = interpreted(mapped, True, axes, *given)
    chosen = [
        [each if axis == 0 else cases[0][i] for each in (one[i] for one in cases)]
        for i, axis in enumerate(axes)
    ]
    assert_near(mine, stack([plain("int8", "float32", *one) for one in zip(*chosen, strict=True)]))


def stack(results):
    return jax.tree.map(lambda *each: np.stack(each), *results)


def at_a_rate(fused, rate, skip, g, state, w):
    moments = MOMENTS["int8"]
    tx = fused_adamw(rate, moments=moments) if fused else adamw(rate, mu=moments, nu=moments)
    with jax.numpy_dtype_promotion("standard"):
        structure = jax.tree.structure(jax.eval_shape(tx.init, w))
        old = jax.tree.unflatten(structure, map(jnp.asarray, state))
        extra = {"skip": skip} if fused else {}
        update, new = tx.update(jnp.asarray(g), old, jnp.asarray(w), **extra)
        after = [jnp.asarray(w) + update, *jax.tree.leaves(new)]
        if fused:
            return after
        before = [jnp.asarray(w), *jax.tree.leaves(old)]
        return [jnp.where(skip, a, b) for a, b in zip(before, after, strict=True)]


plain_at_a_rate = jax.jit(functools.partial(at_a_rate, False))


def swept(rates, skips, g, state, w):
    """One start, several learning rates, and steps of which some are skipped."""
    one = lambda rate, skip: at_a_rate(True, rate, skip, g, state, w)
    return jax.vmap(one, (0 if rates.ndim else None, 0 if skips.ndim else None))(rates, skips)


@pytest.mark.parametrize("skips", [False, [False, True, False]], ids=str)
@pytest.mark.parametrize("rates", [1e-2, [1e-3, 1e-2, 1e-1]], ids=str)
def test_a_sweep_over_scalars(rates, skips):
    rates, skips = np.float32(rates), np.asarray(skips)
    if not rates.ndim and not skips.ndim:
        rates = rates[None]
    given = case("int8", "float32", (4, 256))
    mine = interpreted(swept, rates, skips, *given)
    each = [
        plain_at_a_rate(*one, *given)
        for one in zip(*np.broadcast_arrays(rates, skips), strict=True)
    ]
    assert_near(mine, stack(each))
