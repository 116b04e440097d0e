"""The optimizer state leaves the backward pass with its bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same_bits import assert_same_bits

from jaxfp8.optim import release
from jaxfp8.optim._released import _carried, carriers_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
L = 3
WORDS = np.array(
    [0, 1, 0x80000000, 0x80000001, 0x7F800000, 0x7FC00001, 0x7F800001, 0xFFA5A5A5, 0x007FFFFF, 42],
    np.uint32,
)  # as float32: zeros, subnormal numbers, inf, quiet and signalling NaNs


def codes():
    """Every code of 8 and of 16 bits, and words that float arithmetic would change."""
    byte, half = np.arange(256).astype(np.uint8), np.arange(65536).astype(np.uint16)
    e5m2, bf16 = byte.view(jnp.float8_e5m2), half.view(jnp.bfloat16)
    f16 = half.view(np.float16)

    def ones_for_nan(x):
        with np.errstate(invalid="ignore"):  # of a signalling NaN
            return np.where(np.isnan(x), np.ones_like(x), x)

    return {
        "uint8": byte,
        "int8": byte.view(np.int8),
        "bool": byte % 2 == 1,
        "uint16": half,
        "int16": half.view(np.int16),
        "uint32": WORDS,
        "int32": WORDS.view(np.int32),
        "float32": WORDS.view(np.float32),
        "e4m3": byte.view(jnp.float8_e4m3fn),
        "e5m2": ones_for_nan(e5m2),
        "bfloat16": ones_for_nan(bf16),
        "float16": ones_for_nan(f16),
    }


def rolled(x, by):
    """Integer arithmetic, so that XLA cannot leave the state where it is."""
    dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    if x.dtype == jnp.bool_:
        return jnp.roll(x, by)
    return jax.lax.bitcast_convert_type(
        jnp.roll(jax.lax.bitcast_convert_type(x, dtype), by), x.dtype
    )


def rolling():
    """An optimizer whose state moves by one place in each update. Updates are 0."""
    init = lambda params: jax.tree.map(jnp.asarray, codes())
    update = lambda grads, state, params: (grads, jax.tree.map(lambda x: rolled(x, 1), state))
    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("jit", [False, True], ids=["op by op", "compiled"])
def test_all_codes(jit):
    carry = lambda tree: jax.tree.map(carriers_of, tree)
    back = lambda tree, carriers: {k: _carried(carriers[k], x.dtype) for k, x in tree.items()}
    tree = jax.tree.map(jnp.asarray, codes())
    carriers = (jax.jit(carry) if jit else carry)(tree)
    assert_same_bits(jax.jit(functools.partial(back, tree))(carriers), tree)


def test_all_codes_through_the_backward_pass():
    stack = release(rolling(), per_layer=True)
    layers = jax.jit(stack.init)({"w": np.ones((L, 2), np.float32)})

    def step(layers, x):
        f = lambda x, p: (x * p["w"], None)
        return jax.grad(lambda layers: jnp.sum(stack.scan(f, x, layers)[0]))(layers)

    step = jax.jit(step, donate_argnums=0)
    expected = jax.tree.map(jnp.copy, layers.opt_state)  # floats are donated as they are
    roll = jax.jit(lambda tree: jax.tree.map(jax.vmap(lambda x: rolled(x, 1)), tree))
    for _ in range(3):
        layers = step(layers, jnp.ones(2))
        expected = roll(expected)
    layers.check()
    assert_same_bits(layers.opt_state, expected)
    # The gradient w^2 is added: 1 + 1, 2 + 4, 6 + 36.
    np.testing.assert_array_equal(layers.params["w"], np.full((L, 2), 42.0))
