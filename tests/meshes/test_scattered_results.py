"""`y_shard=`: the result of a matmul is scattered, and its gradient is gathered in FP8.

Results and gradients are those of one device, in every kind of mesh: of an einsum whose output has
another order of axes, with a bias, in tiles that merge axes, and under vmap. The numbers are
integers, so every sum is exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

RECIPES = {
    name: getattr(fp8.recipes, name)() for name in ("identity", "current", "rowwise", "mxfp8")
}
# x [T, heads, features], w [heads, features, D], y [T, D]. "tensor" splits what is contracted.
T, HEADS, D, FEATURES = 256, 4, 32, 32
HEADS_SPLIT, ROWS_SPLIT, TOKENS_SPLIT = P("data", "tensor"), P("tensor"), P(("data", "tensor"))


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-7, 8, shape).astype(np.float32)


X, W = integers(0, T, HEADS, FEATURES), integers(1, HEADS, FEATURES, D)
BIAS, C = integers(2, D), integers(3, T, D)


def with_bias(x, w, bias, c, *, recipe, **how):
    y = fp8.dot_general(x, w, (((1, 2), (0, 1)), ((), ())), recipe=recipe, bias=bias, **how)
    return jnp.sum(y * c)


def reordered(x, w, bias, c, *, recipe, y_shard=None, out_sharding=None):
    """An einsum whose output is [D, T]."""
    del bias
    if y_shard is not None:
        y_shard = Shard(1, y_shard.axis_name)
    if out_sharding is not None:
        out_sharding = P(None, *out_sharding)
    y = fp8.einsum(
        "thf,hfd->dt", x, w, recipe=recipe, y_shard=y_shard, out_sharding=out_sharding
    )  # fmt: skip
    return jnp.sum(y.T * c)


LOSSES = {"bias": with_bias, "reordered": reordered}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Auto}
SPECS = (HEADS_SPLIT, ROWS_SPLIT, P(), TOKENS_SPLIT)


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(KINDS[kind],) * 2)


def shardings(mesh, specs):
    return tuple(NamedSharding(mesh, spec) for spec in specs)


def with_whole_loss(step, *args):
    value, grads = step(*args)
    return jax.lax.psum(value, ("data", "tensor")), grads


def on_mesh(loss, kind):
    """The loss, and the gradients of x, w and the bias."""
    mesh = mesh_of(kind)
    # In an Auto mesh all mesh axes of the split are named.
    axes = ("data", "tensor") if kind == "auto" else "tensor"
    out = {"out_sharding": TOKENS_SPLIT} if kind == "explicit" else {}
    step = jax.value_and_grad(functools.partial(loss, y_shard=Shard(0, axes), **out), (0, 1, 2))
    if kind == "manual":
        step = jax.shard_map(
            functools.partial(with_whole_loss, step),
            mesh=mesh, in_specs=SPECS, out_specs=(P(), SPECS[:3]),
        )  # fmt: skip
    with jax.set_mesh(mesh):
        args = jax.device_put((X, W, BIAS, C), shardings(mesh, SPECS))
        return jax.device_get(jax.jit(step)(*args))


QUICK = {("bias", "manual", "current"), ("reordered", "explicit", "mxfp8")}
QUICK |= {("bias", "auto", "identity")}


@pytest.mark.parametrize(
    ("loss", "kind", "recipe"),
    [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
        for cell in ((loss, kind, name) for loss in LOSSES for kind in KINDS for name in RECIPES)
    ],
)
def test_is_the_answer_of_one_device(loss, kind, recipe):
    loss = functools.partial(LOSSES[loss], recipe=RECIPES[recipe])
    want = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(X, W, BIAS, C)
    got = on_mesh(loss, kind)
    # The loss adds large terms of both signs, in another order on a mesh.
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    for mine, theirs in zip(got[1], want[1], strict=True):
        size = np.max(np.abs(theirs))
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6 * size + 1e-30)


def tiles(x, w, c, **how):
    """Tiles of 32 tokens do not fit 16, so both axes of tokens become one."""
    y = fp8.dot(x, w, recipe=RECIPES["mxfp8"], **how)
    return jnp.sum(y * c)


def merged(kind, axis):
    x, w, c = integers(0, 8, 16, 128), integers(1, 128, 32), integers(2, 8, 16, 32)
    mesh, split = mesh_of(kind), P(*(None,) * axis, "tensor")
    specs = P(None, None, "tensor"), P("tensor"), split
    out = {"out_sharding": split} if kind == "explicit" else {}
    step = jax.grad(functools.partial(tiles, y_shard=Shard(axis, "tensor"), **out), (0, 1))
    if kind == "manual":
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    with jax.set_mesh(mesh):
        args = jax.device_put((x, w, c), shardings(mesh, specs))
        return jax.jit(step)(*args), jax.jit(jax.grad(tiles, (0, 1)))(x, w, c)


@pytest.mark.parametrize(
    "kind", [pytest.param("auto", marks=pytest.mark.slow), "explicit", "manual"]
)
def test_tiles_that_merge_tokens(kind):
    for got, want in zip(*map(jax.device_get, merged(kind, 0)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["auto", "manual"])
def test_an_axis_that_is_merged_into_another_is_refused(kind):
    with pytest.raises(ValueError, match=mentions("axis 1", "is merged into the one before it")):
        merged(kind, 1)


def test_experts_under_vmap():
    x, w, c = integers(0, 3, 128, 64), integers(1, 3, 64, 32), integers(2, 3, 128, 32)
    mesh = mesh_of("auto")

    def loss(x, w, c, **how):
        dot = functools.partial(fp8.dot, recipe=RECIPES["mxfp8"], **how)
        return jnp.sum(jax.vmap(dot)(x, w) * c)

    want = jax.jit(jax.grad(loss, (0, 1)))(x, w, c)
    specs = P(None, None, "tensor"), P(None, "tensor"), P(None, "tensor")
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(functools.partial(loss, y_shard=Shard(0, "tensor")), (0, 1)))
        got = jax.device_get(step(*jax.device_put((x, w, c), shardings(mesh, specs))))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)
