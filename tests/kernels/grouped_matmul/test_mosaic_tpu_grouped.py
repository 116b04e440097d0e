"""The grouped matmul in Pallas for TPUs, interpreted: that of the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import GEOMETRY, RECIPES, operands

import jaxfp8 as fp8
from jaxfp8.kernels.grouped_matmul import _api
from jaxfp8.kernels.scaled_matmul._call import MatmulCall

pytest.importorskip("jax.experimental.pallas.tpu", exc_type=ImportError)

from jaxfp8.kernels.grouped_matmul import _mosaic_tpu

multiply = functools.partial(_mosaic_tpu.grouped_matmul, interpret=True)


def call_of(matmul, dtype=jnp.float32):
    return MatmulCall(geometry=GEOMETRY[matmul], out_dtype=jnp.dtype(dtype))


def given(matmul, sizes, tokens, k=24, n=8, *, name="current", tile=1):
    return operands(matmul, RECIPES[name], sizes, tokens, k, n, tile=tile)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 32 rows and 128 features, so that small arrays have many of them."""
    monkeypatch.setattr(_mosaic_tpu, "_ROWS", 32)
    monkeypatch.setattr(_mosaic_tpu, "_VMEM_FOR_BLOCKS", 300_000)


def assert_close(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max(initial=0))


@pytest.mark.parametrize("matmul", GEOMETRY)
def test_equals_the_definition(matmul, small_blocks):
    """One program for all sizes: empty groups, groups that share a block, a tail with NaN."""
    call, tokens = call_of(matmul), 140

    @jax.jit
    def both(sizes):
        case = given(matmul, sizes, tokens, 130, 140)
        return multiply(*case, call), _api._grouped_by_definition(*case, call)

    for sizes in ([1, 0, 77, 16], [0, 0, 0, 140], [0, 0, 0, 0], [140, 0, 0, 0], [0, 32, 64, 7]):
        got, want = both(jnp.array(sizes))
        assert_close(got, want)
        no_rows = np.array(sizes) == 0 if matmul == "wgrad" else slice(sum(sizes), None)
        assert not np.asarray(got)[no_rows].any()


@pytest.mark.parametrize("matmul", GEOMETRY)
def test_in_the_interpreter_of_tpus(matmul):
    """It also finds reads of memory that nobody wrote, as garbage in the result."""
    from jax.experimental.pallas import tpu as pltpu

    case = given(matmul, [130, 0, 170], 310, 24, 260)
    got = _mosaic_tpu.grouped_matmul(*case, call_of(matmul), interpret=pltpu.InterpretParams())
    assert_close(got, _api._grouped_by_definition(*case, call_of(matmul)))


@pytest.mark.parametrize("matmul", ["fprop", "wgrad"])
def test_results_are_rounded_once(matmul):
    case = given(matmul, [3, 4], 9)
    wide = multiply(*case, call_of(matmul))
    for dtype in (jnp.bfloat16, jnp.float16):
        got = multiply(*case, call_of(matmul, dtype))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wide.astype(dtype)))


def test_a_nan_stays_in_its_group():
    lhs, rhs, groups = given("wgrad", [3, 0, 4], 9)
    scale = jnp.where(jnp.arange(9) < 3, jnp.nan, lhs.scale)
    of_scale = multiply(dataclasses.replace(lhs, scale=scale), rhs, groups, call_of("wgrad"))
    values = lhs.values.at[0].set(jnp.nan)
    of_value = multiply(dataclasses.replace(lhs, values=values), rhs, groups, call_of("wgrad"))
    for got in (of_scale, of_value):
        assert np.isnan(got[0]).all()
        assert not got[1].any()
        assert np.isfinite(got[2]).all()


def test_mapped_over_layers():
    """Sizes of groups may be mapped, too."""
    cases = [given("fprop", sizes, 9) for sizes in ([4, 5], [0, 6])]
    run = functools.partial(multiply, call=call_of("fprop"))
    got = jax.vmap(run)(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases))
    for each, case in zip(got, cases, strict=True):
        np.testing.assert_array_equal(np.asarray(each), np.asarray(run(*case)))


def test_refusals():
    for matmul, name, tile in (("wgrad", "rowwise", 1), ("fprop", "current", 16)):
        with pytest.raises(NotImplementedError, match=r"scales of tensors|padded tiles"):
            multiply(*given(matmul, [3, 4], 9, name=name, tile=tile), call_of(matmul))
    with pytest.raises(NotImplementedError, match="bytes of VMEM"):
        jax.eval_shape(lambda: multiply(*given("fprop", [3], 3, 80_000, 8), call_of("fprop")))


@pytest.fixture(params=["interpreted", "on a CPU"])
def way(request, monkeypatch):
    """The kernel, or what runs where it does not: XLA's loop, for which rows are tiled again."""
    if request.param == "interpreted":
        row = _api.BACKENDS["mosaic_tpu"]
        row = dataclasses.replace(row, function=multiply, platform="any", elsewhere=None)
        monkeypatch.setitem(_api.BACKENDS, "mosaic_tpu", row)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_step_has_the_results_of_the_loop(name, way):
    recipe, sizes = getattr(fp8.recipes, name)(), jnp.array([5, 0, 140, 3])
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (150, 32)), jax.random.normal(keys[1], (4, 32, 16))
    x = x.at[148:].set(jnp.nan)

    def step(kernels, state):
        def loss(arrays, state):
            y = fp8.ragged_dot(*arrays, sizes, recipe=recipe, state=state, kernels=kernels)
            return jnp.vdot(y, y), y

        return jax.jit(fp8.value_and_grad(loss, has_aux=True))((x, w), state)

    for state in (fp8.init_state(recipe), jax.vmap(lambda _: fp8.init_state(recipe))(sizes)):
        ways = fp8.Kernels("tpu7x"), None
        got, want = (jax.tree.leaves(step(kernels, state)) for kernels in ways)
        for each, other in zip(got, want, strict=True):
            each, other = (np.asarray(leaf, np.float32) for leaf in (each, other))
            assert np.isfinite(other).all()
            np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-4)
