"""Moments without a gradient decay, and what is stored has the right mean, in every format."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8 as fp8
from jaxfp8.optim import (
    FP8,
    BFloat16,
    ExpandedFP8,
    Float16,
    Float32,
    Int8,
    adamw,
    scale_by_adam,
    scale_by_muon,
    with_moment_formats,
)
from jaxfp8.optim._moment_formats import thresholds

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/optimizers/_stopping.py"
SPEC = importlib.util.spec_from_file_location("stopping", SCRIPT)
stopping = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stopping)

pytestmark = pytest.mark.usefixtures("standard_promotion")
FIRST = {
    "fp8": FP8(min_size=0),
    "e5m2": FP8(fp8.E5M2, min_size=0),
    "int8": Int8(min_size=0),
    "linear": Int8(companding=False, min_size=0),
    "expanded": ExpandedFP8(min_size=0),
    "float16": Float16(),
    "bfloat16": BFloat16(),
    "stochastic": BFloat16("stochastic"),
}
SECOND = {name: FIRST[name] for name in ("int8", "expanded", "float16", "bfloat16")}


def quick(names, *kept):
    """All names. Those that are not kept are slow: the tests of `pack` have every format."""
    return [n if n in kept else pytest.param(n, marks=pytest.mark.slow) for n in names]


@functools.cache
def all_thresholds():
    steps = jnp.arange(2**18)
    return np.asarray(jax.vmap(lambda step: thresholds(step, (2, 40)))(steps))[:, 0].astype(float)


@pytest.mark.parametrize("width", [0.5, 0.1, 0.02])
def test_every_interval_has_a_threshold_soon(width):
    """Within 15 / width steps, and after 1 / width in the mean: so a moment leaves its code."""
    u = all_thresholds()[:, 5]
    assert 0 < u.min() < u.max() < 1
    for start in np.linspace(0, 1, 11):
        waits = np.diff(np.flatnonzero((u - start) % 1 < width))
        assert waits.max() <= 15 / width
        assert waits.mean() == pytest.approx(1 / width, rel=0.05)


def test_a_threshold_does_not_tell_later_ones():
    """As multiples of the golden ratio do. Pairs of bins are equally frequent at each distance."""
    u = all_thresholds()[:, 0]
    bins = (16 * u).astype(int)
    for later in (1, 2, 3, 5, 8, 13, 21, 55, 144, 1000):
        counts = np.bincount(16 * bins[:-later] + bins[later:], minlength=256)
        expected = counts.sum() / 256
        # Chi-squared of 255 degrees of freedom: the mean, and six deviations.
        assert np.sum((counts - expected) ** 2) / expected < 255 + 6 * np.sqrt(2 * 255)


def test_sixteen_neighbours_have_equally_spaced_thresholds():
    u = all_thresholds()[::9973]
    for first in (0, 5, 24):
        np.testing.assert_allclose(np.diff(np.sort(u[:, first : first + 16])), 1 / 16, atol=1e-6)


@pytest.mark.parametrize("decay", quick([0.5, 0.9, 0.98], 0.9))
def test_stored_moments_have_the_mean_of_moments_that_are_not(decay):
    """Far below one code, constant or in few steps: what is rounded was stored before."""
    steps, period = 20_000, jnp.asarray([1, 5, 7, 13, 21, 34, 89, 100])[:, None]
    tx = with_moment_formats(optax.trace(decay), {"trace": FIRST["int8"]})
    first = jnp.arange(128) == 0
    size = jnp.where(first, 1.0, 1e-5 * period)

    def one(carry, step):
        state, total = carry
        gradient = jnp.where(first | (step % period == 0), size, 0)
        update, state = tx.update(gradient, state)
        return (state, total + update), None

    start = (tx.init(size), jnp.zeros(size.shape))
    total = jax.jit(lambda: jax.lax.scan(one, start, jnp.arange(steps))[0][1])()
    ratio = np.asarray(total / (1e-5 * steps / (1 - decay)))[:, 1:]
    assert np.all(np.abs(ratio.mean(1) - 1) < 0.12)


@functools.partial(jax.jit, static_argnames=("format", "signed", "factor", "steps"))
def stored_again(format, x, *, signed, factor, steps):
    """What is left after some steps that multiply, and their mean. Each 128th value is not."""
    kept = jnp.arange(x.shape[-1]) % 128 == 0

    def one(carry, step):
        x, total = carry
        x = jnp.where(kept, x, factor * x)
        x = format.unpack(format.pack(x, None, signed=signed, key=None, step=step))
        return (x, total + x), None

    x, total = jax.lax.scan(one, (x, jnp.zeros_like(x)), jnp.arange(steps))[0]
    return x, total / steps


def values(decades):
    x = np.random.default_rng(0).normal(size=(16, 256)) * 10.0 ** np.linspace(-decades, 0, 256)
    x[:, ::128] = 4.0
    return x.astype(np.float32)


DITHERED = [name for name in FIRST if name != "stochastic"]


@pytest.mark.parametrize("name", DITHERED)
def test_a_first_moment_decays_to_nothing(name):
    """0.9^200 of a value is 7e-10 of it."""
    left, _ = stored_again(FIRST[name], values(6), signed=True, factor=0.9, steps=200)
    left = np.asarray(left)
    assert np.all(left[:, ::128] == 4)
    assert np.abs(np.delete(left, [0, 128], 1)).max() < 1e-8


@pytest.mark.parametrize("name", quick(SECOND, "int8", "bfloat16"))
def test_a_second_moment_decays_by_a_factor_next_to_1(name):
    """0.999^2000 of a value is 0.135 of it. Rounded to nearest, no format of 8 bits moves."""
    x = np.square(values(1)) + 0.01
    left, _ = stored_again(SECOND[name], x, signed=False, factor=0.999, steps=2000)
    left, x = (np.delete(each, [0, 128], 1).astype(np.float64) for each in (np.asarray(left), x))
    ratio = left / x
    assert 0.9 < ratio.mean() / 0.135 < 1.1
    assert 0.25 * 0.135 < ratio.min() < ratio.max() < 4 * 0.135


# The distance of neighbouring codes, relative to the value, and to the largest one of its group.
GAPS = {
    "fp8": (2**-3, 2**-17),
    "e5m2": (2**-2, 2**-31),
    "int8": (0, 2 / 127),
    "linear": (0, 1 / 127),
    "expanded": (1 / 3 / 0.7, 0),
    "float16": (2**-10, 2**-39),
    "bfloat16": (2**-7, 0),
}


@pytest.mark.parametrize("name", GAPS)
def test_what_is_stored_has_the_mean_of_the_value(name):
    """Also far below one code. Each of 610 steps stores the same value."""
    format, steps, x = FIRST[name], 610, values(4)
    of_value, of_group = GAPS[name]

    def one(total, step):
        stored = format.pack(jnp.asarray(x), None, signed=True, key=None, step=step)
        return total + format.unpack(stored), None

    total, _ = jax.jit(lambda: jax.lax.scan(one, jnp.zeros(x.shape), jnp.arange(steps)))()
    error = np.abs(np.asarray(total, np.float64) / steps - x)
    gap = of_value * np.abs(x) + of_group * 4
    assert np.all(error <= 2.5 / np.sqrt(steps) * gap + 2e-5 * np.abs(x))  # five deviations
    nearest = np.asarray(format.unpack(format.pack(jnp.asarray(x), None, signed=True, key=None)))
    assert error.mean() < 0.1 * np.abs(nearest - x).mean()


def moved(opt, *, steps=1200):
    """How far parameters move without a gradient, in learning rates, in the mean."""
    masks = stopping.stopped(8, 256)
    gradients = jax.random.normal(jax.random.key(0), (steps, 8, 256))
    moved = jax.jit(lambda left: stopping.movement(opt, masks, gradients, left))(0.0)
    return np.mean([np.asarray(moved[kind])[mask].mean() for kind, mask in masks.items()])


@pytest.mark.parametrize("name", quick(FIRST, "int8", "fp8"))
def test_a_parameter_without_a_gradient_comes_to_rest(name):
    """Beside a second moment that decays in float32: what divides by it shows any rest."""
    nu = Float32() if name != "int8" else Int8(min_size=0)
    tx = adamw(stopping.RATE, b2=0.95, weight_decay=0.0, mu=FIRST[name], nu=nu)
    assert moved(stopping.of_optax(tx)) < 0.01


def test_it_comes_to_rest_with_other_optimizers():
    muon, rate = scale_by_muon(mu=FIRST["linear"]), stopping.RATE
    momentum = with_moment_formats(optax.sgd(rate, momentum=0.9), {"trace": FIRST["fp8"]})
    amsgrad = with_moment_formats(optax.amsgrad(rate), {"mu": FIRST["int8"], "nu": Float16()})
    for tx, own, rest in ((muon, 1.0, 0.1), (momentum, rate, 1e-6), (amsgrad, rate, 0.01)):
        assert moved(stopping.of_optax(tx, own)) < rest


def test_it_comes_to_rest_in_released_layers():
    tx = adamw(stopping.RATE, b2=0.95, weight_decay=0.0, mu=FIRST["int8"], nu=Float32())
    assert moved(stopping.of_release(tx), steps=600) < 0.01


@pytest.mark.parametrize(("format", "smallest"), [("int8", 1e-4), ("expanded", 1e-6)])
def test_small_gradients_of_a_group_move_their_parameters(format, smallest):
    """As float32 does, from entries with the largest gradient of their group down to these."""
    size = np.geomspace(smallest, 1, 128, dtype=np.float32)

    def run(tx):
        def one(carry, step):
            w, state, most = carry
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (16, 128))
            update, state = tx.update(size * (1 + 0.5 * noise), state)
            return (w + update, state, jnp.maximum(most, jnp.abs(update))), None

        w = jnp.zeros((16, 128))
        steps = jnp.arange(500)
        w, _, most = jax.jit(lambda: jax.lax.scan(one, (w, tx.init(w), w), steps)[0])()
        return np.asarray(w), np.asarray(most)

    make = functools.partial(scale_by_adam, b2=0.95, eps=1e-12)
    mine, most = run(make(mu=FIRST[format], nu=FIRST[format]))
    theirs, _ = run(make(mu=Float32(), nu=Float32()))
    ratio = (mine / theirs).mean(0)
    assert 0.9 < ratio.min() < ratio.max() < 1.25
    assert most.max() < 6
