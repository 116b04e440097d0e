import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import mentions
from hard_tiles import hard_amaxes

from jaxfp8.numerics._formats import E4M3, E5M2, E8M0
from jaxfp8.numerics._scale import ScaleRule

AMAXES = np.concatenate([hard_amaxes(np.float32), [0.0, np.inf, np.nan]]).astype(np.float32)
MX = {
    "rceil": ScaleRule(scale_format=E8M0),
    "floor": ScaleRule(scale_format=E8M0, scale_rounding="floor"),
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("rounding", MX)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_e8m0(format, rounding, transform):
    multiplier, scale = transform(lambda amax: MX[rounding].apply(amax, format))(
        jnp.asarray(AMAXES)
    )
    byte = oracle.e8m0_bytes(AMAXES, format.name, rounding)
    np.testing.assert_array_equal(np.asarray(scale).view(np.uint8), byte)
    np.testing.assert_array_equal(
        multiplier, np.ldexp(np.float32(1), np.where(byte == 255, 0, 127 - byte.astype(int)))
    )


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_float32(format, power_of_two):
    multiplier, scale = jax.jit(
        lambda amax: ScaleRule(power_of_two=power_of_two).apply(amax, format)
    )(AMAXES)
    expected = oracle.multiplier(AMAXES, format.name, power_of_two=power_of_two)
    np.testing.assert_array_equal(multiplier, expected)
    np.testing.assert_array_equal(scale, oracle.inverse(expected))


def test_exact():
    assert [rule.exact for rule in (ScaleRule(), ScaleRule(power_of_two=True), *MX.values())] == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("error", "fields", "parts"),
    [
        (TypeError, {"power_of_two": 1}, ("power_of_two=1", "must be True or False")),
        (
            ValueError,
            {"scale_format": E4M3},
            ("scale_format=E4M3", "holds no scales", "None (float32) or E8M0"),
        ),
        (ValueError, {"scale_format": "e8m0"}, ("scale_format='e8m0'", "holds no scales")),
        (
            ValueError,
            {"scale_format": E8M0, "scale_rounding": "up"},
            ("scale_rounding='up'", "'rceil' or 'floor'"),
        ),
        (
            ValueError,
            {"scale_rounding": "floor"},
            ("scale_rounding='floor'", "pass scale_format=E8M0 as well"),
        ),
        (
            ValueError,
            {"scale_rounding": "floor", "power_of_two": True},
            ("scale_rounding='floor'", "pass scale_format=E8M0 as well"),
        ),
    ],
    ids=range(6),
)
def test_misuse(error, fields, parts):
    with pytest.raises(error, match=mentions(*parts)):
        ScaleRule(**fields)
