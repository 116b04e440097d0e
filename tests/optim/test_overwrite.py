"""`p + Overwrite(value)` is value, and nothing else may be done with an Overwrite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from same_bits import assert_same_bits

from jaxfp8.optim import Overwrite

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.uint8)


def apply(p, u):
    return optax.apply_updates({"w": p}, {"w": u})["w"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_apply_updates_writes_the_value(dtype, wrap):
    p, value = jnp.ones(3, dtype), jnp.arange(3).astype(dtype)
    assert_same_bits(wrap(lambda p, v: apply(p, Overwrite(v)))(p, value), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_may_leave_jit(dtype):
    value = jnp.arange(3).astype(dtype)
    update = jax.jit(Overwrite)(value)
    assert_same_bits(apply(jnp.ones(3, dtype), update), value)


@pytest.mark.parametrize("p", [np.float32(1), np.ones((), ml_dtypes.bfloat16)[()]])
def test_numpy_scalars(p):
    assert apply(p, Overwrite(jnp.asarray(2, p.dtype))) == 2


def test_numpy_arrays():
    assert_same_bits(apply(np.ones(3, np.float32), Overwrite(jnp.arange(3.0))), jnp.arange(3.0))


def test_an_update_that_is_not_written_keeps_the_parameter():
    update = Overwrite(jnp.zeros(3), jnp.asarray(False))
    assert_same_bits(jax.jit(apply)(jnp.ones(3), update), jnp.ones(3))


@pytest.mark.usefixtures("standard_promotion")
def test_updates_of_many_models():
    """One of 3 models is not updated, and parameters have 3 elements, too."""
    update = Overwrite(jnp.zeros((3, 3)), jnp.array([True, False, True]))
    expected = jnp.array([[0.0] * 3, [1.0] * 3, [0.0] * 3])
    assert_same_bits(jax.jit(apply)(jnp.ones((3, 3)), update), expected)
    mapped = jax.vmap(Overwrite)(jnp.zeros((3, 4)))
    assert_same_bits(apply(jnp.ones((3, 4)), mapped), jnp.zeros((3, 4)))


CHANGES = {
    "float": lambda u: u * 2.0,
    "integer": lambda u: 2 * u,
    "sign": lambda u: -1 * u,
    "array": lambda u: u * jnp.float32(0.5),
    "sum": lambda u: u + 0.0,
    "cast": lambda u: jnp.asarray(u, jnp.float32),
    "clip": lambda u: jnp.clip(u, -1, 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("standard_promotion")
def test_arithmetic_is_found(change):
    changed = jax.tree.map(CHANGES[change], Overwrite(jnp.ones(3)))
    with pytest.raises(ValueError, match=r"Put that transformation inside"):
        apply(jnp.ones(3), changed)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(2, np.float32), (3, jnp.bfloat16), (3, np.float16), ((), np.float32)]
)
def test_another_parameter_is_an_error(shape, dtype):
    with pytest.raises(ValueError, match=r"new weight float32\[3\] cannot replace a parameter"):
        apply(jnp.ones(shape, dtype), Overwrite(jnp.ones(3)))


@pytest.mark.parametrize(
    "misuse",
    [lambda u: u * 2.0, lambda u: -u, lambda u: u + jnp.ones(3), jnp.sum],
    ids=["times", "minus", "plus", "sum"],
)
def test_an_overwrite_is_no_array(misuse):
    with pytest.raises(TypeError):
        misuse(Overwrite(jnp.ones(3)))
