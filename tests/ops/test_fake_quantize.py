"""`fp8.fake_quantize`: the value of a quantized array, the gradient of the array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import hard_arrays, mentions

import jaxfp8 as fp8

# Eagerly each operation is compiled alone: tiles ask nothing of that.
NAMES = "power_of_two", "scale_format", "scale_rounding"
quantize_at_once, fake_quantize_at_once = (
    jax.jit(function, static_argnums=(1, 2), static_argnames=NAMES)
    for function in (fp8.quantize, fp8.fake_quantize)
)
dequantize_at_once = jax.jit(fp8.QuantizedTensor.dequantize)


@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=repr)
def test_fake_quantize(format):
    for x in hard_arrays(np.float32).values():
        np.testing.assert_array_equal(
            fake_quantize_at_once(x, format), dequantize_at_once(quantize_at_once(x, format))
        )
    x = jnp.asarray(np.array([-1e-9, 1e-9, 1.0, -0.0], np.float32))
    eagerly = (fp8.fake_quantize,) if format == fp8.E4M3 else ()
    for function in (*eagerly, fake_quantize_at_once):
        np.testing.assert_array_equal(np.signbit(function(x, format)), [True, False, False, True])
    gradient = jax.jit(jax.grad(lambda x: (2 * fp8.fake_quantize(x, format)).sum()))
    np.testing.assert_array_equal(gradient(x), 2.0)


def test_fake_quantize_in_tiles():
    x = jnp.asarray(hard_arrays(np.float32)["wide"])
    arguments = fp8.E4M3, fp8.PerBlock((1, 32))
    for options in ({"power_of_two": True}, {"scale_format": fp8.E8M0, "scale_rounding": "floor"}):
        q = quantize_at_once(x, *arguments, **options)
        np.testing.assert_array_equal(
            fake_quantize_at_once(x, *arguments, **options), dequantize_at_once(q)
        )
        loss = lambda x, options=options: (2 * fp8.fake_quantize(x, *arguments, **options)).sum()
        gradient = jax.jit(jax.grad(loss))(x)
        np.testing.assert_array_equal(gradient, 2.0)


def test_stochastic_rounding():
    x, key = jnp.asarray(hard_arrays(np.float32)["gaussian"]), jax.random.key(0)
    how = {"rounding": "stochastic", "key": key}

    @jax.jit
    def run(x):
        wanted = fp8.quantize(x, fp8.E4M3, **how).dequantize()
        return fp8.fake_quantize(x, fp8.E4M3, **how), wanted, fp8.fake_quantize(x, fp8.E4M3)

    drawn, wanted, nearest = map(np.asarray, run(x))
    np.testing.assert_array_equal(drawn, wanted)
    assert (drawn != nearest).any()


@pytest.mark.parametrize("name", ["quantize", "fake_quantize"])
def test_an_unknown_option(name):
    known = "power_of_two, rounding, scale_format, scale_rounding"
    with pytest.raises(TypeError, match=mentions(f"fp8.{name}", "power_of_tow=True", known)):
        getattr(fp8, name)(jnp.ones(3), fp8.E4M3, power_of_tow=True)


def test_quantize_has_no_silent_gradient():
    with pytest.raises(TypeError, match="no gradient"):
        jax.grad(lambda x: fp8.quantize(x, fp8.E4M3).dequantize().sum())(jnp.ones(3))
