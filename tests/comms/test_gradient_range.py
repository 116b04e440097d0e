"""Finite gradients have finite sums, from 2^-149 to the largest float32. What is lost is counted.

The oracle of all methods is a sum in float64.
"""

import functools
import itertools

import gradient_sums as sums
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.comms import AutoScaledFP8, BFloat16Sum, TwoPhaseFP8
from jaxfp8.comms._auto_scaled import _next_row, _Sums

D, GROUP = 4, 128
MESH = functools.partial(sums.mesh_of, d=D)
AMPLITUDES = (1e-40, oracle.TINY, 1e-37, 1e-30, 1.0, 1e30, 1e37, sums.MAX)
REDUCE, SCATTER = fp8.comms.all_reduce_gradients, fp8.comms.reduce_scatter_gradients


def gradients(amplitude):
    """[D, 4 groups]: equal values, values of one device, values that cancel, and small ones."""
    grads = np.full((D, 4, GROUP), amplitude, np.float32)
    grads[:, 0, ::2] *= -1
    grads[1:, 1] = 0
    grads[::2, 2] *= -1
    grads[:, 3, 1::2] *= np.float32(2.0**-12)
    grads[1, 3, 2::4] = 0
    grads[2, 3, 3::4] = min(1e-37, amplitude)
    return grads.reshape(D, -1)


def assert_close(found, grads, *, mean, relative, absolute=1):
    """Close to the sum in float64, clipped to float32; `absolute` is a multiple of 2^-126."""
    found, exact = np.asarray(found, np.float64), np.asarray(grads, np.float64)
    factor = 1 / D if mean else 1
    assert np.all(np.isfinite(found))
    terms = np.abs(exact).sum(0) * factor
    # The small values of a group or a tensor may be zero in FP8.
    bound = relative * (terms + np.max(terms) * 2.0**-6) + absolute * oracle.TINY
    error = np.abs(found - np.clip(exact.sum(0) * factor, -sums.MAX, sums.MAX))
    assert np.all(error <= bound), (found[error > bound], grads[:, error > bound])


def rows():
    """By default the rule of the paper, and another value of each option."""
    chosen = {("E4M3", True, "exchange", "auto"), ("E5M2", False, "all_reduce", "pre")}
    for row in itertools.product(
        ("E4M3", "E5M2"), (True, False), ("exchange", "all_reduce"), ("auto", "pre", "post")
    ):
        yield pytest.param(*row, marks=() if row in chosen else pytest.mark.slow)


@pytest.mark.parametrize(("fmt", "power_of_two", "reduction", "scaling"), list(rows()))
def test_auto_scaling_counts_what_it_loses(fmt, power_of_two, reduction, scaling):
    how = {"power_of_two": power_of_two, "scaling": scaling}
    method = AutoScaledFP8(format=getattr(fp8, fmt), reduction=reduction, min_size=0, **how)
    first = fp8.comms.init_gradient_sums(0.0, method)

    def local(both, state):
        return [
            REDUCE(g, "d", method=method, state=state, mean=mean)
            for g, mean in zip(both, (True, False), strict=True)
        ]

    # Two arguments with the same values: XLA must not compute a part of both sums once.
    reduce = sums.on_devices(local, MESH(), "d")
    for amplitude in AMPLITUDES:
        grads = gradients(amplitude)
        # No sum of payloads reaches the largest value. The multiplier of the smallest is 2^126.
        mu = 1.0 if amplitude <= 1e-37 else 1 / (2 * D)
        state = first._replace(mu=np.float32(mu))
        for mean, (found, after) in zip((True, False), reduce((grads, grads), state), strict=True):
            assert np.all(np.isfinite(found))
            want, clipped, zeros = sums.auto_scaled(grads, mu, mean=mean, fmt=fmt, **how)
            if reduction == "exchange":
                assert_same_bits(found, want)
                assert after.saturated == np.float32(min(1, clipped / grads[0].size))
                assert after.saturated == 0 or not mean or scaling == "post"
            np.testing.assert_allclose(after.underflowed, zeros / grads.size, rtol=1e-6)
            if scaling != "post":
                assert_close(found, grads, mean=mean, relative=0.25 if fmt == "E5M2" else 0.125)
                assert after.halved_steps == 0  # a sum above the largest float32 does not change mu
            if amplitude < oracle.TINY:
                assert zeros == np.sum(grads != 0)
                assert after.quiet_steps == 0  # such a step says nothing about mu
    assert np.all(np.isnan(reduce((with_inf(sums.MAX), grads), state)[0][0]))


OTHERS = {
    "two phases": (TwoPhaseFP8(min_size=0), 0.125),
    "two phases in E5M2": (TwoPhaseFP8(format=fp8.E5M2, scale=fp8.ScaleRule(), min_size=0), 0.25),
    "E8M0": (TwoPhaseFP8(scale=fp8.ScaleRule(scale_format=fp8.E8M0), min_size=0), 0.125),
    "bfloat16": (BFloat16Sum(min_size=0), 2.0**-7),
    "float32": (BFloat16Sum(), 1e-6),
}


@functools.cache
def all_others():
    """One program for all methods, because most of the time is that of the compiler."""

    def local(g):
        half = REDUCE(in_float16(g), "d", method=BFloat16Sum(min_size=0))[0]
        whole, shards = {}, {}
        for name, mean in itertools.product(OTHERS, (True, False)):
            how = {"method": OTHERS[name][0], "mean": mean}
            whole[name, mean] = REDUCE(g, "d", **how)[0]
            shards[name, mean] = SCATTER(g, "d", **how)
        return half, whole, shards

    return sums.on_devices(local, MESH(), "d", out=(P(), P(), P("d")))


def in_float16(grads):
    return jnp.clip(grads, -65504, 65504).astype(jnp.float16)


def with_inf(amplitude):
    grads = gradients(amplitude)
    grads[1, 5] = np.inf
    return grads


@pytest.mark.parametrize("amplitude", AMPLITUDES)
def test_finite_gradients_have_finite_sums(amplitude):
    grads = gradients(amplitude)
    half, *both = all_others()(grads)
    assert half.dtype == jnp.float16
    assert_close(half, in_float16(grads), mean=True, relative=2.0**-7)
    for (name, mean), each in itertools.chain(*(found.items() for found in both)):
        # bfloat16 is shrunk before the sum.
        absolute = D * (1 if mean else D) if name == "bfloat16" else 1
        assert_close(each, grads, mean=mean, relative=OTHERS[name][1], absolute=absolute)


def test_an_inf_stays_beside_the_largest_values():
    _, *both = all_others()(with_inf(sums.MAX))
    for (name, _), each in itertools.chain(*(found.items() for found in both)):
        lost = [5] if isinstance(OTHERS[name][0], BFloat16Sum) else list(range(GROUP))
        assert np.flatnonzero(~np.isfinite(each)).tolist() == lost


def test_mu_never_becomes_zero():
    """The multiplier of the largest gradients is 2^-126 at least, whatever mu is."""
    method = AutoScaledFP8()
    state = fp8.comms.init_gradient_sums(0.0, method)
    counts = _Sums(*map(jnp.float32, (sums.MAX, 512, 0, 0)), size=512, devices=D)
    for mu, after in ((2.0**-19, 2.0**-20), (2.0**-20, 2.0**-20)):
        assert _next_row(state._replace(mu=jnp.float32(mu)), counts, method).mu == after
