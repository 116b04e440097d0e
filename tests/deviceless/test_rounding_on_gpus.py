"""The cast to FP8 in programs for GPUs.

Every value, the midpoints between neighbours and what lies beside them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import cast_inputs
from targets import compile_for

import jaxfp8 as fp8
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.programs import run_on_cpu

pytestmark = pytest.mark.deviceless

FORMATS = pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=repr)
CHIPS = pytest.mark.parametrize(
    "chip", ["h200", *(pytest.param(c, marks=pytest.mark.slow) for c in ("b200", "a100"))]
)


def cast_and_back(format):
    """The payload, and what XLA folds: FP8 to a wider dtype in the program that made it."""

    def function(x, m):
        values = saturating_cast(x, m, format)
        return values, values.astype(jnp.bfloat16), values.astype(jnp.float32)

    return function


def run(chip, function, *arguments, **options):
    return run_on_cpu(compile_for(chip, function, *arguments, options=options), *arguments)


@CHIPS
@FORMATS
@pytest.mark.parametrize("m", [1.0, 0.1, 2.0**-9, 2.0**126])
@pytest.mark.parametrize("excess_precision", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_value(chip, format, m, excess_precision):
    x = cast_inputs(format)
    found = run(
        chip,
        cast_and_back(format),
        jnp.asarray(x),
        jnp.float32(m),
        xla_allow_excess_precision=excess_precision,
    )
    expected = oracle.cast(x, m, format.name)
    np.testing.assert_array_equal(oracle.codes(found[0]), expected)
    for wide in found[1:]:
        np.testing.assert_array_equal(
            np.asarray(wide, np.float32), expected.view(format.dtype).astype(np.float32)
        )


def test_a_conversion_would_be_folded():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1024), jnp.bfloat16)
    there_and_back = lambda x: x.astype(fp8.E4M3.dtype).astype(jnp.bfloat16)
    np.testing.assert_array_equal(run("h200", there_and_back, x), x)
    as_written = run("h200", there_and_back, x, xla_allow_excess_precision=False)
    np.testing.assert_array_equal(as_written, jax.jit(there_and_back)(x))
    assert (as_written != x).mean() > 0.9


@CHIPS
@FORMATS
def test_stochastic_rounding(chip, format, monkeypatch):
    """The bits of the CPU's, of the same random bits."""
    x = jnp.asarray(cast_inputs(format))
    random = jnp.asarray(np.random.default_rng(1).integers(0, 2**32, x.shape, dtype=np.uint32))

    def function(x, random):
        monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: random)
        values = saturating_cast(
            x, jnp.float32(1.0), format, rounding="stochastic", key=jax.random.key(0)
        )
        return values, values.astype(jnp.bfloat16)

    values, wide = run(chip, function, x, random)
    expected = jax.jit(function)(x, random)[0]
    np.testing.assert_array_equal(oracle.codes(values), oracle.codes(expected))
    np.testing.assert_array_equal(np.asarray(wide, np.float32), np.asarray(expected, np.float32))
