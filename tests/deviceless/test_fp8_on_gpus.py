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
    RECIPES,
    STEPS,
    Matmuls,
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
    chip: str, options: str, function: Any, recipe: fp8.Recipe, *arguments: Any, seen: Any = None
) -> Any:
    """The results of a function, compiled for that chip and run here."""
    given = fp8.compiler_options(recipe, chip) if options == "ours" else {}
    compiled = compile_for(chip, functools.partial(function, recipe), *arguments, options=given)
    return run_on_cpu(compiled, *arguments, seen=seen)


@functools.cache
def on_cpu(function: Any, recipe: fp8.Recipe, dtype: Any) -> Any:
    return jax.jit(functools.partial(function, recipe))(*arguments_for(function, recipe, dtype))


def arguments_for(function: Any, recipe: fp8.Recipe, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    if function in CASTS.values():
        return arrays(dtype)[:1]
    return state_for(recipe, *[2] * (function is STEPS["training step"])), *arrays(dtype)


def cells(rows: dict[str, Any]) -> Any:
    """chip x options x recipe x row.

    By default one chip and one row of each; the others when asked for.
    """

    def marks(chip: str, options: str, recipe: str, row: str) -> Any:
        first = chip == "h200" and row in ("layer", "fake_quantize")
        return () if first else (pytest.mark.exhaustive,)

    return pytest.mark.parametrize(
        ("chip", "options", "recipe", "row"),
        [
            pytest.param(*cell, marks=marks(*cell))
            for chip in CHIPS
            for options in OPTIONS
            for recipe in RECIPES
            if RECIPES[recipe].chip in (None, chip)
            for row in rows
            for cell in [(chip, options, recipe, row)]
        ],
    )


@cells(CASTS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_casts_have_the_bits_of_the_cpu(chip, options, recipe, row, dtype):
    function, recipe = CASTS[row], RECIPES[recipe]
    found = on_gpu(chip, options, function, recipe, *arguments_for(function, recipe, dtype))
    for ours, theirs in zip(found, on_cpu(function, recipe, dtype), strict=True):
        ours, theirs = (np.asarray(v).view(f"u{v.dtype.itemsize}") for v in (ours, theirs))
        np.testing.assert_array_equal(ours, theirs)


@cells(STEPS)
def test_matmuls_read_fp8(chip, options, recipe, row):
    function, recipe = STEPS[row], RECIPES[recipe]
    given, matmuls = arguments_for(function, recipe), Matmuls()
    found = on_gpu(chip, options, function, recipe, *given, seen=matmuls)
    check_operands(recipe, row, given, matmuls)
    check_errors(function, recipe, found)


def check_operands(recipe, row, given, matmuls):
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


def check_errors(function, recipe, found):
    """That of FP8, against the function in float32.

    As large as on the CPU, and more than twice that of bfloat16.
    """
    identity = fp8.recipes.identity()
    truth, in_bfloat16, cpu = (
        measured(on_cpu(function, of, dtype))
        for of, dtype in ((identity, jnp.float32), (identity, jnp.bfloat16), (recipe, jnp.bfloat16))
    )
    for name, value in measured(found).items():
        error = functools.partial(relative_error, truth=truth[name])
        assert error(value) == pytest.approx(error(cpu[name]), rel=0.1), name
        if name != "dw" or recipe.wgrad.in_fp8:
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
    monkeypatch.setattr("jaxfp8.kernels.cast._xla.saturating_cast", old)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "current"])
def test_a_folded_conversion_is_found(recipe, a_conversion_in_casts):
    recipe, matmuls = RECIPES[recipe], Matmuls()
    given = arguments_for(CASTS["fake_quantize"], recipe)
    value, _ = on_gpu("h200", "default", CASTS["fake_quantize"], recipe, *given)
    # The input itself, but for the two roundings of the scale and the product of a whole tensor.
    assert relative_error(value, given[0]) < (2.0**-8 if recipe.tile is None else 1e-9)
    found = on_gpu(
        "h200",
        "default",
        STEPS["layer"],
        recipe,
        *arguments_for(STEPS["layer"], recipe),
        seen=matmuls,
    )
    assert off_grid(recipe, matmuls)
    with pytest.raises(AssertionError):
        check_errors(STEPS["layer"], recipe, found)
