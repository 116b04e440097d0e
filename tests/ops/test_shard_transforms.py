"""Marked weights under JAX's transformations.

The answer of one device, in Auto and Explicit meshes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

L, B, K = 3, 128, 64
rng = np.random.default_rng(0)
W = (rng.normal(size=(L, K, K)) / 8).astype(np.float32)
X = rng.normal(size=(B, K)).astype(np.float32)
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "rowwise": fp8.recipes.rowwise(),
    "mxfp8": fp8.recipes.mxfp8(),
}


def scan(layer):
    def loss(w, state, x):
        y, _ = jax.lax.scan(lambda x, own: (jnp.tanh(layer(*own, x)), None), x, (w, state))
        return jnp.sum(y**2)

    return loss


def remat(layer):
    return scan(jax.checkpoint(layer, policy=fp8.save_fp8_residuals()))


def experts(layer):
    return lambda w, state, x: jnp.sum(jax.vmap(layer, in_axes=(0, 0, None))(w, state, x) ** 2)


def unrolled(layer):
    def loss(w, state, x):
        for index in range(L):
            x = jnp.tanh(layer(w[index], jax.tree.map(lambda leaf, i=index: leaf[i], state), x))
        return jnp.sum(x**2)

    return loss


TRANSFORMS = {"scan": scan, "remat": remat, "vmap": experts, "unrolled": unrolled}
QUICK = [("scan", "mxfp8", AxisType.Explicit), ("vmap", "rowwise", AxisType.Explicit)]
SLOW = [
    ("remat", "delayed", AxisType.Auto),
    ("scan", "delayed", AxisType.Auto),
    ("scan", "rowwise", AxisType.Explicit),
    ("remat", "mxfp8", AxisType.Explicit),
    ("vmap", "delayed", AxisType.Auto),
    ("vmap", "mxfp8", AxisType.Auto),
    ("unrolled", "delayed", AxisType.Explicit),
    ("unrolled", "mxfp8", AxisType.Auto),
]
CASES = [*QUICK, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]]


@pytest.mark.parametrize(("transform", "recipe", "kind"), CASES)
def test_is_the_answer_of_one_device(transform, recipe, kind):
    recipe = RECIPES[recipe]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * L), fp8.init_state(recipe))

    def step(shard):
        def layer(w, state, x):
            return fp8.dot(x, w, recipe=recipe, state=state, w_shard=shard)

        return jax.jit(fp8.value_and_grad(TRANSFORMS[transform](layer)))

    want = step(None)(W, stacked, X)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(kind,))
    lie = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (P(None, "fsdp"), P(), P("fsdp")))
    with jax.set_mesh(mesh):
        got = step(Shard(0, "fsdp"))(*jax.device_put((W, stacked, X), lie))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            mine, theirs, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(theirs)))
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_jit(kind):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(kind,))
    x, w = (jax.device_put(t, NamedSharding(mesh, P("fsdp"))) for t in (X, W[0]))
    with jax.set_mesh(mesh):
        y = fp8.dot(x, w, recipe=RECIPES["mxfp8"], w_shard=Shard(0, "fsdp"))
    np.testing.assert_array_equal(y, fp8.dot(X, W[0], recipe=RECIPES["mxfp8"]))


def test_a_mesh_axis_of_one_device_cuts_no_tile():
    x, w = X[:, :50], W[0][:50]
    with jax.set_mesh(jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))):
        y = jax.jit(lambda x, w: fp8.dot(x, w, recipe=RECIPES["mxfp8"], w_shard=Shard(0, "fsdp")))(
            x, w
        )
    np.testing.assert_array_equal(
        y, jax.jit(lambda x, w: fp8.dot(x, w, recipe=RECIPES["mxfp8"]))(x, w)
    )


def test_what_stays_in_high_precision_is_gathered_too():
    """The identity recipe: gradients, also of a batch of layers."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))

    def gradient(shard):
        loss = lambda w: jnp.sum(fp8.dot(X, w, recipe=fp8.recipes.identity(), w_shard=shard) ** 2)
        return jax.jit(jax.vmap(jax.grad(loss)))

    with jax.set_mesh(mesh):
        got = gradient(Shard(0, "fsdp"))(jax.device_put(W, NamedSharding(mesh, P(None, "fsdp"))))
    np.testing.assert_allclose(got, gradient(None)(W), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, AxisType.Manual])
def test_over_two_mesh_axes(kind):
    recipe, axes = fp8.recipes.current(), ("data", "fsdp")

    def run(shard):
        return lambda w, x: fp8.value_and_grad(
            lambda w, _: jnp.sum(fp8.dot(x, w, recipe=recipe, w_shard=shard, reduce_axes=axes) ** 2)
        )(w, ())[:2]

    want = jax.jit(run(None))(W[0], X)
    mesh = jax.make_mesh(
        (2, 2),
        axes,
        axis_types=(AxisType.Explicit if kind == AxisType.Explicit else AxisType.Auto,) * 2,
    )
    step, lie = run(Shard(0, axes)), NamedSharding(mesh, P(axes))
    if kind == AxisType.Manual:
        local = lambda w, x: jax.tree.map(
            lambda leaf: leaf if leaf.ndim else jax.lax.psum(leaf, axes), step(w, x)
        )
        inside = jax.shard_map(local, mesh=mesh, in_specs=lie.spec, out_specs=(P(), lie.spec))
        got = jax.jit(inside)(W[0], X)
    else:
        with jax.set_mesh(mesh):
            got = jax.jit(step)(*jax.device_put((W[0], X), lie))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(
            mine, theirs, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(theirs)))
        )
