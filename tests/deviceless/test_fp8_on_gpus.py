"""GPU programs, run on the CPU: casts have the CPU's bits, and matmuls read FP8 values."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import (
    CASTS,
    CHIPS,
    IDENTITY,
    SETUPS,
    STEPS,
    Matmuls,
    Setup,
    arrays,
    differs,
    expected_operands,
    off_grid,
    state_for,
)
from targets import compile_for

import jaxfp8 as fp8
from jaxfp8.numerics._rounding import kernel_cast
from jaxfp8.programs import run_on_cpu

pytestmark = pytest.mark.deviceless

OPTIONS = ("default", "ours")


def on_gpu(
    chip: str, options: str, function: Any, setup: Setup, *arguments: Any, seen: Any = None
) -> Any:
    """The results of a function, compiled for that chip and run here."""
    given = fp8.Kernels(chip).compiler_options(setup.recipe) if options == "ours" else {}
    compiled = compile_for(chip, functools.partial(function, setup), *arguments, options=given)
    return run_on_cpu(compiled, *arguments, seen=seen)


@functools.cache
def on_cpu(function: Any, setup: Setup, dtype: Any) -> Any:
    return jax.jit(functools.partial(function, setup))(*arguments_for(function, setup, dtype))


def arguments_for(function: Any, setup: Setup, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    if function in CASTS.values():
        return arrays(dtype)[:1]
    return state_for(setup, *[2] * (function is STEPS["training step"])), *arrays(dtype)


def cells(rows: dict[str, Any]) -> Any:
    """chip x options x setup x row.

    By default one chip and one row of each; the others when asked for.
    """

    def marks(chip: str, options: str, setup: str, row: str) -> Any:
        first = chip == "h200" and row in ("layer", "fake_quantize")
        return () if first else (pytest.mark.slow,)

    return pytest.mark.parametrize(
        ("chip", "options", "setup", "row"),
        [
            pytest.param(*cell, marks=marks(*cell))
            for chip in CHIPS
            for options in OPTIONS
            for setup in SETUPS
            if SETUPS[setup].kernels.chip in (None, chip)
            for row in rows
            for cell in [(chip, options, setup, row)]
        ],
    )


@cells(CASTS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_casts_have_the_bits_of_the_cpu(chip, options, setup, row, dtype):
    function, setup = CASTS[row], SETUPS[setup]
    found = on_gpu(chip, options, function, setup, *arguments_for(function, setup, dtype))
    for ours, theirs in zip(found, on_cpu(function, setup, dtype), strict=True):
        ours, theirs = (np.asarray(v).view(f"u{v.dtype.itemsize}") for v in (ours, theirs))
        np.testing.assert_array_equal(ours, theirs)


@cells(STEPS)
def test_matmuls_read_fp8(chip, options, setup, row):
    function, setup = STEPS[row], SETUPS[setup]
    given, matmuls = arguments_for(function, setup), Matmuls()
    found = on_gpu(chip, options, function, setup, *given, seen=matmuls)
    check_operands(setup, row, given, matmuls)
    check_errors(function, setup, found)


def check_operands(setup, row, given, matmuls):
    recipe, by_blackwell = setup.recipe, setup.kernels.matmuls == "cudnn"
    assert all(
        by_blackwell == all(s is not None for s in matmul.scales)
        for matmul in matmuls
        if recipe.tile
    )
    ran = {matmul.name for matmul in matmuls}
    assert ran == {name for name in ("fprop", "dgrad", "wgrad") if getattr(recipe, name).in_fp8}
    assert not off_grid(recipe, matmuls)
    if row != "layer":
        return
    state, *tensors = given
    for matmul in matmuls:
        expected = expected_operands(
            recipe, matmul.name, dict(zip("xwg", tensors, strict=True)), state
        )
        for operand, scale, quantized in zip(matmul.operands, matmul.scales, expected, strict=True):
            assert not differs(operand, scale, quantized), matmul.name


def check_errors(function, setup, found):
    """That of FP8, against the function in float32.

    As large as on the CPU, and more than twice that of bfloat16.
    """
    truth, in_bfloat16, cpu = (
        measured(on_cpu(function, of, dtype))
        for of, dtype in ((IDENTITY, jnp.float32), (IDENTITY, jnp.bfloat16), (setup, jnp.bfloat16))
    )
    for name, value in measured(found).items():
        error = functools.partial(relative_error, truth=truth[name])
        assert error(value) == pytest.approx(error(cpu[name]), rel=0.1), name
        if name != "dw" or setup.recipe.wgrad.in_fp8:
            assert error(value) > 2 * error(in_bfloat16[name]), name


def measured(results: Any) -> dict[str, Any]:
    """y, dx and dw of a layer; the gradients of a training step."""
    (_, first), second, _ = results
    return dict(zip(("y", "dx", "dw"), (first, *second), strict=True)) if len(second) > 1 else first


def relative_error(value: Any, truth: Any) -> float:
    value, truth = (np.asarray(v, np.float64) for v in (value, truth))
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


@pytest.fixture
def a_conversion_in_casts(monkeypatch):
    """Casts as they were: they end in a conversion, which XLA folds."""
    jax.clear_caches()
    old = lambda x, multiplier, format, *, rounding, key: kernel_cast(x, multiplier, format)
    monkeypatch.setattr("jaxfp8.kernels.cast._api.saturating_cast", old)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("setup", ["blockwise", "mxfp8", "current"])
def test_a_folded_conversion_is_found(setup, a_conversion_in_casts):
    setup, matmuls = SETUPS[setup], Matmuls()
    given = arguments_for(CASTS["fake_quantize"], setup)
    value, _ = on_gpu("h200", "default", CASTS["fake_quantize"], setup, *given)
    # The input itself, but for the two roundings of the scale and the product of a whole tensor.
    assert relative_error(value, given[0]) < (2.0**-8 if setup.recipe.tile is None else 1e-9)
    found = on_gpu(
        "h200",
        "default",
        STEPS["layer"],
        setup,
        *arguments_for(STEPS["layer"], setup),
        seen=matmuls,
    )
    assert off_grid(setup.recipe, matmuls)
    with pytest.raises(AssertionError):
        check_errors(STEPS["layer"], setup, found)
