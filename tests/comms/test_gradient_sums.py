"""Sums of gradients are what NumPy computes, to the bit, and the same on every device."""

import functools
import itertools

import gradient_sums as sums
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.comms import AutoScaledFP8, BFloat16Sum, TwoPhaseFP8

D = 4
MESH = functools.partial(sums.mesh_of, d=D)
SHAPES = {"whole groups": (8, 256), "padded": (7, 301), "a vector": (2050,)}
RULES = {
    "power_of_two": fp8.ScaleRule(power_of_two=True),
    "float32": fp8.ScaleRule(),
    "rceil": fp8.ScaleRule(scale_format=fp8.E8M0),
}


def pairs():
    """By default each rule and each shape, with and without types."""
    chosen = {
        ("power_of_two", "whole groups", False),
        ("float32", "a vector", True),
        ("rceil", "padded", True),
        ("power_of_two", "padded", True),
    }
    for row in itertools.product(RULES, SHAPES, (True, False)):
        yield pytest.param(*row, marks=() if row in chosen else pytest.mark.slow)


@pytest.mark.parametrize(("rule", "shape", "vma"), list(pairs()))
def test_two_phases_are_those_of_numpy(rule, shape, vma):
    grads = sums.heavy_tailed(D, *SHAPES[shape])
    method = TwoPhaseFP8(scale=RULES[rule], min_size=0)
    found, state = sums.reduced(grads, MESH(), "d", vma=vma, method=method)
    want = sums.two_phase(grads, rule=rule)[1]
    assert state is None
    assert_same_bits(found, want if vma else np.stack([want] * D))
    error = np.linalg.norm(want - grads.mean(0)) / np.linalg.norm(grads.mean(0))
    assert 0.01 < error < 0.05  # two roundings to 3 bits of mantissa


@pytest.mark.parametrize(
    ("group", "mean", "fmt"),
    [
        (32, True, "E5M2"),
        (256, False, "E4M3"),
        pytest.param(32, True, "E4M3", marks=pytest.mark.slow),
        pytest.param(256, False, "E5M2", marks=pytest.mark.slow),
    ],
)
def test_two_phases_with_other_fields(fmt, group, mean):
    grads = sums.heavy_tailed(3, 5, 300)  # three devices: 1 / 3 is no power of two
    method = TwoPhaseFP8(format=getattr(fp8, fmt), group=group, min_size=0)
    found, _ = sums.reduced(grads, sums.mesh_of(d=3), "d", method=method, mean=mean)
    assert_same_bits(found, sums.two_phase(grads, group=group, fmt=fmt, mean=mean)[1])


@pytest.mark.parametrize(
    ("vma", "axis"),
    [
        (True, 0),
        (False, 1),
        (True, -1),
        *(
            pytest.param(vma, i, marks=pytest.mark.slow)
            for vma, i in ((False, 0), (True, 1), (False, -1))
        ),
    ],
)
def test_a_shard_is_summed_in_float32(axis, vma):
    """Each shard is a slice: its groups do not depend on other shards."""
    grads = sums.heavy_tailed(D, 8, 256, 12)
    method = TwoPhaseFP8(min_size=0)
    spec = [None] * 3
    spec[axis] = "d"
    shard = functools.partial(
        fp8.comms.reduce_scatter_gradients, axis_name="d", axis=axis, method=method
    )
    found = sums.on_devices(shard, MESH(), "d", vma=vma, out=P(*spec))(grads)
    parts = np.stack(np.split(grads, D, axis=axis % 3 + 1))  # [shards, devices, ...]
    rows = parts.reshape(D, D, -1).transpose(1, 0, 2)
    padding = -rows.shape[2] % 128
    total = sums.two_phase(np.pad(rows, ((0, 0), (0, 0), (0, padding))))[0]
    want = [row[: rows.shape[2]].reshape(parts.shape[2:]) for row in total]
    assert_same_bits(found, np.concatenate(want, axis=axis % 3))


def test_scales_are_unified_by_hand():
    """Four devices with the amaxes 7, 3.5, 14 and 0: all multiply by 448 / 14 = 32."""
    grads = np.zeros((4, 512), np.float32)
    grads[0, :3] = 7, 1, 0.01
    grads[1, :3] = 3.5, 1, 0.03
    grads[2, :4] = 0, 1, -14, 14
    # Payloads: 224, 32, 0.3125 (of 0.32); 112, 32, 0.9375 (of 0.96); 0, 32, -448, 448.
    # Sums: 336 is between 320 and 352, and goes to 320, the even one; 96; -446.75 to -448; 448.
    want = np.zeros(512, np.float32)
    want[:4] = np.array([320, 96, -448, 448]) / (32 * 4)
    for vma, reduction in ((True, "exchange"), (True, "all_reduce"), (False, "exchange")):
        method = AutoScaledFP8(min_size=0, reduction=reduction)
        state = fp8.comms.init_gradient_sums(grads[0], method)
        found, state = sums.reduced(grads, MESH(), "d", vma=vma, method=method, state=state)
        assert_same_bits(found, want if vma else np.stack([want] * 4))
        assert np.all(np.asarray(state.underflowed) == 0)


@pytest.mark.parametrize(
    ("power_of_two", "mean", "scaling"),
    [
        (True, True, "auto"),
        (False, False, "pre"),
        (True, True, "post"),
        pytest.param(False, False, "auto", marks=pytest.mark.slow),
        pytest.param(True, True, "pre", marks=pytest.mark.slow),
        pytest.param(False, False, "post", marks=pytest.mark.slow),
    ],
)
def test_auto_scaling_is_that_of_numpy(scaling, power_of_two, mean):
    grads = sums.heavy_tailed(D, 7, 301)
    grads[:, 0, :2] = [np.abs(grads).max(), -np.abs(grads).max()]  # these sums are clipped
    grads[:, 1, :50] *= 2.0**-12  # these values become zero
    method = AutoScaledFP8(scaling=scaling, power_of_two=power_of_two, min_size=0)
    state = fp8.comms.init_gradient_sums(grads[0], method)
    state = state._replace(mu=np.float32(1.7))
    found, state = sums.reduced(grads, MESH(), "d", method=method, state=state, mean=mean)
    want, clipped, zeros = sums.auto_scaled(
        grads, 1.7, mean=mean, scaling=scaling, power_of_two=power_of_two
    )
    assert_same_bits(found, want)
    np.testing.assert_allclose(state.saturated, clipped / grads[0].size, rtol=1e-6)
    np.testing.assert_allclose(state.underflowed, zeros / grads.size, rtol=1e-6)
    assert (clipped > 0) == (scaling != "pre")
    assert zeros > 0


def test_an_all_reduce_of_fp8_that_overflows_is_clipped():
    """XLA:CPU makes NaN of a sum above 464. Such sums are computed again, by exchange."""
    grads = sums.heavy_tailed(D, 2048)
    grads[:, 5:8] = np.float32([[1], [1], [0.5], [-0.25]]) * np.float32([1, -1, 1])
    results = {}
    for reduction in ("exchange", "all_reduce"):
        method = AutoScaledFP8(min_size=0, reduction=reduction)
        state = fp8.comms.init_gradient_sums(grads[0], method)
        results[reduction] = sums.reduced(grads, MESH(), "d", method=method, state=state)
    assert_same_bits(results["all_reduce"], results["exchange"])
    found, state = results["all_reduce"]
    clipped = 448 / sums.multiplier_of(grads) / D
    np.testing.assert_array_equal(np.asarray(found)[5:8], clipped * np.float32([1, -1, 1]))
    assert state.saturated == np.float32(3 / 2048)


@pytest.mark.parametrize(("smaller", "exchanged"), [(12, 1), (0, 0)])
def test_a_sum_at_the_largest_value(smaller, exchanged):
    """After an all-reduce 448 may be a clipped sum, so it counts. An exchange knows."""
    grads = np.zeros((D, 512), np.float32)
    grads[:2, 0] = 448, smaller
    for reduction, clipped in (("all_reduce", 1), ("exchange", exchanged)):
        method = AutoScaledFP8(min_size=0, reduction=reduction)
        state = fp8.comms.init_gradient_sums(grads[0], method)
        found, state = sums.reduced(grads, MESH(), "d", method=method, state=state)
        assert found[0] == 448 / D
        assert state.saturated == np.float32(clipped / 512)


def test_an_all_reduce_of_fp8_without_overflow():
    grads = sums.heavy_tailed(D, 4096)
    grads[0, 9] = 1  # one value that is far above all others
    method = AutoScaledFP8(min_size=0, reduction="all_reduce")
    state = fp8.comms.init_gradient_sums(grads[0], method)
    found, state = sums.reduced(grads, MESH(), "d", method=method, state=state)
    want = sums.auto_scaled(grads)[0]
    # The order of additions and their roundings are XLA's. E4M3 has 3 bits of mantissa.
    np.testing.assert_allclose(found, want, rtol=2**-3, atol=2**-9 / sums.multiplier_of(grads) / D)
    assert state.saturated == 0


@pytest.mark.parametrize(
    "method",
    [BFloat16Sum(min_size=0), TwoPhaseFP8(min_size=0), AutoScaledFP8(min_size=0)],
    ids=type,
)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
# XLA:CPU's maximum loses NaN in larger arrays.
@pytest.mark.parametrize("size", [pytest.param(512, marks=pytest.mark.slow), 8192])
def test_inf_and_nan_of_one_device(method, bad, size):
    grads = {"w": sums.heavy_tailed(D, size), "v": sums.heavy_tailed(D, size, seed=1)}
    grads["w"][2, 77] = bad
    state = fp8.comms.init_gradient_sums({"w": 0.0, "v": 0.0}, method)
    found, state = sums.reduced(grads, MESH(), "d", method=method, state=state)
    assert np.all(np.isfinite(found["v"]))
    finite = np.isfinite(found["w"])
    if isinstance(method, BFloat16Sum):
        assert np.flatnonzero(~finite).tolist() == [77]
    elif isinstance(method, TwoPhaseFP8):  # its group
        assert np.flatnonzero(~finite).tolist() == list(range(128))
        assert np.all(np.isnan(np.asarray(found["w"])[:128]))
    else:
        assert np.all(np.isnan(found["w"]))
        assert (int(state.nonfinite_steps["w"]), int(state.nonfinite_steps["v"])) == (1, 0)
        assert state.mu["w"] == 1


def test_small_gradients_are_summed_in_float32():
    grads = sums.heavy_tailed(D, 511)  # the next larger one has a group for each device
    bfloat16 = grads.astype(jnp.bfloat16)
    for method in (BFloat16Sum(), TwoPhaseFP8(min_size=0), AutoScaledFP8(min_size=0)):
        state = fp8.comms.init_gradient_sums(grads[0], method)
        found, after = sums.reduced(grads, MESH(), "d", method=method, state=state)
        np.testing.assert_allclose(found, grads.mean(0), rtol=1e-5, atol=1e-8)
        assert_same_bits(after, state)
        shorter, _ = sums.reduced(bfloat16, MESH(), "d", method=method, state=state)
        assert shorter.dtype == (jnp.bfloat16 if isinstance(method, BFloat16Sum) else jnp.float32)
        mean = bfloat16.astype(np.float64).mean(0)
        rounding = 2.0**-8 if isinstance(method, BFloat16Sum) else 1e-5
        np.testing.assert_allclose(np.asarray(shorter, np.float64), mean, rtol=rounding, atol=1e-8)


def test_one_device_rounds_nothing():
    grads = sums.heavy_tailed(1, 8192)
    for method in (BFloat16Sum(), TwoPhaseFP8(), AutoScaledFP8()):
        state = fp8.comms.init_gradient_sums(grads[0], method)
        found, after = sums.reduced(grads, sums.mesh_of(d=1), "d", method=method, state=state)
        assert_same_bits(found, grads[0])
        assert_same_bits(after, state)


def test_trees_keep_their_structure():
    grads = {"w": sums.heavy_tailed(D, 4096), "none": None, "list": [sums.heavy_tailed(D, 3)]}
    found, _ = sums.reduced(grads, MESH(), "d", method=TwoPhaseFP8())
    assert jax.tree.structure(found) == jax.tree.structure(grads)


def test_gradients_of_integers_pass():
    """jax.grad(allow_int=True) gives float0 for them, which has no values."""
    integers = np.zeros(3, jax.dtypes.float0)

    def local(g):
        found, _ = fp8.comms.all_reduce_gradients({"g": g, "i": integers}, "d")
        assert found["i"] is integers
        scattered = fp8.comms.reduce_scatter_gradients({"g": g, "i": integers}, "d")
        assert scattered["i"] is integers
        return found["g"]

    sums.on_devices(local, MESH(), "d")(sums.heavy_tailed(D, 8))


@hypothesis.given(
    st.lists(st.integers(-40, 40), min_size=D, max_size=D),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.25, 1.0, 1.01, 64.0]),
)
def test_any_magnitudes(exponents, seed, mu):
    """Devices may differ by many powers of two. One device may have zeros only."""
    grads = sums.heavy_tailed(D, 640, seed=seed) * np.exp2(np.float32(exponents))[:, None]
    grads[seed % D] = 0
    two, auto, state = _both(grads, np.float32(mu))
    assert_same_bits(two, sums.two_phase(grads)[1])
    want, clipped, zeros = sums.auto_scaled(grads, mu)
    assert_same_bits(auto, want)
    np.testing.assert_allclose(state.saturated, min(1, clipped / 640), rtol=1e-6)
    np.testing.assert_allclose(state.underflowed, zeros / grads.size, rtol=1e-6)


def _local(g, mu):
    method = AutoScaledFP8(min_size=0)
    state = fp8.comms.init_gradient_sums(g, method)._replace(mu=mu)
    auto, state = fp8.comms.all_reduce_gradients(g, "d", method=method, state=state)
    return fp8.comms.all_reduce_gradients(g, "d", method=TwoPhaseFP8(min_size=0))[0], auto, state


_both = sums.on_devices(_local, MESH(), "d")


def test_more_devices_than_are_added_in_one_kernel(monkeypatch):
    monkeypatch.setattr("jaxfp8.comms._collectives._UNROLLED", 3)
    grads = sums.heavy_tailed(8, 4096)
    found, _ = sums.reduced(grads, sums.mesh_of(d=8), "d", method=TwoPhaseFP8())
    assert_same_bits(found, sums.two_phase(grads)[1])


def test_a_scale_of_a_bfloat16_gradient():
    grads = sums.heavy_tailed(D, 4096).astype(jnp.bfloat16)
    found, _ = sums.reduced(grads, MESH(), "d", method=TwoPhaseFP8())
    assert_same_bits(found, sums.two_phase(grads.astype(np.float32))[1])


def test_the_oracle_counts_what_it_should():
    """Of 4 devices with 448 each, every sum is clipped. Of one with 2^-11, a value becomes zero."""
    grads = np.full((4, 8), 448, np.float32)
    assert sums.auto_scaled(grads)[1:] == (8, 0)
    grads[:, 1:] = 0
    grads[0, 1] = 2.0**-11
    assert sums.auto_scaled(grads)[1:] == (1, 1)
