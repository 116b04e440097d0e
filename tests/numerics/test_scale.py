import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxfp8.numerics._formats import E4M3, E5M2
from jaxfp8.numerics._scale import encoding_multiplier, is_usable

# Every exponent with hard mantissas, and what is below, between and above.
AMAXES = np.concatenate(
    [
        (np.arange(0, 0x7F800000, 0x00800000 // 7, dtype=np.uint32)).view(np.float32),
        np.random.default_rng(0).integers(0, 0x7F800000, 100_000, dtype=np.uint32).view(np.float32),
        np.array(
            [0.0, 1e-45, 1e-38, 2.0**-126, 1.3e-36, 448.0, oracle.FLOAT32_MAX, np.inf, np.nan],
            np.float32,
        ),
    ]
)


@pytest.mark.parametrize("margin", [0, 2, 64])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_multiplier(format, power_of_two, margin):
    expected = oracle.multiplier(AMAXES, format.name, margin=margin, power_of_two=power_of_two)
    function = lambda amax: encoding_multiplier(
        amax, format, margin=margin, power_of_two=power_of_two
    )
    eager, jitted = (np.asarray(f(jnp.asarray(AMAXES))) for f in (function, jax.jit(function)))
    np.testing.assert_array_equal(eager, expected)
    np.testing.assert_array_equal(jitted, expected)
    if power_of_two:
        np.testing.assert_array_equal(np.frexp(eager)[0], 0.5)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1.17e-38, np.inf, np.nan])
def test_an_amax_that_cannot_tell(amax):
    assert not is_usable(jnp.float32(amax))
    assert encoding_multiplier(jnp.float32(amax), E4M3) == 1.0


def test_below_the_limit_of_transformer_engine():
    # The one deliberate difference: 448 / amax overflows below 1.3e-36; there TransformerEngine
    # multiplies zeros by inf.
    x = np.array([0.0, 1e-37, -5e-37], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = np.clip(x * (np.float32(448) / np.abs(x).max()), -448, 448)
    assert np.isnan(theirs[0])
    multiplier = encoding_multiplier(jnp.max(jnp.abs(jnp.asarray(x))), E4M3)
    assert multiplier == 2.0**126
    assert np.isfinite(
        oracle.cast(x, np.asarray(multiplier), "E4M3").view(oracle.DTYPE["E4M3"]).astype(np.float32)
    ).all()
