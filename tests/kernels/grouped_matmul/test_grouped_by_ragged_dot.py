"""The grouped matmul by `jax.lax.ragged_dot`, which XLA has for TPUs, on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import GEOMETRY, RECIPES, operands
from jax import lax

import jaxfp8 as fp8
from jaxfp8.kernels.grouped_matmul import _api, _ragged_dot
from jaxfp8.kernels.scaled_matmul._call import MatmulCall

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.fixture
def as_on_tpus(monkeypatch):
    """`lax.ragged_dot` as on TPUs: it leaves NaN in the rows behind the last group."""
    on_cpus = lax.ragged_dot

    def on_tpus(lhs, rhs, sizes, **options):
        assert {lhs.dtype, rhs.dtype} <= {jnp.dtype(E4M3), jnp.dtype(E5M2)}
        y = on_cpus(lhs, rhs, sizes, **options)
        return jnp.where(jnp.arange(len(lhs))[:, None] < jnp.sum(sizes), y, jnp.nan)

    monkeypatch.setattr(lax, "ragged_dot", on_tpus)


def call_of(matmul, dtype=jnp.float32):
    return MatmulCall(geometry=GEOMETRY[matmul], out_dtype=jnp.dtype(dtype))


@pytest.mark.parametrize("name", ["current", "rowwise"])
@pytest.mark.parametrize("matmul", GEOMETRY)
def test_equals_the_definition(matmul, name, as_on_tpus):
    """One program for all sizes: empty groups, ragged tiles, a tail with NaN, and no rows."""
    call, tokens = call_of(matmul), 40

    @jax.jit
    def both(sizes):
        given = operands(matmul, RECIPES[name], sizes, tokens, 24, 8, tile=16)
        ways = _ragged_dot.grouped_matmul, _api._grouped_by_definition
        return [multiply(*given, call) for multiply in ways]

    for sizes in ([1, 0, 17, 16], [0, 0, 0, 40], [0, 0, 0, 0], [40, 0, 0, 0], [0, 3, 0, 0]):
        got, want = map(np.asarray, both(jnp.array(sizes)))
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
        no_rows = np.array(sizes) == 0 if matmul == "wgrad" else slice(sum(sizes), None)
        assert not got[no_rows].any()


def test_results_are_rounded_once():
    given = operands("fprop", RECIPES["current"], [3, 4], 9, 8, 8, tile=16)
    wide = _ragged_dot.grouped_matmul(*given, call_of("fprop"))
    for dtype in (jnp.bfloat16, jnp.float16):
        got = _ragged_dot.grouped_matmul(*given, call_of("fprop", dtype))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wide.astype(dtype)))


def test_a_group_without_rows_has_no_gradient_whatever_the_others_hold():
    lhs, rhs, groups = operands("wgrad", RECIPES["current"], [0, 3, 0], 3, 8, 8, tile=16)
    lhs = dataclasses.replace(lhs, scale=jnp.full_like(lhs.scale, jnp.nan))
    got = _ragged_dot.grouped_matmul(lhs, rhs, groups, call_of("wgrad"))
    assert np.isnan(got[1]).all()
    assert not got[::2].any()


def test_mapped_over_layers():
    """Sizes of groups may be mapped, too."""
    cases = [operands("fprop", RECIPES["current"], sizes, 9, 8, 8, tile=16)
             for sizes in ([4, 5], [0, 6])]  # fmt: skip
    run = functools.partial(_ragged_dot.grouped_matmul, call=call_of("fprop"))
    got = jax.vmap(run)(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases))
    for each, case in zip(got, cases, strict=True):
        np.testing.assert_array_equal(np.asarray(each), np.asarray(run(*case)))


def test_tiles_are_left_to_the_loop():
    call = call_of("fprop")
    given = operands("fprop", RECIPES["mxfp8"], [3, 4], 7, 32, 32, tile=32)
    with pytest.raises(
        NotImplementedError, match=r"PerBlock.* Use a recipe with scales of tensors"
    ):
        _ragged_dot.grouped_matmul(*given, call)


@pytest.mark.parametrize("name", ["delayed", "rowwise"])
def test_all_three_matmuls_of_a_step(name, monkeypatch, as_on_tpus):
    """`fp8.ragged_dot` with it equals the loop, and no matmul is left to the loop.

    It also multiplies what the kernel in Pallas refuses, whose operands have rows for tiles.
    """

    def refuse(*_, **__):
        raise NotImplementedError

    monkeypatch.setitem(
        _api.BACKENDS,
        "mosaic_tpu",
        dataclasses.replace(_api.BACKENDS["mosaic_tpu"], function=refuse, elsewhere=None),
    )
    row = dataclasses.replace(_api.BACKENDS["ragged_dot"], platform="any", elsewhere=None)
    monkeypatch.setitem(_api.BACKENDS, "ragged_dot", row)
    recipe = getattr(fp8.recipes, name)()
    sizes = jnp.array([2, 0, 5])
    normal = np.random.default_rng(0).standard_normal
    x, w, g = (normal(shape).astype("float32") for shape in ((9, 16), (3, 16, 8), (9, 8)))
    x, g = (np.where(np.arange(9)[:, None] < 7, each, np.nan).astype(each.dtype) for each in (x, g))

    def run(kernels, x, w, g):
        def loss(arrays, state):
            y = fp8.ragged_dot(*arrays, sizes, recipe=recipe, state=state, kernels=kernels)
            return jnp.vdot(y[:7], g[:7]), y

        state = fp8.init_state(recipe)
        return fp8.value_and_grad(loss, has_aux=True)((x, w), state)

    by_kernel = functools.partial(run, fp8.Kernels("tpu7x"))
    assert str(jax.make_jaxpr(by_kernel)(x, w, g)).count("= ragged_dot_general[") == 3
    got, want = jax.jit(by_kernel)(x, w, g), jax.jit(functools.partial(run, None))(x, w, g)
    for mine, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-5, atol=1e-6)


def test_with_64_bits_and_strict_promotion():
    def gradients(x, w, sizes):
        how = {"recipe": fp8.recipes.current(), "kernels": fp8.Kernels("tpu7x")}
        y, backward = jax.vjp(lambda x, w: fp8.ragged_dot(x, w, sizes, **how), x, w)
        return backward(y)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 64), (2, 64, 32)))
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        dx, dw = jax.eval_shape(gradients, x, w, sizes)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
