"""One answer on every mesh.

A model of two layers, forward and backward, by every recipe in every mode.

With small integers every sum is exact in any order. So amaxes, scales, states, loss and gradients
must have the bits of one device. With real numbers they may differ by as much as bfloat16 itself
differs on that mesh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from meshes.layouts import LAYOUTS, MODES, N, on_mesh, on_one_device
from meshes.recipes import ALL, VARIANTS

import jaxfp8 as fp8

STATELESS = ("rowwise", "blockwise", "mxfp8")
# bfloat16 rounds at random, so the sums of two programs differ by a tenth or two of their rounding.
# If each device had a scale of its own, the difference would be twenty times the rounding.
SLACK = 1.5
# With "types" the amax of a recipe without state is reduced over all axes over which its tensor
# varies, pipeline stages too (docs/limits.md). Named axes change that.
ONE_SCALE_FOR_ALL_STAGES = {
    (layout, "types", "current") for layout in LAYOUTS if LAYOUTS[layout].stages
}
# Tiles with float32 scales are multiplied in turn, so an Explicit mesh must not split what is
# contracted (docs/limits.md).
REFUSED = {
    (layout, mode, "blockwise_f32")
    for layout in LAYOUTS
    if layout != "pipeline"
    for mode in ("explicit", "explicit, shards")
}


@functools.cache
def integers():
    """(x, w1, w2), c.

    The last device has the largest value of each. The largest values are 7 times a power of two, so
    that FP8 scales are powers of two and no scale rounds a sum. With this seed that also holds for
    relu(x @ w1) and its gradient.
    """
    random = np.random.default_rng(5261)

    def draw(largest, corner):
        values = random.integers(-largest, largest + 1, (N, N)).astype(np.float32)
        values[-1, -1] = corner
        return values

    return (draw(5, 7), draw(3, 7), draw(5, 14)), draw(5, 7)


@functools.cache
def reals(dtype):
    random = np.random.default_rng(0)
    x, w1, w2, c = (random.standard_normal((N, N)).astype(jnp.dtype(dtype)) for _ in range(4))
    return (x, w1, w2), c


@functools.cache
def expected(recipe):
    """Of one device, after a step from an unset state and after one more.

    The second casts with the scales of the first.
    """
    params, c = integers()
    step, states = on_one_device(ALL[recipe]), unset(recipe)
    first = step(params, states, c)
    return first, step(params, first[2], c)


def unset(recipe):
    return tuple(fp8.init_state(ALL[recipe]) for _ in range(2))


def assert_equal(actual, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(actual), jax.tree.leaves(wanted))


@functools.partial(jax.jit, static_argnums=1)
def cast_and_back(t, form):
    return fp8.quantize(t, form).dequantize()


@pytest.mark.parametrize(
    "recipe",
    [
        *("delayed", "current", "rowwise", "blockwise", "mxfp8"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("rowwise_hp_wgrad", "mxfp8_2d")),
    ],
)
def test_one_device_adds_without_rounding(recipe):
    """The model in float64, with casts whose scale is the power of two that 7 times a power of two
    has.
    """
    (x, w1, w2), c = integers()
    gradient = fp8.E5M2 if ALL[recipe].wgrad.rhs.value_format == fp8.E5M2 else fp8.E4M3
    cast = lambda t, form=fp8.E4M3: np.float64(cast_and_back(np.float32(t), form))
    keep = (lambda t, form=None: np.float64(t)) if recipe == "rowwise_hp_wgrad" else cast
    h = np.maximum(cast(x) @ cast(w1), 0)
    dh = cast(c, gradient) @ cast(w2).T * (h > 0)
    want = [
        np.sum(cast(h) @ cast(w2) * c),
        cast(dh, gradient) @ cast(w1).T,
        keep(x).T @ keep(dh, gradient),
        keep(h).T @ keep(c, gradient),
    ]
    # A bound of every partial sum: all are integers that float32 holds.
    assert np.sum(np.abs(h) @ np.abs(w2) * np.abs(c)) < 2**24
    for loss, grads, _ in expected(recipe):
        assert_equal((loss, grads), tuple(want))
    if recipe == "delayed":
        for state, tensors in zip(expected(recipe)[1][2], ((x, w1, dh), (h, w2, c)), strict=True):
            np.testing.assert_array_equal(
                state.amax_history[:, -1], [np.max(np.abs(t)) for t in tensors]
            )
            np.testing.assert_array_equal(
                state.scale, state.amax_history[:, -1] / np.float32([448, 448, 57344])
            )


MIXED = "data, fsdp and tensor"
# Every mode and recipe, and the layouts that contain the others. The other cells are slow.
QUICK = {
    *((MIXED, mode, "current") for mode in ("auto", "explicit", "no types")),
    *((MIXED, "types", recipe) for recipe in ("delayed", "blockwise")),
    (MIXED, "auto, shards", "rowwise"),
    (MIXED, "explicit, shards", "mxfp8"),
    (MIXED, "types, result", "rowwise"),
    (MIXED, "no types, result", "mxfp8"),
    ("data and pipeline", "types", "current"),
    ("data and pipeline", "types, axes", "current"),
    ("data and pipeline", "no types", "delayed"),
}
MIXTURES = (MIXED, "data and pipeline")
CONTAINED = ("data", "pipeline")  # in the mixtures, where every recipe meets every mode


def cells(quick, layouts, variant_modes, state_modes=MODES):
    """Every recipe in every mode.

    Variants, which move what their recipe moves, where much is mixed.
    """
    for layout in layouts:
        for mode in MODES:
            if mode.endswith("shards") and LAYOUTS[layout].shards == ({}, {}):
                continue  # there is nothing to gather
            if mode.endswith("result") and not LAYOUTS[layout].partial:
                continue  # y is no sum
            for recipe in ALL:
                if recipe in VARIANTS and (layout not in MIXTURES or mode not in variant_modes):
                    continue
                if mode == "types, axes" and (ALL[recipe].rows or not LAYOUTS[layout].stages):
                    continue  # a state says it; without stages types do
                if ALL[recipe].rows and mode not in state_modes:
                    continue  # compiles twice
                if (
                    layout in CONTAINED
                    and recipe != "current"
                    and mode not in ("types", "explicit")
                ):
                    continue
                cell = layout, mode, recipe
                marks = () if cell in quick else (pytest.mark.slow,)
                yield pytest.param(*cell, id="-".join(cell), marks=marks)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layout", "mode", "recipe"),
    list(cells(QUICK, LAYOUTS, ("explicit, shards", "explicit", "types"))),
)
def test_integers(layout, mode, recipe):
    step, states = on_mesh(LAYOUTS[layout], mode, ALL[recipe]), unset(recipe)
    params, c = integers()
    if (layout, mode, recipe) in REFUSED:
        with pytest.raises(
            ValueError,
            match=mentions("an Explicit mesh splits over", "power_of_two=True", "shard_map"),
        ):
            step(params, states, c)
        return
    for want in expected(recipe):
        got = step(params, states, c)
        if recipe == "blockwise_f32":  # its scales are 7 / amax of two numbers: sums round
            assert distance(got, want) < 1e-6
            return
        assert_equal(got, want)
        if not ALL[recipe].rows:
            return
        states = got[2]


def distance(got, want):
    """Of the gradients, in relation to their size, by root mean squares; the worst."""
    norm = lambda t: np.linalg.norm(np.float32(t))
    return max(
        norm(np.float32(a) - np.float32(b)) / norm(b) for a, b in zip(got[1], want[1], strict=True)
    )


@functools.cache
def bfloat16_rounding(layout, mode):
    """What bfloat16 does on that mesh.

    The same program with plain matmuls, from float32 on one device.
    """
    identity = fp8.recipes.identity()
    got = on_mesh(LAYOUTS[layout], mode, identity)(
        reals("bfloat16")[0], ((), ()), reals("bfloat16")[1]
    )
    params, c = jax.tree.map(lambda t: t.astype(np.float32), reals("bfloat16"))
    return distance(got, on_one_device(identity)(params, ((), ()), c))


@functools.cache
def one_scale_for_both_weights(recipe):
    """On one device.

    Each layer multiplies by [its w | the other's], and the other half of y is left.
    """

    def loss(params, states, c):
        x, *ws = params
        both = [
            jnp.concatenate([mine, jax.lax.stop_gradient(other)], 1)
            for mine, other in (ws, ws[::-1])
        ]
        h = jax.nn.relu(fp8.dot(x, both[0], recipe=recipe)[:, :N])
        return jnp.sum(fp8.dot(h, both[1], recipe=recipe)[:, :N] * c)

    return jax.jit(fp8.value_and_grad(loss))


QUICK_REAL = {(MIXED, "types", "blockwise"), ("data and pipeline", "types", "current")}


@pytest.mark.parametrize(
    ("layout", "mode", "recipe"),
    list(cells(QUICK_REAL, MIXTURES, ("types",), ("types",))),
)
def test_real_numbers(layout, mode, recipe):
    step, states = on_mesh(LAYOUTS[layout], mode, ALL[recipe]), unset(recipe)
    params, c = reals("bfloat16")
    got, want = step(params, states, c), on_one_device(ALL[recipe])(params, states, c)
    rounding = bfloat16_rounding(layout, mode)
    assert 1e-3 < rounding < 1e-2
    if (layout, mode, recipe) in ONE_SCALE_FOR_ALL_STAGES:
        assert distance(got, want) > 5 * rounding
        want = one_scale_for_both_weights(ALL[recipe])(params, states, c)
    assert distance(got, want) < SLACK * rounding
