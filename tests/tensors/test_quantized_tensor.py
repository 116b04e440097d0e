import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import DTYPES, hard_arrays, mentions
from hard_tiles import scale_of

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import validate

# As one program: eager code is a dozen for each shape.
quantize = jax.jit(
    fp8.quantize, static_argnums=(1, 2), static_argnames=("scale_format", "power_of_two")
)
dequantize = jax.jit(lambda q: q.dequantize())

PER_AXIS = [fp8.PerTensor(), fp8.PerAxis(0), fp8.PerAxis(1, -1)]


@pytest.fixture
def tensor():
    x = np.random.default_rng(0).standard_normal((3, 3, 3)).astype(np.float32)
    return lambda granularity: quantize(x, fp8.E4M3, granularity)


@pytest.mark.parametrize("permutation", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("granularity", PER_AXIS, ids=repr)
def test_transpose_is_exact(tensor, granularity, permutation):
    @jax.jit
    def run(q):
        transposed, wide = q.transpose(*permutation), q.dequantize()
        how = {"scale": transposed.scale}
        again = fp8.quantize(wide.transpose(permutation), fp8.E4M3, transposed.granularity, **how)
        return transposed, again, transposed.dequantize(), wide

    transposed, again, got, wide = run(tensor(granularity))
    validate(transposed)
    np.testing.assert_array_equal(got, np.asarray(wide).transpose(permutation))
    # It equals the quantized transpose, to the bit.
    np.testing.assert_array_equal(again.values, transposed.values)
    np.testing.assert_array_equal(again.scale, transposed.scale)


def test_T(tensor):
    q = tensor(fp8.PerAxis(0))
    assert q.T.shape == (3, 3, 3)
    assert q.T.granularity == fp8.PerAxis(2)
    assert q.T.T.granularity == q.granularity


# Tiles

SCALES = {
    "float32": {},
    "E8M0": {"scale_format": fp8.E8M0},
}


def in_tiles(shape, tile, scales):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return x, quantize(x, fp8.E4M3, fp8.PerBlock(tile), **SCALES[scales])


TRANSPOSED = [
    ((50, 70), (32, 32), (1, 0)),
    ((50, 70), (32, 16), (1, 0)),
    ((2, 50, 70), (32, 32), (0, 2, 1)),
    ((2, 50, 70), (32, 32), (2, 1, 0)),
    ((2, 3, 40), (1, 32), (1, 0, 2)),  # leading axes may move
    ((2, 40, 3), (32, 1), (0, 1, 2)),
]


@pytest.mark.parametrize(
    ("shape", "tile", "permutation", "scales"),
    [
        # A transpose moves scales, whatever they are: one shape shows the other kind.
        pytest.param(*case, scales, marks=pytest.mark.slow if i and scales == "float32" else ())
        for i, case in enumerate(TRANSPOSED)
        for scales in SCALES
    ],
    ids=str,
)
def test_transpose_of_tiles_is_exact(shape, tile, permutation, scales):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    back = tuple(int(axis) for axis in np.argsort(permutation))

    @jax.jit
    def run(x):
        q = fp8.quantize(x, fp8.E4M3, fp8.PerBlock(tile), **SCALES[scales])
        transposed = q.transpose(*permutation)
        again = fp8.quantize(
            x.transpose(permutation), fp8.E4M3, transposed.granularity, **SCALES[scales]
        )
        wide = transposed.dequantize(), q.dequantize()
        return q, transposed, again, transposed.transpose(*back), wide

    q, transposed, again, returned, wide = run(x)
    validate(transposed)
    np.testing.assert_array_equal(wide[0], np.asarray(wide[1]).transpose(permutation))
    # It equals the transpose quantized, to the bit.
    np.testing.assert_array_equal(oracle.codes(again.values), oracle.codes(transposed.values))
    np.testing.assert_array_equal(scale_of(again), scale_of(transposed))
    assert transposed.power_of_two == q.power_of_two
    assert jax.tree.structure(returned) == jax.tree.structure(q)
    np.testing.assert_array_equal(oracle.codes(returned.values), oracle.codes(q.values))


@pytest.mark.parametrize(
    ("shape", "tile", "permutation"),
    [
        ((50, 70), (1, 32), (1, 0)),
        ((50, 70), (32, 1), (1, 0)),
        ((2, 50, 70), (1, 32), (0, 2, 1)),
        ((2, 3, 40), (1, 32), (2, 0, 1)),
    ],
    ids=str,
)
def test_tiles_along_one_axis_are_not_transposed(shape, tile, permutation):
    _, q = in_tiles(shape, tile, "E8M0")
    for transpose in (lambda q: q.transpose(*permutation), lambda q: q.T):
        with pytest.raises(
            ValueError,
            match=mentions(str(tile), "cannot be transposed", "both directions", "fp8.quantize(x"),
        ):
            transpose(q)


def test_dequantize_the_smallest_scale():
    # 2^-127 is subnormal, and flushed by CPUs and GPUs; what it scales is not.
    x = np.array([[oracle.TINY, -3 * oracle.TINY, 96 * oracle.TINY, 0.0]], np.float32)
    q = quantize(x, fp8.E4M3, fp8.PerBlock((1, 32)), scale_format=fp8.E8M0)
    assert scale_of(q) == 0
    y = np.asarray(dequantize(q))
    np.testing.assert_array_equal(y[0, :3], [oracle.TINY, -3 * oracle.TINY, 96 * oracle.TINY])


def test_dequantize_a_scale_that_is_nan():
    x = np.ones((1, 64), np.float32)
    x[0, 40] = np.inf
    y = dequantize(quantize(x, fp8.E4M3, fp8.PerBlock((1, 32)), scale_format=fp8.E8M0))
    np.testing.assert_array_equal(y, np.repeat([[1.0, np.nan]], 32, axis=1))


@pytest.mark.parametrize(
    "permutation", [(0, 1), (0, 0, 1), (0, 1, 3), (-1, 0, 1), ((2, 1, 0),)], ids=str
)
def test_what_is_no_permutation(tensor, permutation):
    with pytest.raises(
        ValueError, match=mentions("permutation", str(permutation), "3 axes", "(3, 3, 3)")
    ):
        tensor(fp8.PerTensor()).transpose(*permutation)


@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=repr)
@pytest.mark.parametrize("power_of_two", [False, True], ids=["float32", "power_of_two"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_is_finite_where_x_is(dtype, power_of_two, format):
    # 65504 in float16, rounded up to 8 bits, stands for 65536.
    for name, x in hard_arrays(DTYPES[dtype]).items():
        q = quantize(x, format, power_of_two=power_of_two)
        y = dequantize(q)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(x), err_msg=name)
        # One product in float32, one rounding to the dtype; the limits of the dtype where that
        # overflows.
        with np.errstate(over="ignore", invalid="ignore"):
            product = np.asarray(q.values).astype(np.float32) * np.asarray(q.scale)
            exact = np.clip(
                product, -float(jnp.finfo(x.dtype).max), float(jnp.finfo(x.dtype).max)
            ).astype(x.dtype)
        y, exact = (np.asarray(z).astype(np.float32) for z in (y, exact))
        normal = ~(np.abs(exact) < oracle.TINY)
        np.testing.assert_array_equal(y[normal], exact[normal], err_msg=name)


def test_dequantize_into_another_dtype(tensor):
    q = tensor(fp8.PerAxis(0))
    assert q.dequantize(jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(q.dequantize(jnp.bfloat16), q.dequantize().astype(jnp.bfloat16))


def test_infinities_of_others_stay():
    q = fp8.QuantizedTensor(
        jnp.array([jnp.inf, -jnp.inf, 1.0], jnp.float8_e5m2),
        jnp.float32(2.0),
        fp8.PerTensor(),
        jnp.dtype("float32"),
    )
    np.testing.assert_array_equal(q.dequantize(), [np.inf, -np.inf, 2.0])


def test_pytree(tensor):
    q = tensor(fp8.PerAxis(0))
    leaves, structure = jax.tree.flatten(q)
    assert [leaf.dtype for leaf in leaves] == [jnp.float8_e4m3fn, jnp.float32]
    assert jax.tree.unflatten(structure, leaves).granularity == q.granularity
    # A tree of shapes is none of arrays, and no error.
    assert jax.tree.map(lambda leaf: leaf.shape, q).values == (3, 3, 3)
    assert jax.jit(lambda q: q)(q).dtype == q.dtype
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.scale = None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"scale": jnp.ones(2)},
            ("scale float32[2]", "[3, 3, 3]", "PerAxis(0)", "float32[3, 1, 1]", "fp8.quantize"),
        ),
        (
            {"scale": jnp.ones((3, 1, 1), jnp.bfloat16)},
            ("scale bfloat16[3, 1, 1]", "need float32[3, 1, 1]", "fp8.quantize"),
        ),
        (
            {"granularity": fp8.PerTensor()},
            ("scale float32[3, 1, 1]", "PerTensor()", "need float32[]", "fp8.quantize"),
        ),
        (
            {"granularity": fp8.PerAxis(3)},
            ("granularity", "PerAxis(3)", "3 axes", "name each axis to keep once"),
        ),
        ({"values": jnp.ones((3, 3, 3))}, ("values", "float32", "float8_e4m3fn", "fp8.quantize")),
        (
            {"values": jnp.ones((3, 3, 3), jnp.float8_e8m0fnu)},
            ("values", "float8_e8m0fnu", "float8_e4m3fn", "fp8.quantize"),
        ),
    ],
    ids=["scale shape", "scale dtype", "granularity", "axis", "float32 values", "E8M0 values"],
)
def test_validate(tensor, change, parts):
    with pytest.raises(ValueError, match=mentions(*parts)):
        validate(dataclasses.replace(tensor(fp8.PerAxis(0)), **change))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"scale": jnp.ones((2, 2))},
            ("scale float32[2, 2]", "[50, 70]", "PerBlock(tile=(32, 32))", "float32[2, 3]", "E8M0"),
        ),
        (
            {"granularity": fp8.PerBlock((1, 32))},
            ("scale float8_e8m0fnu[2, 3]", "float32[50, 3]", "fp8.quantize"),
        ),
        ({"power_of_two": False}, ("E8M0 scales and power_of_two=False", "pass power_of_two=True")),
        (
            {"granularity": fp8.PerBlock((2, 2, 2))},
            ("PerBlock(tile=(2, 2, 2))", "2 axes", "each trailing axis"),
        ),
    ],
    ids=["scale shape", "granularity", "power_of_two", "rank"],
)
def test_validate_tiles(change, parts):
    _, q = in_tiles((50, 70), (32, 32), "E8M0")
    validate(q)
    with pytest.raises(ValueError, match=mentions(*parts)):
        validate(dataclasses.replace(q, **change))


def test_validate_an_array():
    with pytest.raises(TypeError, match=mentions("rhs", "ArrayImpl", "make one with fp8.quantize")):
        validate(jnp.ones(3), "rhs")


ARITHMETIC = {
    "negated": (jnp.negative, False, "positive"),
    "zeros": (jnp.zeros_like, False, "positive"),
    "scaled": (lambda x: 0.75 * x, True, "a power of two"),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_the_tree(tensor, name):
    """It changes values and scales. Every operation refuses such scales, unless they are traced."""
    change, power_of_two, kind = ARITHMETIC[name]
    q = dataclasses.replace(tensor(fp8.PerAxis(0)), power_of_two=power_of_two)
    if power_of_two:
        q = dataclasses.replace(q, scale=jnp.exp2(jnp.round(jnp.log2(q.scale))))
    changed = jax.tree.map(change, q)
    for operation in (fp8.QuantizedTensor.dequantize, validate):
        operation(q)
        with pytest.raises(ValueError, match=mentions("has the scale", f"must be {kind}", "cast")):
            operation(changed)
    jax.eval_shape(fp8.QuantizedTensor.dequantize, changed)
