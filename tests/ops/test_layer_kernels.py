"""Layers hand `kernels=` on to their casts and matmuls."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.kernels._dispatch import Backend
from jaxfp8.kernels.cast import _api
from jaxfp8.plan._autotune import _Recorder

X = jnp.ones((2, 8))
LINEN = {
    "FP8Dense": lambda **fields: fp8.linen.FP8Dense(4, **fields),
    "FP8DenseGeneral": lambda **fields: fp8.linen.FP8DenseGeneral((2, 2), **fields),
    "FP8Einsum": lambda **fields: fp8.linen.FP8Einsum((8, 4), "bd,dk->bk", **fields),
    "plug": lambda recipe, **fields: linen.Dense(
        4, dot_general_cls=fp8.linen.FP8DotGeneral.using(recipe, **fields)
    ),
}
NNX = {
    "FP8Linear": lambda **fields: fp8.nnx.FP8Linear(8, 4, rngs=nnx.Rngs(0), **fields),
    "FP8LinearGeneral": lambda **fields: fp8.nnx.FP8LinearGeneral(
        8, (2, 2), rngs=nnx.Rngs(0), **fields
    ),
    "FP8Einsum": lambda **fields: fp8.nnx.FP8Einsum(
        "bd,dk->bk", (8, 4), rngs=nnx.Rngs(0), **fields
    ),
    "plug": lambda recipe, **fields: nnx.Linear(
        8, 4, dot_general=fp8.nnx.FP8DotGeneral(recipe, **fields), rngs=nnx.Rngs(0)
    ),
}


def types_in_linen(make, **fields):
    layer = make(**fields)
    return jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), X)[0])


def types_in_nnx(make, **fields):
    return jax.eval_shape(lambda: make(**fields)(X))


CASES = [
    pytest.param(run, make, id=f"{run.__name__}-{name}")
    for run, table in ((types_in_linen, LINEN), (types_in_nnx, NNX))
    for name, make in table.items()
]


@pytest.mark.parametrize(("run", "make"), CASES)
def test_kernels_of_a_layer(run, make, monkeypatch):
    asked, cast = _Recorder(), []

    def spied(x, *args, **kwargs):
        cast.append(x.shape)
        return reference(x, *args, **kwargs)

    reference = _api.BACKENDS["reference"]
    monkeypatch.setitem(_api.BACKENDS, "reference", Backend(function=spied))
    kernels = fp8.Kernels(casts="reference", timings=asked)
    run(make, recipe=fp8.recipes.current(), kernels=kernels)
    assert len(asked.matmuls) == 1
    assert len(cast) == 2  # x and w
    with pytest.raises(TypeError, match=mentions("kernels='h200' is of type str")):
        run(make, recipe=fp8.recipes.current(), kernels="h200")
    run(make, recipe=fp8.recipes.identity(), kernels=kernels)  # as rules leave some layers
    assert (len(asked.matmuls), len(cast)) == (1, 2)
