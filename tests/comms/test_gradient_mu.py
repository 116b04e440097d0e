"""mu moves by FP8-LM's rule, step by step, and its state is checked."""

import functools

import gradient_sums as sums
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.comms import AutoScaledFP8, BFloat16Sum, GradientSumState, TwoPhaseFP8

D = 4
MESH = functools.partial(sums.mesh_of, d=D)


def gradients(step, size):
    """Devices agree more or less. Some steps have zeros only, some an inf or NaN."""
    common = sums.heavy_tailed(1, size, seed=step)
    own = sums.heavy_tailed(D, size, seed=100 + step)
    share = np.float32([0, 1, 0.9, 0.3][step % 4])
    grads = share * common + (1 - share) * own
    if step in (5, 11):
        grads[:] = 0
    if step == 2:
        grads[1, 3] = np.nan
    if step == 3:
        grads[3, 0] = np.inf
    return grads


@pytest.mark.parametrize(
    ("max_saturated", "growth_steps", "patience"),
    [
        (2e-3, 10, 0),
        (1e-3, 100, 1),
        pytest.param(1e-5, 1000, 0, marks=pytest.mark.slow),
        pytest.param(0, 1, 0, marks=pytest.mark.slow),
    ],
)
def test_mu_step_by_step(max_saturated, growth_steps, patience):
    size = 2000
    method = AutoScaledFP8(
        max_saturated=max_saturated, growth_steps=growth_steps, patience=patience, min_size=0
    )
    state = fp8.comms.init_gradient_sums(np.zeros(size, np.float32), method)
    state = jax.device_put(state, NamedSharding(MESH(), P()))  # as it is after a step
    traces = []

    def local(g, state):
        traces.append(1)
        return fp8.comms.all_reduce_gradients(g, "d", method=method, state=state)

    step_on = sums.on_devices(local, MESH(), "d")
    mu, quiet, halved, nonfinite, moves, shares = np.float32(1), 0, 0, 0, set(), ()
    for step in range(16):
        grads = gradients(step, size)
        found, state = step_on(grads, state)
        if not np.all(np.isfinite(grads)):
            nonfinite += 1
            assert np.all(np.isnan(found))
            assert_same_bits((state.saturated, state.underflowed), shares)  # of the finite step
            moves.add("left")
        else:
            want, clipped, _ = sums.auto_scaled(grads, mu)
            assert_same_bits(found, want)
            if not np.any(grads):
                moves.add("left")
            elif clipped > max_saturated * size:
                mu, quiet, halved = mu / 2, 0, halved + 1
                moves.add("halved")
            elif (quiet := quiet + 1) <= patience:
                moves.add("waited")
            else:
                mu = mu * np.float32(2 ** (1 / growth_steps))
                moves.add("grown")
        shares = state.saturated, state.underflowed
        assert_same_bits(state.mu, np.float32(mu))
        counters = state.quiet_steps, state.halved_steps, state.nonfinite_steps
        assert tuple(map(int, counters)) == (quiet, halved, nonfinite)
    assert moves == {"left", "halved", "grown"} | ({"waited"} if patience else set())
    assert len(traces) == 1  # no step is traced again


@pytest.mark.parametrize("clipped", [20, 21])
def test_the_share_that_halves_is_exact(clipped):
    """20 of 4000 is 0.005 and not above it. In float32, 20 * (1 / 4000) > 0.005."""
    assert np.float32(20) * np.float32(1 / 4000) > np.float32(0.005)
    grads = np.full((D, 4000), 0.25, np.float32)
    grads[:, :clipped] = 448
    method = AutoScaledFP8(max_saturated=0.005, min_size=0)
    state = fp8.comms.init_gradient_sums(grads[0], method)
    _, state = sums.reduced(grads, MESH(), "d", method=method, state=state)
    assert int(state.halved_steps) == (clipped == 21)
    np.testing.assert_allclose(state.saturated, clipped / 4000, rtol=1e-6)


@pytest.mark.parametrize("scaling", ["pre", "post"])
def test_without_auto_scaling_mu_stays(scaling):
    grads = np.full((D, 3000), 448, np.float32)
    method = AutoScaledFP8(scaling=scaling, min_size=0)
    state = fp8.comms.init_gradient_sums(grads[0], method)
    found, state = sums.reduced(grads, MESH(), "d", method=method, state=state)
    np.testing.assert_array_equal(found, 448 if scaling == "pre" else 448 / D)
    assert (state.mu, state.halved_steps) == (1, 0)
    assert float(state.saturated) == (scaling == "post")


def test_mu_has_a_bound():
    """One value is clipped in each step, which this method allows. mu would grow for ever."""
    method = AutoScaledFP8(growth_steps=1, max_saturated=0.5, min_size=0)
    grads = np.zeros((D, 2048), np.float32)
    grads[0, 0] = 1
    state = fp8.comms.init_gradient_sums(grads[0], method)
    for mu, after in ((2.0**18, 2.0**19), (2.0**20, 2.0**20)):
        given = state._replace(mu=jnp.float32(mu))
        _, found = sums.reduced(grads, MESH(), "d", method=method, state=given)
        assert found.mu == after


def test_values_that_several_devices_clip_are_at_most_all_values():
    grads = np.full((D, 2048), 448, np.float32)
    state = fp8.comms.init_gradient_sums(grads[0], AUTO)._replace(mu=jnp.float32(64))
    found, state = sums.reduced(grads, MESH(), "d", method=AUTO, state=state)
    np.testing.assert_array_equal(found, 448 / 64 / D)
    assert state.saturated == 1


def test_each_gradient_has_its_mu():
    grads = {"a": np.full((D, 4096), 448, np.float32), "b": {"c": sums.heavy_tailed(D, 4096)}}
    grads["b"]["c"][0, 0] = 1
    method = AutoScaledFP8()
    state = fp8.comms.init_gradient_sums(jax.tree.map(lambda g: g[0], grads), method)
    _, state = sums.reduced(grads, MESH(), "d", method=method, state=state)
    assert state.mu["a"] == 0.5
    assert_same_bits(state.mu["b"]["c"], np.float32(2 ** (1 / 1000)))
    assert jax.tree.structure(state.underflowed) == jax.tree.structure(grads)


def test_methods_without_state():
    params = {"w": jnp.ones(3)}
    assert fp8.comms.init_gradient_sums(params, BFloat16Sum()) is None
    assert fp8.comms.init_gradient_sums(params, TwoPhaseFP8()) is None
    abstract = jax.eval_shape(lambda: params)
    assert isinstance(fp8.comms.init_gradient_sums(abstract, AutoScaledFP8()), GradientSumState)


AUTO = AutoScaledFP8(min_size=0)
GRADS = {"w": sums.heavy_tailed(D, 2048)}
STATE = fp8.comms.init_gradient_sums({"w": 0.0}, AUTO)
MISUSE = {
    "no state": (AUTO, None, TypeError, ("state is missing", "init_gradient_sums(params, method)")),
    "of another method": (
        TwoPhaseFP8(),
        STATE,
        TypeError,
        ("state is a GradientSumState", "TwoPhaseFP8 has no state", "Leave state= out"),
    ),
    "no GradientSumState": (AUTO, {"w": 1.0}, TypeError, ("state is a dict", "GradientSumState")),
    "another tree": (
        AUTO,
        fp8.comms.init_gradient_sums({"v": 0.0}, AUTO),
        ValueError,
        ("state.mu has the structure", "'v'", "'w'", "init_gradient_sums(params, method)"),
    ),
    "stacked": (
        AUTO,
        jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), STATE),
        ValueError,
        ("[(3,)]", "must be one number", "in_specs=jax.P()"),
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_of_state(case):
    method, state, error, parts = MISUSE[case]
    with pytest.raises(error, match=mentions(*parts)):
        sums.reduced(GRADS, MESH(), "d", method=method, state=state)


def test_a_state_of_each_device_is_refused():
    def local(g, state):
        state = jax.tree.map(lambda leaf: leaf[0], state)
        return fp8.comms.all_reduce_gradients(g[0], "d", method=AUTO, state=state)

    state = jax.tree.map(lambda leaf: np.stack([leaf] * D), fp8.comms.init_gradient_sums(0.0, AUTO))
    mapped = jax.shard_map(local, mesh=MESH(), in_specs=(P("d"), P("d")), out_specs=P())
    with pytest.raises(ValueError, match=mentions("state", "varies over ['d']", "same mu")):
        mapped(GRADS["w"], state)


def test_without_types_somebody_has_to_say_whether_gradients_are_split():
    mesh = sums.mesh_of(a=4, b=2)
    call = functools.partial(sums.reduced, GRADS, mesh, "a", vma=False, method=AUTO, state=STATE)
    with pytest.raises(
        ValueError, match=mentions("check_vma=False", "['b']", "also_split_over=('b',)", "()")
    ):
        call()
    assert_same_bits(call(also_split_over=())[0], call(also_split_over=["b"])[0])


@pytest.mark.parametrize(
    ("method", "options", "error", "parts"),
    [
        (AutoScaledFP8, {"scaling": "none"}, ValueError, ("scaling='none'", "'auto'")),
        (AutoScaledFP8, {"reduction": "ring"}, ValueError, ("reduction='ring'", "'all_reduce'")),
        (AutoScaledFP8, {"max_saturated": 1.0}, ValueError, ("max_saturated=1.0", "1e-5")),
        (AutoScaledFP8, {"growth_steps": 0}, ValueError, ("growth_steps=0", "at least 1")),
        (AutoScaledFP8, {"power_of_two": 1}, TypeError, ("power_of_two=1", "True or False")),
        (AutoScaledFP8, {"format": fp8.E8M0}, ValueError, ("format=E8M0", "[E4M3, E5M2]")),
        (TwoPhaseFP8, {"group": 0}, ValueError, ("group=0", "at least 1")),
        (TwoPhaseFP8, {"scale": "float32"}, TypeError, ("scale='float32'", "fp8.ScaleRule(")),
        (BFloat16Sum, {"min_size": -1}, ValueError, ("min_size=-1", "at least 0")),
        (BFloat16Sum, {"min_size": 1.5}, ValueError, ("min_size=1.5", "integer")),
    ],
)
def test_misuse_of_methods(method, options, error, parts):
    with pytest.raises(error, match=mentions(*parts)):
        method(**options)


@pytest.mark.parametrize(
    ("format", "reduction"),
    [
        (fp8.E4M3, "exchange"),
        (fp8.E4M3, "all_reduce"),
        (fp8.E5M2, "exchange"),
        pytest.param(fp8.E5M2, "all_reduce", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_sum_that_overflows_is_clipped_in_every_format(format, reduction):
    """E4M3 overflows to NaN, and E5M2 to inf."""
    method = AutoScaledFP8(format=format, reduction=reduction, min_size=0)
    grads = np.full((D, 2048), 1.75, np.float32)
    state = fp8.comms.init_gradient_sums(grads[0], method)
    found, state = sums.reduced(grads, MESH(), "d", method=method, state=state)
    np.testing.assert_array_equal(found, 1.75 / D)
    assert (int(state.nonfinite_steps), int(state.halved_steps)) == (0, 1)


@pytest.mark.parametrize("method", [TwoPhaseFP8(min_size=0), AutoScaledFP8(min_size=0)], ids=str)
def test_a_derivative_of_a_sum_in_fp8_is_refused(method):
    grads = np.ones((D, 2048), np.float32)
    state = fp8.comms.init_gradient_sums(grads[0], method)
    loss = lambda g: jnp.sum(sums.reduced(g, MESH(), "d", method=method, state=state)[0])
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(loss)(grads)
