"""Specs of scales and of state, from those of their tensors.

They place real arrays, each device its own scales.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AxisType, NamedSharding

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DotGeneral, FP8Einsum, state_specs
from jaxfp8.sharding import quantized_specs
from jaxfp8.sharding._specs import mesh_axes, whole_mesh_axes

P = jax.P
GRANULARITIES = {
    "tensor": (fp8.PerTensor(), P()),
    "rows": (fp8.PerAxis(0), P("a", None)),
    "columns": (fp8.PerAxis(1), P(None, "b")),
    "1x128": (fp8.PerBlock((1, 128)), P("a", "b")),
    "32x32": (fp8.PerBlock((32, 32)), P("a", "b")),
}


def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    "spec",
    [
        P(),
        P("a"),
        P(None, "b"),
        P("b", "a"),
        P(("a", "b")),
        P(("b", "a")),
        P(None, ("b", "a")),
        P(None, None, "a"),
    ],
    ids=str,
)
def test_mesh_axes_are_found_again(spec):
    """The same axes from both descriptions: JAX's spec, and XLA's tiles of devices."""
    x = jax.ShapeDtypeStruct((16, 8, 8), jnp.float32, sharding=NamedSharding(mesh(), spec))
    wanted = tuple(mesh_axes(entry) for entry in (*spec, None, None, None)[:3])
    assert whole_mesh_axes(x, mesh()) == wanted
    tiles = GSPMDSharding(x.sharding._device_assignment, x.sharding._to_xla_hlo_sharding(3))
    assert whole_mesh_axes(x.update(sharding=tiles), mesh()) == wanted


def test_a_part_of_a_mesh_axis_is_none():
    """A mesh of 2 x 2 x 2 divides axis "a" of the mesh 4 x 2 in two.

    No spec on the mesh of 4 x 2 can name them.
    """
    finer = jax.sharding.Mesh(mesh().devices.reshape(2, 2, 2), ("a0", "a1", "b"))
    for spec, wanted in (
        (P("a0", "b"), ((), ("b",))), (P("a1"), ((), ())), (P(("a0", "a1"), "b"), (("a",), ("b",))),
        (P("b", "a1"), (("b",), ())),
    ):  # fmt: skip
        x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(finer, spec))
        assert whole_mesh_axes(x, mesh()) == wanted, spec


@pytest.mark.parametrize("name", GRANULARITIES)
def test_of_scales(name):
    granularity, want = GRANULARITIES[name]
    x = np.random.default_rng(0).standard_normal((128, 256), np.float32)
    q = jax.device_get(jax.jit(fp8.quantize, static_argnums=(1, 2))(x, fp8.E4M3, granularity))
    dequantize = jax.jit(fp8.QuantizedTensor.dequantize)
    want_wide = dequantize(q)
    specs = quantized_specs(q, P("a", "b"), mesh=mesh())
    assert (specs.values, specs.scale) == (P("a", "b"), want)
    # Each device has the scales of its own values, and no others.
    own = jax.shard_map(
        lambda q: q.dequantize(), mesh=mesh(), in_specs=(specs,), out_specs=P("a", "b")
    )
    np.testing.assert_array_equal(jax.jit(own)(q), want_wide)
    placed = jax.device_put(q, jax.tree.map(lambda spec: NamedSharding(mesh(), spec), specs))
    np.testing.assert_array_equal(dequantize(placed), want_wide)


@pytest.mark.parametrize(
    ("shape", "spec", "mentions"),
    [
        ((128, 192), P("a", "b"), ["shards of 96", "axis 1", "cut the tiles", "128"]),
        ((128, 256), P("a", "c"), ["'c'", "'a', 'b'"]),
        ((130, 256), P("a"), ["axis 0", "[130, 256]", "4 equal parts"]),
        ((128, 256), P("a", "b", None), ["3 entries", "[128, 256]"]),
        ((128, 512), P(None, ("a", "b")), ["shards of 64"]),
    ],
)
def test_wrong_specs(shape, spec, mentions):
    q = jax.eval_shape(
        lambda x: fp8.quantize(x, fp8.E4M3, fp8.PerBlock((1, 128))),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    with pytest.raises(ValueError, match=".*".join(map(re.escape, mentions))):
        quantized_specs(q, spec, mesh=mesh())
    if spec == P("a", "b"):
        assert quantized_specs(q, spec).scale == spec  # no mesh is set: nothing to check against


def test_an_axis_of_one_device_cuts_nothing():
    q = jax.eval_shape(
        lambda x: fp8.quantize(x, fp8.E4M3, fp8.PerBlock((1, 128))),
        jax.ShapeDtypeStruct((128, 200), jnp.float32),
    )
    one = jax.make_mesh((4, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    assert quantized_specs(q, P("a", "b"), mesh=one).scale == P("a", "b")


def test_of_stacked_states():
    one = fp8.init_state(fp8.recipes.delayed())
    stages = jax.tree.map(lambda leaf: np.stack([np.stack([leaf] * 3)] * 4), one)
    specs = fp8.state_specs(
        {"one": one, "stages": stages}, {"one": P("b"), "stages": P("a", None, "b")}
    )
    assert set(jax.tree.leaves(specs["one"])) == {P()}
    assert set(jax.tree.leaves(specs["stages"])) == {P("a", None)}
    placed = jax.device_put(
        stages, jax.tree.map(lambda spec: NamedSharding(mesh(), spec), specs["stages"])
    )
    assert placed.amax_history.addressable_shards[0].data.shape == (1, 3, 3, 16)
    with pytest.raises(ValueError, match="weight_specs has None"):
        fp8.state_specs(one, None)


class Model(nn.Module):
    """Layers of three kinds, two of them stacked."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            lambda layer, x, _: (layer(x), None), variable_axes={"params": 0, COLLECTION: 0},
            split_rngs={"params": True}, length=2,
        )  # fmt: skip
        x, _ = stack(FP8Dense(8, name="stack"), x, None)
        x = nn.Dense(8, dot_general_cls=FP8DotGeneral.using(fp8.recipes.delayed()), name="plug")(x)
        return FP8Einsum((8, 8), "bd,dk->bk", name="einsum")(x)


def test_of_a_linen_model():
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    variables = jax.eval_shape(Model().init, jax.random.key(0), x)
    assert (
        len(
            jax.tree.leaves(
                variables[COLLECTION], is_leaf=lambda n: isinstance(n, fp8.state.MatmulState)
            )
        )
        == 3
    )
    kernels = {"stack": P("a", "b"), "plug": P("a", "b"), "einsum": P("b")}
    specs = state_specs(
        variables[COLLECTION], {layer: {"kernel": spec} for layer, spec in kernels.items()}
    )
    assert set(jax.tree.leaves(specs["stack"])) == {P("a")}
    assert set(jax.tree.leaves((specs["plug"], specs["einsum"]))) == {P()}
    with pytest.raises(ValueError, match=r"no kernel for the state at .*einsum"):
        state_specs(
            variables[COLLECTION],
            {layer: {"kernel": kernels[layer]} for layer in ("stack", "plug")},
        )
