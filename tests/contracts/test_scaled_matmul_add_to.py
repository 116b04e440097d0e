"""C + product: every backend adds in float32 and rounds once; Mosaic's is interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import quantized
from contracts.test_scaled_matmul_backends import distance, product
from contracts.test_scaled_matmul_tiles import kernels_of, made, tensors
from hard_inputs import mentions
from interpreter import interpreted, needs_mosaic

import jaxfp8 as fp8
from jaxfp8._geometry import Geometry
from jaxfp8.kernels.scaled_matmul._call import MatmulCall

BACKENDS = ("xla", "reference", "cudnn")
MATRICES = (((1,), (0,)), ((), ()))
TILES = {
    "tiles of 128": ((1, 128), (128, 128)),
    "tiles of 32": ((1, 32), (32, 32)),
    "1x32": ((1, 32), (32, 1)),
}
M, K, N = 70, 200, 36


def integers(seed, shape, granularity):
    """Whose products are exact in float32, and their sums; not so in bfloat16."""
    random = np.random.default_rng(seed)
    scale = np.ldexp(np.float32(1), random.integers(-2, 3, granularity.scale_shape(shape)))
    return made(random.integers(-8, 9, shape), np.asarray(scale), granularity, True)


def operands(kind, shapes=((M, K), (K, N))):
    granularities = (
        map(fp8.PerBlock, TILES[kind]) if kind in TILES else (fp8.PerAxis(0), fp8.PerAxis(1))
    )
    return [
        integers(i, shape, g)
        for i, (shape, g) in enumerate(zip(shapes, granularities, strict=True))
    ]


def addend(dtype, *shape):
    """Whole numbers, about as large as the product."""
    values = np.random.default_rng(2).integers(-200, 200, shape or (M, N)).astype(np.float32)
    return jax.device_put(values.astype(dtype))


def exact(lhs, rhs, add_to, out, dimension_numbers=MATRICES):
    whole = np.asarray(add_to, np.float64) + product(lhs, rhs, dimension_numbers)
    return whole.astype(np.float32).astype(out)


# C's dtype, the one asked for, the result's
DTYPES = [
    (jnp.float32, None, jnp.float32),
    (jnp.bfloat16, None, jnp.bfloat16),
    (jnp.float32, jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32, jnp.float32),
]


def multiply(lhs, rhs, add_to, backend, **options):
    options = {"kernels": kernels_of(backend)} | options
    return jax.jit(lambda lhs, rhs, c: fp8.scaled_matmul(lhs, rhs, add_to=c, **options))(
        lhs, rhs, add_to
    )


@pytest.mark.parametrize(("given", "asked", "out"), DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_added_before_the_one_rounding(backend, given, asked, out):
    lhs, rhs = operands("tiles of 32")
    y = multiply(lhs, rhs, addend(given), backend, preferred_element_type=asked)
    np.testing.assert_array_equal(y, exact(lhs, rhs, addend(given), out), strict=True)


@needs_mosaic
@pytest.mark.parametrize(
    ("kind", "fast", "dtypes"),
    [
        ("tiles of 128", False, 0),
        ("rows", True, 1),
        ("tiles of 32", False, 2),
        pytest.param("rows", False, 3, marks=pytest.mark.slow),
        pytest.param("1x32", False, 0, marks=pytest.mark.slow),
    ],
)
def test_in_the_kernel(kind, fast, dtypes):
    (lhs, rhs), (given, asked, out) = operands(kind), DTYPES[dtypes]
    y = interpreted(
        lambda *all: multiply(*all, "mosaic", preferred_element_type=asked, fast_accumulation=fast),
        lhs,
        rhs,
        addend(given),
    )
    np.testing.assert_array_equal(y, exact(lhs, rhs, addend(given), out), strict=True)


@needs_mosaic
def test_in_the_kernel_with_several_tiles_and_experts():
    """Ragged and in place; each warpgroup brings several parts of C for each of several tiles."""
    from jaxfp8.kernels.scaled_matmul.hopper import _door as _mosaic
    from jaxfp8.kernels.scaled_matmul.hopper._tiling import Tiling

    shapes, numbers = ((2, 136, 130), (2, 130, 136)), (((2,), (1,)), ((0,), (0,)))
    lhs, rhs = operands("tiles of 128", shapes)
    c = addend(jnp.float32, 2, 136, 136)
    call = MatmulCall(geometry=Geometry.of(numbers, 3, 3), out_dtype=jnp.dtype(jnp.float32))
    tiling = Tiling(rows=128, columns=64, stages=2, blocks=3)
    multiply = functools.partial(_mosaic.scaled_matmul, call=call, tiling=tiling)
    y = interpreted(jax.jit(lambda lhs, rhs, c: multiply(lhs, rhs, add_to=c)), lhs, rhs, c)
    np.testing.assert_array_equal(y, exact(lhs, rhs, c, jnp.float32, numbers))


@pytest.mark.parametrize("backend", ["xla", pytest.param("mosaic", marks=needs_mosaic)])
def test_vmap(backend):
    lhs, rhs = tensors(((2 * 9, 150), (150, 40)), ((1, 32), (32, 32)), "E8M0")
    c = addend(jnp.float32, 2, 9, 40)
    parts = [jax.tree.map(lambda leaf, i=i: leaf[9 * i : 9 * i + 9], lhs) for i in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    call = jax.vmap(lambda lhs, c: multiply(lhs, rhs, c, backend))
    y = interpreted(call, stacked, c) if backend == "mosaic" else call(stacked, c)
    for i in (0, 1):
        assert distance(y[i], np.asarray(c[i], np.float64) + product(parts[i], rhs)) <= 2e-6


@pytest.mark.parametrize(
    ("add_to", "error", "message"),
    [
        (
            jnp.zeros((M, N + 1)),
            ValueError,
            r"add_to has shape \[70, 37\], but the product .* has \[70, 36\]: give it",
        ),
        (jnp.zeros((M, N), jnp.int32), TypeError, r"add_to has dtype int32. Cast it to one of"),
        (1.0, TypeError, r"add_to is of type float; pass an array of shape \[70, 36\]"),
        (
            quantized(jnp.zeros((M, N))),
            TypeError,
            r"add_to is of type QuantizedTensor; pass an array",
        ),
    ],
    ids=["shape", "dtype", "number", "quantized"],
)
def test_errors(add_to, error, message):
    with pytest.raises(error, match=message):
        fp8.scaled_matmul(*operands("rows"), add_to=add_to)


def test_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    lhs, rhs = operands("rows", ((64, K), (K, N)))
    c = addend(jnp.bfloat16, 64, N)
    with jax.set_mesh(mesh):
        lhs_there, c_there = jax.device_put((lhs, c), jax.NamedSharding(mesh, jax.P("data", None)))
        y = multiply(lhs_there, rhs, c_there, "xla")
    np.testing.assert_array_equal(y, exact(lhs, rhs, c, jnp.bfloat16))


@needs_mosaic
def test_the_kernel_leaves_an_explicit_mesh_of_one_device_to_others():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    lhs, rhs = operands("rows", ((64, K), (K, N)))
    c = addend(jnp.bfloat16, 64, N)
    with jax.set_mesh(mesh):
        lhs, rhs, there = jax.device_put((lhs, rhs, c), jax.NamedSharding(mesh, jax.P()))
        with pytest.raises(NotImplementedError, match=mentions("add_to is given in", "Explicit")):
            multiply(lhs, rhs, there, "mosaic")
        y = multiply(lhs, rhs, there, None)
    np.testing.assert_array_equal(y, exact(lhs, rhs, c, jnp.bfloat16))
