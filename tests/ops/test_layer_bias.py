"""Layers give their bias to their matmul, where that is what flax computes."""

import jax
import jax.numpy as jnp
from flax import linen, nnx
from same_bits import assert_same_bits

import jaxfp8 as fp8

D, F = 160, 96
X = jax.random.normal(jax.random.key(0), (2, 64, D))


def test_layers_give_it_to_their_matmul():
    """As flax's layers with the plug, which add it after the matmul.

    And nobody sums what nobody asks for.
    """
    x = X.astype(jnp.bfloat16)
    recipe, how = (
        fp8.recipes.blockwise(),
        {"dtype": jnp.bfloat16, "bias_init": linen.initializers.normal()},
    )
    ours = fp8.linen.FP8Dense(F, recipe=recipe, **how)
    plug = linen.Dense(F, dot_general_cls=fp8.linen.FP8DotGeneral.using(recipe), **how)
    mine = fp8.nnx.FP8Linear(D, F, recipe=recipe, rngs=nnx.Rngs(0), **how)
    theirs = nnx.Linear(D, F, dot_general=fp8.nnx.FP8DotGeneral(recipe), rngs=nnx.Rngs(0), **how)

    @jax.jit
    def run(x):
        variables = ours.init(jax.random.key(0), x)
        return (ours.apply(variables, x), mine(x)), (
            plug.apply(plug.init(jax.random.key(0), x), x),
            theirs(x),
        )

    assert_same_bits(*run(x))
    variables = jax.eval_shape(ours.init, jax.random.key(0), x)
    for apply, learned in (
        (ours.apply, variables),
        (lambda b, x: fp8.dot(x, x[0].mT, recipe=recipe, bias=b), x[0, :, 0]),
    ):
        both, of_x = (
            str(
                jax.make_jaxpr(
                    jax.grad(lambda v, x, f=apply: f(v, x).astype(jnp.float32).sum(), which)
                )(learned, x)
            )
            for which in ((0, 1), 1)
        )
        assert both.count("reduce_sum") == of_x.count("reduce_sum") + 1


def test_a_layer_adds_another_bias_as_flax_does():
    """Of another dtype or shape than the result's: promoted and broadcast, after the matmul."""
    x = X
    recipe = fp8.recipes.current()
    how = {"preferred_element_type": jnp.bfloat16, "bias_init": nnx.initializers.normal()}
    mine = fp8.nnx.FP8Linear(D, F, recipe=recipe, rngs=nnx.Rngs(0), **how)
    theirs = nnx.Linear(D, F, dot_general=fp8.nnx.FP8DotGeneral(recipe), rngs=nnx.Rngs(0), **how)
    with jax.numpy_dtype_promotion("standard"):
        y, wanted = jax.jit(lambda x: (mine(x), theirs(x)))(x)
        assert y.dtype == jnp.float32
        assert_same_bits(y, wanted)
    ours = fp8.linen.FP8Dense(F, recipe=recipe, promote_dtype=keep)
    plug = linen.Dense(F, dot_general_cls=fp8.linen.FP8DotGeneral.using(recipe), promote_dtype=keep)
    bias = jax.random.normal(jax.random.key(1), (F,))
    variables = {"params": {"kernel": jnp.ones((D, F), jnp.bfloat16), "bias": bias}}
    with jax.numpy_dtype_promotion("standard"):
        both = jax.jit(lambda variables, x: [each.apply(variables, x) for each in (ours, plug)])
        y, wanted = both(variables, x.astype(jnp.bfloat16))
        assert y.dtype == jnp.float32
        assert_same_bits(y, wanted)


def keep(*arrays, dtype=None):
    """No promotion, for `promote_dtype=`."""
    return list(arrays)


def test_another_matmul_put_in_takes_no_bias():
    layer = fp8.nnx.FP8Linear(D, F, recipe=fp8.recipes.current(), rngs=nnx.Rngs(0))
    layer.dot_general = lambda *args, precision, out_sharding: jax.lax.dot_general(
        *args, precision=precision
    )
    assert_same_bits(layer(X), nnx.Linear(D, F, rngs=nnx.Rngs(0))(X))
