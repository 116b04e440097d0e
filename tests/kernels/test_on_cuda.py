"""A plain function in place of a kernel for CUDA, and XLA's extras in place of a kernel's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import cast_in, known
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from platforms import mesh_of, text_for, types

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import CastExtras
from jaxfp8.kernels._dispatch import _on_platform
from jaxfp8.prologues._prologue import Produced, produce, value_of

_on_cuda = functools.partial(_on_platform, "cuda")
X = jnp.arange(1.0, 9.0)


def sines(x, y=None, *, times=1.0):
    """A kernel."""
    return times * jnp.sin(x if y is None else x + y)


def cosines(like, x, y=None, *, times=1.0):
    """What other platforms run in its place."""
    assert (like.shape, like.dtype) == (x.shape, x.dtype)
    return times * jnp.cos(x if y is None else x + y)


def test_each_platform_runs_its_own():
    run = functools.partial(_on_cuda, sines, cosines)
    for mine in (run(X), jax.jit(run)(X)):
        np.testing.assert_allclose(mine, np.cos(X), rtol=1e-6)
    for platform, inside, outside in (("cuda", "sine", "cosine"), ("cpu", "cosine", "sine")):
        text = text_for(platform, run, X)
        assert f"stablehlo.{inside} " in text
        assert f"stablehlo.{outside} " not in text


def test_elsewhere_gets_what_the_kernel_gets():
    seen = []

    def kernel(*args, **kwargs):
        seen.append((args, kwargs))
        return {"sum": jnp.ones((2, 3), jnp.bfloat16), "none": None}

    def elsewhere(like, *args, **kwargs):
        seen.append((args, kwargs))
        assert like == {"sum": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "none": None}
        return {"sum": jnp.full((2, 3), 2, jnp.bfloat16), "none": None}

    tiles = fp8.quantize(jnp.ones((4, 64)), fp8.E4M3, fp8.PerBlock((1, 32)), power_of_two=True)
    x = produce(fp8.prologues.SwiGLU(), jnp.ones((4, 64)), jnp.ones((4, 64)))
    cast = cast_in(fp8.E4M3, fp8.PerTensor(), fp8.PerAxis(0), column_sums=True)
    result = _on_cuda(
        kernel,
        elsewhere,
        tiles,
        x,
        cast,
        known(X[0], X[1]),
        3,
        [X],
        key=None,
        how={"by": "name"},
    )
    np.testing.assert_array_equal(result["sum"].astype(jnp.float32), np.full((2, 3), 2))
    assert result["none"] is None
    assert len(seen) == 2
    for (q, source, got_cast, scales, number, (array,)), kwargs in seen:
        assert isinstance(q, fp8.QuantizedTensor)
        assert (q.granularity, q.dtype, q.power_of_two) == (
            tiles.granularity, jnp.float32, True
        )  # fmt: skip
        assert isinstance(source, Produced)
        assert source.prologue == x.prologue
        shapes = (x.shape, tuple(each.shape for each in x.operands))
        assert (source.shape, tuple(each.shape for each in source.operands)) == shapes
        assert got_cast is cast
        assert (scales[1].multiplier.shape, scales[1].scale.dtype) == ((), jnp.float32)
        assert number == 3
        assert type(number) is int
        assert array.shape == X.shape
        assert kwargs == {"key": None, "how": {"by": "name"}}
    # Each argument is where it was.
    total = lambda q, x, *, by: q.values.astype(jnp.float32).sum() + by * value_of(x).sum()
    wanted = total(tiles, x, by=7.0)
    assert _on_cuda(total, lambda like, *a, **k: total(*a, **k), tiles, x, by=7.0) == wanted


def test_without_arrays():
    assert _on_cuda(lambda n: jnp.float32(n), lambda like, n: jnp.float32(-n), 3) == -3


def test_what_a_kernel_cannot_do():
    def cannot(x):
        raise NotImplementedError("needs a Hopper")

    called = []
    for wrap in (lambda f: f, jax.jit, jax.vmap):
        with pytest.raises(NotImplementedError, match="needs a Hopper"):
            wrap(lambda x: _on_cuda(cannot, lambda like, x: called.append(x), x))(X)
    assert not called


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (lambda like, x: (x, x), AssertionError),
        (lambda like, x: (x,), AssertionError),
        (lambda like, x: x[:2], TypeError),
        (lambda like, x: x.astype(jnp.bfloat16), TypeError),
    ],
    ids=["more", "a tuple", "shape", "dtype"],
)
def test_results_of_another_kind_are_a_bug(other, error):
    with pytest.raises(error):
        jax.jit(functools.partial(_on_cuda, sines, other))(X)


def test_under_vmap():
    run = functools.partial(_on_cuda, sines, cosines, times=2.0)
    x, y = X.reshape(2, 4), jnp.array([1.0, 2.0, 3.0, 4.0])
    wanted = 2 * np.cos(np.asarray(x) + np.asarray(y))
    np.testing.assert_allclose(jax.vmap(run, (0, None))(x, y), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(run, (1, 0), 1))(x, y), wanted, rtol=1e-6)
    text = text_for("cuda", jax.vmap(run, (0, None)), x, y)
    assert "stablehlo.sine " in text
    assert "stablehlo.cosine " not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_results_vary_alike(check_vma):
    """A kernel's result varies over all axes that an operand varies over. XLA's may not."""
    first = lambda like, x, y: jnp.cos(x)
    constant = lambda like, x, y: jnp.zeros(like.shape, like.dtype)
    x, y = jnp.arange(8.0), jnp.arange(32.0).reshape(4, 8)
    for elsewhere, wanted in ((first, np.cos(x)), (constant, np.zeros(8))):
        run = jax.shard_map(
            lambda x, y, elsewhere=elsewhere: _on_cuda(sines, elsewhere, x, y[0])[None],
            mesh=mesh_of(AxisType.Auto),
            in_specs=(P("b"), P("a", "b")),
            out_specs=P("a", "b"),
            check_vma=check_vma,
        )
        got = jax.jit(run)(x, y)
        np.testing.assert_allclose(got, np.broadcast_to(wanted, (4, 8)), rtol=1e-6)


@pytest.mark.parametrize("is_set", [True, False])
def test_in_an_explicit_mesh_results_are_split_alike(is_set):
    constant = lambda like, x: jnp.ones(like.shape, like.dtype)
    mesh = mesh_of(AxisType.Explicit)
    x = jax.device_put(X.reshape(4, 2), NamedSharding(mesh, P("a", "b")))
    for elsewhere, wanted in ((cosines, np.cos(X).reshape(4, 2)), (constant, np.ones((4, 2)))):
        run = jax.jit(functools.partial(_on_cuda, sines, elsewhere))
        if is_set:
            with jax.set_mesh(mesh):
                got = run(x)
        else:
            got = run(x)
        assert jax.typeof(got).sharding.spec == P("a", "b")
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_one_exported_program_for_two_platforms():
    run = jax.jit(functools.partial(_on_cuda, sines, cosines))
    exported = export.export(run, platforms=["cpu", "cuda"])(X)
    assert exported.platforms == ("cpu", "cuda")
    for operation in ("sine", "cosine"):
        assert f"stablehlo.{operation} " in exported.mlir_module()
    np.testing.assert_allclose(exported.call(X), np.cos(X), rtol=1e-6)


# What XLA has in place of a kernel's extra results.


@pytest.mark.parametrize("shape", [(256, 384), (2, 160, 224), (3, 2, 32, 96)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_extras(shape, dtype):
    x = np.random.default_rng(0).integers(-9, 10, shape).astype(dtype)
    tiles = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    like = CastExtras(
        largest=jax.ShapeDtypeStruct(tiles, jnp.float32),
        column_sums=jax.ShapeDtypeStruct((*shape[:-2], 3, shape[-1]), jnp.float32),
    )
    given = jax.jit(lambda x: CastExtras.of(x, like))(x)
    assert types(given) == like
    wide = np.asarray(x, np.float32)
    np.testing.assert_array_equal(np.max(given.largest), np.abs(wide).max())
    np.testing.assert_array_equal(np.sum(given.column_sums, -2), wide.sum(-2))
    assert CastExtras.of(x, CastExtras()) == CastExtras()


def test_sums_of_columns_are_in_float32():
    like = CastExtras(column_sums=jax.ShapeDtypeStruct((1, 2), jnp.float32))
    ones = jnp.ones((4097, 2), jnp.bfloat16)
    np.testing.assert_array_equal(CastExtras.of(ones, like).column_sums, np.full((1, 2), 4097.0))
