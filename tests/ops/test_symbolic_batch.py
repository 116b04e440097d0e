"""A program that `jax.export` makes for any batch has the bits of one for each batch."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8

# Scales that are no powers of two, so that a value in another tile has other bits.
RECIPES = {
    "blockwise": fp8.recipes.blockwise(power_of_two=False),
    "square x": fp8.recipes.blockwise(x_tile_dim=2, w_tile_dim=1, power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "rowwise": fp8.recipes.rowwise(),
    "delayed": fp8.recipes.delayed(),
}
BATCHES = (7, 130)  # shorter than a tile, and with a shorter tile at the end


def arrays(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]


def step(recipe, x, w):
    """The loss, the gradients of x and w, and the next state."""
    state = fp8.init_state(recipe) if recipe.rows else {}

    def loss(operands, state):
        x, w = operands
        y = fp8.dot(x, w, recipe=recipe, **({"state": state} if recipe.rows else {}))
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    if recipe.rows:
        return fp8.value_and_grad(loss)((x, w), state)
    return jax.value_and_grad(loss)((x, w), state)


def read_back(program, *types):
    exported = jax.export.export(program)(*types)
    return jax.export.deserialize(bytearray(exported.serialize()))


def assert_equal(found, wanted):
    for mine, its in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(its), strict=True)


QUICK = ("blockwise", "delayed")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in RECIPES]
)
def test_any_batch_has_the_bits_of_its_own_program(name):
    program = jax.jit(functools.partial(step, RECIPES[name]))
    (w,) = arrays((192, 64))
    x_type = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 192"), jnp.bfloat16)
    exported = read_back(program, x_type, w)
    for batch in BATCHES:
        (x,) = arrays((batch, 192))
        assert_equal(exported.call(x, w), program(x, w))


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_of_sequences(trains):
    """A symbolic axis counts as long enough for a tile. A constraint can say that it is."""
    recipe = RECIPES["blockwise"]
    run = functools.partial(step, recipe) if trains else functools.partial(fp8.dot, recipe=recipe)
    tokens, constraints = (130, ("s >= 128",)) if trains else (5, ())
    program = jax.jit(run)
    dims = jax.export.symbolic_shape("b, s, 192", constraints=constraints)
    x, w = arrays((2, tokens, 192), (192, 64))
    exported = read_back(program, jax.ShapeDtypeStruct(dims, jnp.bfloat16), w)
    assert_equal(exported.call(x, w), program(x, w))


GRANULARITIES = {
    "along rows": fp8.PerBlock((128, 1)),
    "along columns": fp8.PerBlock((1, 128)),
    "square": fp8.PerBlock((128, 128)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "along rows")) for n in GRANULARITIES],
)
def test_tiles_of_a_symbolic_axis(name):
    quantize = jax.jit(lambda x: fp8.quantize(x, fp8.E4M3, GRANULARITIES[name]))
    x_type = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 192"), jnp.bfloat16)
    exported = read_back(quantize, x_type)
    for batch in BATCHES:
        (x,) = arrays((batch, 192))
        found, wanted = exported.call(x), quantize(x)
        assert_equal(found, wanted)
        assert_equal(found.dequantize(), wanted.dequantize())


def test_kernels_need_numbers():
    """A chip's kernels are left out. A kernel that is asked for says why it cannot."""
    dims = jax.export.symbolic_shape("128*b, 256")
    x, w = (jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in (dims, (256, 128)))
    dot = lambda kernels: jax.jit(
        lambda x, w: fp8.dot(x, w, recipe=fp8.recipes.blockwise(), kernels=kernels)
    )
    jax.export.export(dot(fp8.Kernels("h200")), platforms=["cuda"])(x, w)
    for kernels in (fp8.Kernels(casts="mosaic"), fp8.Kernels(matmuls="mosaic")):
        with pytest.raises(NotImplementedError, match=r"\[128\*b, 256\] has a symbolic size"):
            jax.export.export(dot(kernels), platforms=["cuda"])(x, w)
