"""The layers of linen and nnx, compiled for an H200: three FP8 matmuls each, and no other."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from program import Program
from targets import array, compile_for

import jaxfp8 as fp8

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]

RECIPE = fp8.recipes.delayed()
OPTIONS = fp8.Kernels("h200").compiler_options(RECIPE)
X, C = array(4, 128, 256), array(4, 128, 512)


def check(compiled):
    fp8.programs.assert_fp8_gemms(compiled, 3)
    program = Program(compiled.as_text())
    assert not program.other_matmuls(program.entry)


@pytest.mark.parametrize(
    "layer",
    [
        fp8.linen.FP8Dense(512, recipe=RECIPE, dtype=jnp.bfloat16),
        nn.Dense(512, dtype=jnp.bfloat16, dot_general_cls=fp8.linen.FP8DotGeneral.using(RECIPE)),
    ],
    ids=["FP8Dense", "FP8DotGeneral"],
)
def test_linen(layer):
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    collection = "_overwrite_with_gradient"

    def step(params, state, x, c):
        def loss(params, state, x, c):
            return jnp.sum(
                (
                    layer.apply({"params": params["layer"], collection: state}, params["x"]) * c
                ).astype(jnp.float32)
            )

        return fp8.value_and_grad(loss)({"layer": params, "x": x}, state, x, c)

    check(
        compile_for("h200", step, variables["params"], variables[collection], X, C, options=OPTIONS)
    )


def test_nnx():
    def make():
        return fp8.nnx.FP8Linear(256, 512, recipe=RECIPE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    graphdef, variables = nnx.split(nnx.eval_shape(make))

    def loss(model, c):
        return jnp.sum((model.layer(model.x[...]) * c).astype(jnp.float32))

    class Model(nnx.Module):
        def __init__(self, layer, x):
            self.layer, self.x = layer, nnx.Param(x)

    def step(variables, x, c):
        model = Model(nnx.merge(graphdef, variables), x)
        value, grads = fp8.nnx.value_and_grad(loss)(model, c)
        return value, grads, nnx.state(model)

    check(compile_for("h200", step, variables, X, C, options=OPTIONS))
