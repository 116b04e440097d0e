"""`fp8.convert(w_shard=)` before there is a mesh, and inside of one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxfp8 as fp8

X = jnp.ones((8, 64))
LINEN = nn.Sequential([nn.Dense(128), nn.Dense(32)])
NNX = nnx.Sequential(*(nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in ((64, 128), (128, 32))))


def mesh(kind):
    return jax.make_mesh((2,), ("fsdp",), axis_types=(kind,))


def converted(model):
    shard = fp8.Shard(0, "fsdp")
    return fp8.convert(model, fp8.recipes.current(), inputs=(X,), w_shard=shard)[0]


def gathers(model):
    """How many constraints on a sharding the traced model has."""
    call, variables = model, ()
    if isinstance(model, nn.Module):
        call, variables = model.apply, (jax.eval_shape(model.init, jax.random.key(0), X),)
    return str(jax.make_jaxpr(call)(*variables, X)).count("sharding_constraint[")


@pytest.mark.parametrize("model", [LINEN, NNX], ids=["linen", "nnx"])
def test_a_model_is_converted_before_the_mesh_or_inside(model):
    before = converted(model)
    assert gathers(before) == 0
    with jax.set_mesh(mesh(AxisType.Auto)):
        assert gathers(before) == gathers(converted(model)) > 0


def test_arrays_of_the_trace_are_not_split_in_an_explicit_mesh():
    with (
        jax.set_mesh(mesh(AxisType.Explicit)),
        pytest.raises(ValueError, match=r"axis 0 is not split over \['fsdp'\]") as raised,
    ):
        converted(LINEN)
    assert "before jax.set_mesh" in " ".join(raised.value.__notes__)
