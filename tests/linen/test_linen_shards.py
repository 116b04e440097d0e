"""Layers whose kernel is fully sharded: the answer of one device in every kind of mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from linen_made import made

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DenseGeneral, FP8DotGeneral, FP8Einsum
from jaxfp8.sharding import Shard

P = jax.P
K, N = 64, 32
X = np.random.default_rng(0).normal(size=(256, K)).astype(np.float32)
LAYERS = {
    "dense": lambda **how: FP8Dense(N, **how),
    "dense_general": lambda **how: FP8DenseGeneral((2, N // 2), **how),
    "einsum": lambda **how: FP8Einsum((K, N), "bk,kn->bn", **how),
    "plug": lambda recipe, **how: nn.Dense(N, dot_general_cls=FP8DotGeneral.using(recipe, **how)),
}
RECIPES = {"delayed": fp8.recipes.delayed(), "mxfp8": fp8.recipes.mxfp8()}
SPECS = {"kernel": P("fsdp"), "bias": P()}
FSDP = Shard(0, "fsdp")


def mesh(kind):
    return jax.make_mesh((2,), ("fsdp",), axis_types=(kind,))


def step(model):
    def loss(params, state, x):
        return jnp.sum(jnp.square(model.apply({"params": params, COLLECTION: state}, x)))

    return fp8.value_and_grad(loss)


def close(got, want):
    got, want = jax.device_get((got, want))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * np.max(np.abs(theirs)))


def cases(layers, quick):
    """A stateful and a stateless recipe; the quick ones meet each kind of layer once."""
    return [
        pytest.param(layer, recipe, marks=() if (layer, recipe) in quick else (pytest.mark.slow,))
        for layer in layers
        for recipe in RECIPES
    ]


@pytest.mark.parametrize(
    ("layer", "recipe"), cases(LAYERS, [("einsum", "mxfp8"), ("plug", "mxfp8")])
)
def test_linen(layer, recipe):
    make, recipe = LAYERS[layer], RECIPES[recipe]
    variables = made(make(recipe=recipe), X, recipe=recipe)
    params, state = variables["params"], variables.get(COLLECTION, {})
    want = jax.jit(step(make(recipe=recipe)))(params, state, X)
    model = make(recipe=recipe, w_shard=FSDP)
    for kind in (AxisType.Auto, AxisType.Explicit):
        lie = jax.tree.map(
            lambda spec, kind=kind: NamedSharding(mesh(kind), spec), (SPECS, P(), P("fsdp"))
        )
        with jax.set_mesh(mesh(kind)):
            close(jax.jit(step(model))(*jax.device_put((params, state, X), lie)), want)
    if layer == "plug":
        return  # flax's own layer wants a whole kernel

    def local(params, state, x):
        loss, grads, new = step(model)(params, state, x)
        return jax.lax.psum(loss, "fsdp"), grads, new

    specs = SPECS, P(), P("fsdp")
    inside = jax.shard_map(
        local, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=(P(), SPECS, P())
    )
    close(jax.jit(inside)(params, state, X), want)


def test_initialized_inside_shard_map_each_device_has_its_part_of_one_kernel():
    model = FP8Dense(
        N,
        w_shard=FSDP,
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, None)),
    )
    init = lambda x: nn.meta.unbox(model.init(jax.random.key(1), x)["params"])["kernel"]
    parts = jax.jit(
        jax.shard_map(init, mesh=mesh(AxisType.Auto), in_specs=P("fsdp"), out_specs=P("fsdp"))
    )(X)
    whole = jax.jit(FP8Dense(N).init)(jax.random.key(1), X)["params"]["kernel"]
    # two programs, which may fuse another product and sum
    np.testing.assert_allclose(parts, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "recipe"),
    cases(["linear", "linear_general", "einsum"], [("einsum", "mxfp8")]),
)
def test_nnx(layer, recipe):
    def make(**how):
        how |= {"recipe": RECIPES[recipe], "rngs": nnx.Rngs(0)}
        if layer == "einsum":
            return fp8.nnx.FP8Einsum("bk,kn->bn", (K, N), (N,), **how)
        return (fp8.nnx.FP8Linear if layer == "linear" else fp8.nnx.FP8LinearGeneral)(K, N, **how)

    def run(model, x):
        return fp8.nnx.value_and_grad(lambda model, x: jnp.sum(jnp.square(model(x))))(model, x)

    want = nnx.jit(run)(make(), X)
    for kind in (AxisType.Auto, AxisType.Explicit):
        model = make(w_shard=FSDP)
        with jax.set_mesh(mesh(kind)):
            model.kernel.set_value(
                jax.device_put(model.kernel.get_value(), NamedSharding(mesh(kind), P("fsdp")))
            )
            close(
                nnx.jit(run)(model, jax.device_put(X, NamedSharding(mesh(kind), P("fsdp")))), want
            )


def test_a_layer_is_initialized_without_a_mesh_and_in_any():
    # Compiled: eagerly each operation is a program, and another one in each mesh.
    kernel = lambda model: jax.jit(model.init)(jax.random.key(1), X)["params"]["kernel"]
    want = kernel(FP8Dense(N))
    model = FP8Dense(N, w_shard=FSDP)
    np.testing.assert_array_equal(kernel(model), want)
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh(kind)):
            np.testing.assert_array_equal(kernel(model), want)


TRACED = {
    "linen": lambda **how: (
        lambda w, x: FP8Dense(N, use_bias=False, **how).apply({"params": {"kernel": w}}, x)
    ),
    "nnx": lambda **how: (
        lambda w, x: fp8.nnx.FP8Linear(K, N, use_bias=False, rngs=nnx.Rngs(0), **how)(x)
    ),
    "op": lambda **how: lambda w, x: fp8.dot(x, w, y_shard=how.get("w_shard"), **how),
}


@pytest.mark.parametrize("traced", TRACED)
def test_without_a_mesh_operands_are_whole(traced):
    """Frameworks make and trace their models before there is a mesh."""
    traces = [
        jax.make_jaxpr(TRACED[traced](recipe=RECIPES["mxfp8"], **how))(np.ones((K, N)), X)
        for how in ({}, {"w_shard": FSDP})
    ]
    assert str(traces[0]) == str(traces[1])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_is_that_of_the_arrays_if_none_is_set(kind):
    """Who forgets `jax.set_mesh` does not lose the gathers in FP8."""
    on = NamedSharding(mesh(kind), P("fsdp"))
    x, w, g = jax.device_put((X, np.ones((K, N), np.float32), np.ones((256, N), np.float32)), on)

    def gathers(**shards):
        dot = lambda x, w: fp8.dot(x, w, recipe=RECIPES["mxfp8"], **shards)
        program = str(jax.make_jaxpr(lambda x, w, g: jax.vjp(dot, x, w)[1](g))(x, w, g))
        return program.count("sharding_constraint[" if kind == AxisType.Auto else "reshard")

    found = gathers(w_shard=FSDP)
    assert found > gathers()
    with jax.set_mesh(mesh(kind)):
        assert gathers(w_shard=FSDP) == found
    with pytest.raises(ValueError, match=r"w_shard=.* names no axis of the mesh .*\['fsdp'\]"):
        gathers(w_shard=Shard(0, "fspd"))


def test_a_kernel_that_has_no_equal_parts():
    model = FP8Dense(7, recipe=RECIPES["mxfp8"], w_shard=Shard(1, "fsdp"))
    init = lambda x: model.init(jax.random.key(1), x)["params"]["kernel"]
    with pytest.raises(
        ValueError, match=r"w_shard=.*axis 1 of a kernel \[64, 7\] .* 2 equal shards"
    ):
        jax.eval_shape(
            jax.shard_map(
                init, mesh=mesh(AxisType.Auto), in_specs=P("fsdp"), out_specs=P(None, "fsdp")
            ),
            X,
        )
