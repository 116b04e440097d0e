"""Routers and their losses, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8
from jaxfp8 import moe

T, E = 37, 8


# Eagerly each operation is a program.
top_k = jax.jit(moe.top_k, static_argnums=1, static_argnames=("scores", "normalized"))
load = jax.jit(moe.load, static_argnums=1)
load_balancing_loss = jax.jit(moe.load_balancing_loss)


def logits(seed=0, scale=2.0):
    return scale * np.random.default_rng(seed).standard_normal((T, E), np.float32)


def wide(x):
    return np.asarray(x).astype(np.float64)


def softmax(x):
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def scores_of(x, scores):
    return softmax(x) if scores == "softmax" else 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 3, E])
def test_top_k(k, scores, normalized):
    got = top_k(logits(), k, scores=scores, normalized=normalized)
    score = scores_of(wide(logits()), scores)
    chosen = np.argsort(-score, axis=1)[:, :k]
    gates = np.take_along_axis(score, chosen, axis=1)
    if normalized:
        gates /= gates.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(got.chosen), chosen)
    np.testing.assert_allclose(np.asarray(got.gates), gates, rtol=2e-6)
    assert got.gates.dtype == jnp.float32
    assert got.chosen.dtype == jnp.int32


def test_logits_in_bfloat16_are_computed_on_in_float32():
    short = logits().astype(jnp.bfloat16)
    got, want = top_k(short, 2), top_k(short.astype(np.float32), 2)
    np.testing.assert_array_equal(np.asarray(got.gates), np.asarray(want.gates))


def test_the_gradient_of_gates_is_that_of_differences():
    weight = np.random.default_rng(1).standard_normal((T, 2))

    def in_numpy(x):
        score = softmax(x)
        chosen = np.argsort(-wide(logits()), axis=1)[:, :2]
        gates = np.take_along_axis(score, chosen, axis=1)
        return np.sum(weight * gates / gates.sum(axis=1, keepdims=True))

    def in_jax(x):
        return jnp.sum(jnp.asarray(weight, jnp.float32) * moe.top_k(x, 2).gates)

    got, x, step = wide(jax.jit(jax.grad(in_jax))(logits())), wide(logits()), 1e-5
    for row, column in ((0, 0), (5, 3), (9, 7), (20, 1)):
        nudge = np.zeros_like(x)
        nudge[row, column] = step
        want = (in_numpy(x + nudge) - in_numpy(x - nudge)) / (2 * step)
        np.testing.assert_allclose(got[row, column], want, rtol=1e-4, atol=1e-6)


def test_scores_that_are_all_zero_give_gates_without_nan():
    gates = top_k(np.full((1, E), -200.0, np.float32), 2, scores="sigmoid").gates
    assert not np.asarray(gates).any()


def test_a_token_of_nan_gets_gates_of_nan_and_harms_no_other():
    bad = logits()
    bad[3, 2] = np.nan
    got, want = top_k(bad, 3), top_k(logits(), 3)
    assert np.isnan(np.asarray(got.gates)[3]).all()
    assert len(set(np.asarray(got.chosen)[3].tolist())) == 3
    rest = np.arange(T) != 3
    np.testing.assert_array_equal(np.asarray(got.gates)[rest], np.asarray(want.gates)[rest])
    np.testing.assert_array_equal(np.asarray(got.chosen)[rest], np.asarray(want.chosen)[rest])


def test_load_counts_choices_and_skips_what_is_no_expert():
    chosen = np.array(top_k(logits(), 3).chosen)
    chosen[:2, 0] = -1, E
    want = np.bincount(chosen[(chosen >= 0) & (chosen < E)], minlength=E)
    np.testing.assert_array_equal(np.asarray(load(chosen, E)), want)


@pytest.mark.parametrize("k", [1, 2])
def test_load_balancing_loss(k):
    chosen = top_k(logits(), k).chosen
    share = np.bincount(np.asarray(chosen).ravel(), minlength=E) / (T * k)
    mean = softmax(wide(logits())).mean(axis=0)
    got = load_balancing_loss(logits(), chosen)
    np.testing.assert_allclose(float(got), E * np.sum(share * mean), rtol=1e-6)


def test_a_collapsed_router_costs_most_and_its_gradient_lowers_the_winner():
    winner = (np.arange(E) == 5) * np.ones((T, 1), np.float32)
    chosen = top_k(30 * winner, 1).chosen
    assert (np.asarray(chosen) == 5).all()
    np.testing.assert_allclose(float(load_balancing_loss(30 * winner, chosen)), E, rtol=1e-5)
    grad = np.asarray(jax.jit(jax.grad(moe.load_balancing_loss))(winner, chosen))
    assert (grad[:, 5] > 0).all()  # a step against the gradient lowers it
    assert (np.delete(grad, 5, axis=1) < 0).all()


def test_z_loss_and_its_gradient():
    x = wide(logits())
    total = np.log(np.exp(x).sum(axis=1))
    loss, grad = jax.jit(jax.value_and_grad(moe.z_loss))(logits())
    np.testing.assert_allclose(float(loss), np.mean(total**2), rtol=1e-6)
    want = 2 * total[:, None] * softmax(x) / T
    np.testing.assert_allclose(np.asarray(grad), want, atol=1e-6)


def test_losses_over_mesh_axes_are_those_of_all_tokens():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.random.default_rng(2).standard_normal((32, E)) * np.arange(1.0, 33.0)[:, None]
    x = x.astype(np.float32)
    chosen = np.asarray(top_k(x, 2).chosen)

    def losses(x, chosen, axes=()):
        balancing = moe.load_balancing_loss(x, chosen, axes=axes)
        return balancing, moe.z_loss(x, axes=axes), moe.load(chosen, E, axes=axes)

    split = functools.partial(losses, axes=("data",))
    split = jax.shard_map(
        split, mesh=mesh, in_specs=(jax.P("data"), jax.P("data")), out_specs=jax.P()
    )
    got, want = jax.jit(lambda x, chosen: (split(x, chosen), losses(x, chosen)))(x, chosen)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(got[2]), np.asarray(want[2]))


def test_load_of_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    chosen = np.random.default_rng(2).integers(0, E, (32, 2), np.int32)
    want = np.bincount(chosen.ravel(), minlength=E)
    with jax.set_mesh(mesh):
        got = load(jax.device_put(chosen, jax.P("data")), E)
        np.testing.assert_array_equal(np.asarray(got), want)


def test_load_of_every_dtype_of_integers():
    """Numbers of more than 255 experts do not wrap around in uint8."""
    for dtype in ("int8", "uint8", "int16", "uint32", "int32"):
        got = np.asarray(load(np.array([[0, 1], [1, 44]], dtype), 301))
        assert got.sum() == 4
        assert got[:2].tolist() == [1, 2]
        assert got[44] == 1


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: moe.top_k(jnp.ones((2, 3, 4)), 1), ValueError, r"\[2, 3, 4\].*Pass \[T, E\]"),
        (lambda: moe.top_k(jnp.ones((0, 4)), 1), ValueError, r"\[0, 4\]"),
        (lambda: moe.top_k(jnp.ones((2, 4), int), 1), TypeError, "logits has dtype int32"),
        (lambda: moe.top_k(logits(), 0), ValueError, "k=0 must be .*an integer from 1 to 8"),
        (lambda: moe.top_k(logits(), E + 1), ValueError, "k=9 must be"),
        (lambda: moe.top_k(logits(), True), ValueError, "k=True must be"),
        (lambda: moe.top_k(logits(), 2, scores="relu"), ValueError, "scores='relu' is unknown"),
        (lambda: moe.z_loss(jnp.ones(4)), ValueError, r"\[4\]"),
        (lambda: moe.load(jnp.ones((2, 1)), E), TypeError, "chosen has dtype float32"),
        (lambda: moe.load(jnp.ones(2, int), E), ValueError, r"chosen has shape \[2\]"),
        (
            lambda: moe.load_balancing_loss(logits(), jnp.ones((T - 1, 1), int)),
            ValueError,
            r"logits have shape \[37, 8\], and chosen \[36, 1\]",
        ),
        (lambda: moe.ExpertParallel(axis=""), TypeError, "axis='' must be the name"),
        (lambda: moe.ExpertParallel(tokens=("d", "d")), ValueError, "has a mesh axis twice"),
        (lambda: moe.ExpertParallel(axis=0), TypeError, "axis=0 must be the name"),
        (lambda: moe.ExpertParallel(axis="e", tokens=("d",)), ValueError, "lacks axis='e'"),
        (lambda: moe.ExpertParallel(tokens="d"), TypeError, "tokens='d' must be a tuple"),
        (lambda: moe.ExpertParallel(capacity_factor=0.0), ValueError, "capacity_factor=0.0"),
        (lambda: moe.ExpertParallel(sent_in_fp8=1), TypeError, "sent_in_fp8=1"),
    ],
)
def test_bad_inputs_are_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_the_names_are_in_the_namespace():
    assert fp8.moe is moe
