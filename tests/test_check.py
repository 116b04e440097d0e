"""The checks of arguments: what each accepts, and that its error has name, value and cure."""

import enum
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8._check import check_int, check_number, check_one_of, is_number

SIXTEEN = enum.IntEnum("SIXTEEN", {"A": 16}).A


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble, float])
@pytest.mark.parametrize(("number", "fits"), [
    ("0", False), ("-0.0", False), ("-1", False), ("inf", False), ("-inf", False), ("nan", False),
    ("1", True), ("6e-8", True), ("6e4", True),
])  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_a_positive_number_of_any_type(number, fits, dtype):
    assert is_number(dtype(number)) is fits


@pytest.mark.parametrize("given", [True, False, "1", None, (1,), jnp.ones(()), np.ones(1), 1j])
def test_what_is_no_number(given):
    assert not is_number(given, least=0)


def test_numbers_without_a_float_between():
    assert is_number(5e-324)
    assert is_number(Fraction(5, 4))
    assert is_number(np.int8(2))
    assert not is_number(10**400)
    assert type(check_number("a", np.float32(0.5), "less", least=0, most=0.5)) is float
    with pytest.raises(ValueError, match=r"a=0\.75 must be less\."):
        check_number("a", 0.75, "less", least=0, most=0.5)


@pytest.mark.parametrize("given", [0, 9, True, 1.0, "1", np.int64(3), SIXTEEN, None, [1]])
def test_what_is_no_integer(given):
    with pytest.raises(ValueError, match=r"^a=.* must be an integer from 1 to 8\.$"):
        check_int("a", given, most=8)


@pytest.mark.parametrize("given", [
    16.0, np.int64(16), np.array(16), jnp.int32(16), np.array([16, 8]), [16], "16", None, 9,
])  # fmt: skip
def test_a_value_of_another_type_is_not_known(given):
    with pytest.raises(ValueError, match=r"^a=.* is unknown; use 16, 8 or 'none'\.$"):
        check_one_of("a", given, (16, 8, "none"))


def test_bounds_are_known():
    check_int("a", 8, most=8)
    check_int("a", 0, least=0)
    check_one_of("a", 8, (16, 8))
    with pytest.raises(ValueError, match="b=-1 must be a number of blocks, an integer of at least"):
        check_int("b", -1, "a number of blocks, an integer", least=0)
