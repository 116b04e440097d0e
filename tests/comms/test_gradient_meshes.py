"""Sums of gradients over several mesh axes, and of gradients that other axes split."""

import functools

import gradient_sums as sums
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.comms import AutoScaledFP8, BFloat16Sum, TwoPhaseFP8


@pytest.mark.parametrize(
    ("order", "vma"),
    [
        (("a", "b"), True),
        (("b", "a"), False),
        pytest.param(("a", "b"), False, marks=pytest.mark.slow),
        pytest.param(("b", "a"), True, marks=pytest.mark.slow),
    ],
)
def test_two_mesh_axes_at_once(order, vma):
    mesh = sums.mesh_of(a=4, b=2)
    grads = sums.heavy_tailed(8, 2048)
    for method, want in (
        (TwoPhaseFP8(min_size=0), sums.two_phase(grads)[1]),
        (AutoScaledFP8(min_size=0), sums.auto_scaled(grads)[0]),
        (BFloat16Sum(min_size=0), None),
    ):
        state = fp8.comms.init_gradient_sums(grads[0], method)
        found, _ = sums.reduced(grads, mesh, order, vma=vma, method=method, state=state)
        if want is None:
            bfloat16 = grads.astype(jnp.bfloat16).astype(np.float64)
            want = bfloat16.mean(0)
            bound = 2**-8 * np.abs(bfloat16).mean(0)
            assert np.all(np.abs(np.asarray(found, np.float64) - want) <= bound)
        else:
            assert_same_bits(found, want if vma else np.stack([want] * 8))


def test_shards_of_two_mesh_axes():
    grads = sums.heavy_tailed(8, 2048, 16)
    scatter = functools.partial(
        fp8.comms.reduce_scatter_gradients, axis_name=("a", "b"), method=TwoPhaseFP8(min_size=0)
    )
    found = sums.on_devices(scatter, sums.mesh_of(a=4, b=2), ("a", "b"), out=P(("a", "b")))(grads)
    assert_same_bits(found, sums.two_phase(grads)[0].reshape(2048, 16))


def test_fp8_between_hosts_only():
    """Shards are summed in bfloat16 over "chip", and in FP8 over "host", as the page says."""
    grads = sums.heavy_tailed(8, 2048, 16)

    def local(g):
        shard = fp8.comms.reduce_scatter_gradients(g, "chip", method=BFloat16Sum())
        shard, _ = fp8.comms.all_reduce_gradients(shard, "host", method=TwoPhaseFP8())
        return lax.all_gather(shard, "chip", tiled=True, to="invarying")

    mesh = sums.mesh_of(host=4, chip=2)
    found = np.asarray(sums.on_devices(local, mesh, ("host", "chip"))(grads), np.float64)
    assert found.shape == (2048, 16)
    error = np.linalg.norm(found - grads.mean(0)) / np.linalg.norm(grads.mean(0))
    assert 0.01 < error < 0.05


def test_a_gradient_that_is_split_has_one_scale():
    """Over "a" it is summed, over "b" it is split. Its one mu does not vary over "b"."""
    grads = sums.heavy_tailed(4, 2048, 2)
    grads[1, 3, 1] = 50  # in the shard of one of the two
    method = AutoScaledFP8(min_size=0)
    state = fp8.comms.init_gradient_sums(grads[0], method)
    want, clipped, zeros = sums.auto_scaled(grads)
    assert zeros > 0

    def local(g, state, **how):
        return fp8.comms.all_reduce_gradients(g[0], "a", method=method, state=state, **how)

    for vma, how in (
        (True, {}),
        (True, {"also_split_over": "b"}),
        (False, {"also_split_over": "b"}),
    ):
        found, after = jax.jit(
            jax.shard_map(
                functools.partial(local, **how),
                mesh=sums.mesh_of(a=4, b=2),
                in_specs=(P("a", None, "b"), P()),
                out_specs=(P(None, "b"), P()),
                check_vma=vma,
            )
        )(grads, state)
        assert_same_bits(found, want)
        np.testing.assert_allclose(after.underflowed, zeros / grads.size, rtol=1e-6)
        np.testing.assert_allclose(after.saturated, clipped / grads[0].size, rtol=1e-6)
