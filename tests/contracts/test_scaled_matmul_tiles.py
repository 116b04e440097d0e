"""What every backend of the scaled matmul has to do with operands in tiles.

A float64 product of what they stand for.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from contracts.test_scaled_matmul_backends import CLOSE, dequantized, distance, product
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8.kernels.scaled_matmul._api import BACKENDS

# Mosaic's has to be interpreted, with tiles of 128: kernels/scaled_matmul/test_mosaic_matmul.py.
HERE = [name for name in BACKENDS if name != "mosaic"]

# Blackwell's backend wants its chip named; on a CPU the same call takes the path of XLA's blocks.
CHIP = {"cudnn": "b200"}


def kernels_of(backend) -> fp8.Kernels:
    """Those whose matmuls are this backend's."""
    return fp8.Kernels(CHIP.get(backend), matmuls=backend)


M, K, N = 150, 300, 140  # ragged in tiles of 128 and of 32
SCALES = {"float32": {}, "power of two": {"power_of_two": True}, "E8M0": {"scale_format": fp8.E8M0}}
MATRICES = (((1,), (0,)), ((), ()))
FORMATS = {"E5M2 x E4M3": (fp8.E5M2, fp8.E4M3), "E4M3 x E5M2": (fp8.E4M3, fp8.E5M2)}

# The three matmuls of [M, K] @ [K, N]: shapes of lhs and rhs, what is contracted; and the tiles
# that recipes give them.
MATMULS = {
    "fprop": ((M, K), (K, N), MATRICES),
    "dgrad": ((M, N), (K, N), (((1,), (1,)), ((), ()))),
    "wgrad": ((M, K), (M, N), (((0,), (0,)), ((), ()))),
}
TILES = {
    "fprop 1D x 2D": lambda T: ((1, T), (T, T)),
    "fprop 1D x 1D": lambda T: ((1, T), (T, 1)),
    "fprop 2D x 1D": lambda T: ((T, T), (T, 1)),
    "dgrad 1D x 2D": lambda T: ((1, T), (T, T)),
    "dgrad 1D x 1D": lambda T: ((1, T), (1, T)),
    "wgrad 1D x 1D": lambda T: ((T, 1), (T, 1)),
    "wgrad 2D x 1D": lambda T: ((T, T), (T, 1)),
}

quantize = jax.jit(
    fp8.quantize, static_argnums=(1, 2), static_argnames=("power_of_two", "scale_format")
)


def made(values, scale, granularity, exact, format=fp8.E4M3, dtype=jnp.float32) -> QuantizedTensor:
    """A tensor of these values and scales (E8M0 as bytes), without compiling a quantizer for it."""
    scale = scale.view(ml_dtypes.float8_e8m0fnu) if scale.dtype == np.uint8 else scale
    values = np.asarray(values, np.float32).astype(format.dtype)
    return QuantizedTensor(*jax.device_put((values, scale)), granularity, jnp.dtype(dtype), exact)


def tensor(seed, shape, granularity, scales, **fields) -> QuantizedTensor:
    """Any values, under scales that all differ: one at the wrong place shows."""
    random = np.random.default_rng(seed)
    cells = granularity.scale_shape(shape)
    exponents = random.integers(-9, 9, cells)
    scale = {
        "float32": np.ldexp(random.uniform(1, 2, cells), exponents).astype(np.float32),
        "power of two": np.ldexp(np.float32(1), exponents),
        "E8M0": (127 + exponents).astype(np.uint8),
    }[scales]
    scale = np.asarray(scale)  # NumPy makes a number of an array without axes
    return made(
        np.clip(60 * random.standard_normal(shape), -400, 400),
        scale,
        granularity,
        scales != "float32",
        **fields,
    )


def tensors(shapes, tiles, scales, **fields) -> list[QuantizedTensor]:
    return [
        tensor(i, shape, fp8.PerBlock(tile), scales, **fields)
        for i, (shape, tile) in enumerate(zip(shapes, tiles, strict=True))
    ]


def multiply(lhs, rhs, backend, dimension_numbers=MATRICES, **options):
    """Compiled, as in a layer; what a backend says that it cannot do is skipped."""
    options = {
        "kernels": kernels_of(backend),
        "dimension_numbers": dimension_numbers,
    } | options
    try:
        return jax.jit(lambda lhs, rhs: fp8.scaled_matmul(lhs, rhs, **options))(lhs, rhs)
    except NotImplementedError as reason:
        if backend != "cudnn":
            raise
        pytest.skip(str(reason))


def some(table, scales=SCALES, fast=("float32", "E8M0")):
    """Every member, kind of scale and backend.

    In the default suite XLA's with the kinds that share least, the rest slow.
    """
    for member, kind, backend in itertools.product(table, scales, HERE):
        marks = () if backend == "xla" and kind in fast else (pytest.mark.slow,)
        yield pytest.param(member, kind, backend, id=f"{member}-{kind}-{backend}", marks=marks)


def pairs():
    """What blockwise and mxfp8 multiply, each by the backends that are theirs.

    The rest of the product is slow.
    """
    for pair, T, scales, backend in itertools.product(TILES, (128, 32), SCALES, HERE):
        ours = (T == 32) == (scales == "E8M0") and (
            backend == "xla" or (pair, scales) == ("fprop 1D x 2D", "E8M0")
        )
        # Bytes and powers of two are one path, float32 scales another.
        ours = ours and (scales != "power of two" or pair in ("dgrad 1D x 2D", "wgrad 2D x 1D"))
        marks = () if ours else (pytest.mark.slow,)
        yield pytest.param(
            pair, T, scales, backend, id=f"{pair} {T}-{scales}-{backend}", marks=marks
        )


@pytest.mark.parametrize(("pair", "T", "scales", "backend"), list(pairs()))
def test_pairs(pair, T, scales, backend):
    *shapes, dimension_numbers = MATMULS[pair.split()[0]]
    lhs, rhs = tensors(shapes, TILES[pair](T), scales)
    y = multiply(lhs, rhs, backend, dimension_numbers)
    assert y.dtype == jnp.float32
    assert distance(y, product(lhs, rhs, dimension_numbers)) <= CLOSE


@pytest.mark.parametrize(("mixed", "scales", "backend"), list(some(FORMATS, fast=("float32",))))
def test_formats(mixed, scales, backend):
    lhs = tensor(0, (40, 70), fp8.PerBlock((1, 32)), scales, format=FORMATS[mixed][0])
    rhs = tensor(1, (70, 50), fp8.PerBlock((32, 32)), scales, format=FORMATS[mixed][1])
    assert distance(multiply(lhs, rhs, backend), product(lhs, rhs)) <= CLOSE


# shapes of lhs and rhs, tiles (aligned with the trailing axes), dimension numbers
GEOMETRIES = {
    "vectors": ((100,), (100,), (32,), (32,), (((0,), (0,)), ((), ()))),
    "matrix and vector": ((3, 100), (100,), (1, 32), (32,), (((1,), (0,)), ((), ()))),
    "vector and matrix": ((100,), (100, 40), (32,), (32, 32), (((0,), (0,)), ((), ()))),
    "three axes": ((2, 3, 100), (100, 40), (1, 32), (32, 32), (((2,), (0,)), ((), ()))),
    "whole tiles": ((64, 64), (64, 32), (1, 32), (32, 32), MATRICES),
    "shorter than a tile": ((5, 7), (7, 3), (1, 32), (32, 32), MATRICES),
    "one row, one column": ((1, 100), (100, 1), (1, 32), (32, 1), MATRICES),
    "batch": ((4, 3, 70), (4, 70, 40), (1, 32), (32, 32), (((2,), (1,)), ((0,), (0,)))),
    "batch in the middle": (
        (3, 4, 70),
        (70, 40, 4),
        (1, 1, 32),
        (32, 32, 1),
        (((2,), (0,)), ((1,), (2,))),
    ),
    "two batches, crossed": (
        (2, 4, 3, 70),
        (4, 5, 2, 70),
        (1, 32),
        (1, 32),
        (((3,), (3,)), ((0, 1), (2, 0))),
    ),
    "two contracted, outer first": (
        (6, 3, 70),
        (3, 70, 40),
        (1, 1, 32),
        (1, 32, 32),
        (((1, 2), (0, 1)), ((), ())),
    ),
    "two contracted, inner first": (
        (6, 3, 70),
        (3, 70, 40),
        (1, 1, 32),
        (1, 32, 32),
        (((2, 1), (1, 0)), ((), ())),
    ),
    "contracted first": ((100, 3), (100, 5), (32, 1), (32, 1), (((0,), (0,)), ((), ()))),
    "square tiles on axes apart": (
        (3, 70),
        (40, 2, 70),
        (1, 32),
        (32, 1, 32),
        (((1,), (2,)), ((), ())),
    ),
}


@pytest.mark.parametrize(
    ("geometry", "scales", "backend"), list(some(GEOMETRIES, fast=("float32",)))
)
def test_geometries(geometry, scales, backend):
    *parts, dimension_numbers = GEOMETRIES[geometry]
    lhs, rhs = tensors(parts[:2], parts[2:], scales)
    y, exact = multiply(lhs, rhs, backend, dimension_numbers), product(lhs, rhs, dimension_numbers)
    assert y.shape == exact.shape
    assert distance(y, exact) <= CLOSE


@pytest.mark.parametrize(
    ("shapes", "scales", "backend"),
    list(some([((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0))], fast=("float32",))),
)
def test_empty(shapes, scales, backend):
    y = multiply(*tensors(shapes, ((1, 32), (32, 1)), scales), backend)
    np.testing.assert_array_equal(
        y, np.zeros((shapes[0][0], shapes[1][1]), np.float32), strict=True
    )


# Scales that are one for the whole contracted axis go with tiles.
PARTNERS = {
    "per tensor": (fp8.PerTensor(), fp8.PerTensor()),
    "per row": (fp8.PerAxis(0), fp8.PerAxis(1)),
}


@pytest.mark.parametrize(
    ("partner", "of_partner"), [("per tensor", "float32"), ("per row", "power of two")]
)
@pytest.mark.parametrize(
    ("side", "scales"),
    [
        pytest.param(side, kind, marks=() if kind in of_side else pytest.mark.slow)
        for side, of_side in enumerate((("float32", "E8M0"), ("float32",)))
        for kind in SCALES
    ],
)
def test_partners(side, partner, scales, of_partner):
    """The tiles are in lhs or rhs. cuDNN's backend leaves them to XLA's."""
    granularities, kinds = list(PARTNERS[partner]), [of_partner] * 2
    granularities[side], kinds[side] = fp8.PerBlock(((1, 32), (32, 32))[side]), scales
    lhs, rhs = (
        tensor(i, shape, granularities[i], kinds[i]) for i, shape in enumerate(((9, 70), (70, 40)))
    )
    y = jax.jit(functools.partial(fp8.scaled_matmul, kernels=fp8.Kernels("b200")))(lhs, rhs)
    assert distance(y, product(lhs, rhs)) <= CLOSE


@pytest.mark.parametrize(
    ("dtype", "scales", "backend"), list(some(("bfloat16", "float16", "float32"), fast=("E8M0",)))
)
def test_dtypes(dtype, scales, backend):
    lhs, rhs = tensors(((8, 70), (70, 40)), ((1, 32), (32, 32)), scales, dtype=dtype)
    # By a power of two, so that float16 holds the result.
    values = np.asarray(lhs.values)
    values = (values.astype(np.float32) * np.float32(2.0**-7)).astype(values.dtype)
    lhs = dataclasses.replace(lhs, values=jax.device_put(values))
    full = multiply(lhs, rhs, backend, preferred_element_type=jnp.float32)
    y = multiply(lhs, rhs, backend)
    assert (y.dtype, full.dtype) == (dtype, jnp.float32)
    with np.errstate(over="ignore"):  # float16 has an end
        np.testing.assert_array_equal(y, np.asarray(full).astype(y.dtype))


@pytest.mark.parametrize(
    ("axes", "scales", "backend"),
    list(some([(0, 0), (0, None), (None, 0)], fast=("float32",))),
)
def test_vmap(axes, scales, backend):
    """Experts: both tensors stacked, or one of them."""
    kinds = (((9, 70), fp8.PerBlock((1, 32))), ((70, 40), fp8.PerBlock((32, 32))))
    experts = [
        [tensor(2 * i + side, *kind, scales) for side, kind in enumerate(kinds)] for i in range(3)
    ]
    stacked = [
        jax.tree.map(lambda *leaves: np.stack(leaves), *of_side) if axis == 0 else of_side[0]
        for of_side, axis in zip(zip(*experts, strict=True), axes, strict=True)
    ]
    run = jax.vmap(lambda lhs, rhs: multiply(lhs, rhs, backend), in_axes=axes)
    for i, y in enumerate(np.asarray(jax.jit(run)(*stacked))):
        lhs, rhs = (experts[i if axis == 0 else 0][side] for side, axis in enumerate(axes))
        assert distance(y, product(lhs, rhs)) <= CLOSE


def test_a_transposed_2d_tensor_serves_the_other_direction():
    g, w = tensors(((9, 40), (70, 40)), ((1, 32), (32, 32)), "float32")
    want = multiply(g, w, "xla", (((1,), (1,)), ((), ())))
    np.testing.assert_array_equal(multiply(g, w.T, "xla"), want)
    assert distance(want, dequantized(g) @ dequantized(w).T) <= CLOSE


ERRORS = {
    "2D x 2D": (((4, 64), (32, 32)), ((64, 5), (32, 32)), fp8.E4M3, "both in 2D tiles"),
    "E5M2 x E5M2": (((4, 64), (1, 32)), ((64, 5), (32, 1)), fp8.E5M2, "both E5M2"),
    "other tiles": (
        ((4, 64), (1, 32)),
        ((64, 5), (16, 1)),
        fp8.E4M3,
        r"tiles of \[32\] along its contracted axes",
    ),
    "kept axis only, lhs": (
        ((64, 64), (32, 1)),
        ((64, 5), (32, 1)),
        fp8.E4M3,
        "lhs.*Quantize it in the other direction",
    ),
    "kept axis only, rhs": (
        ((4, 64), (1, 32)),
        ((64, 64), (1, 32)),
        fp8.E4M3,
        "rhs.*Quantize it in the other direction",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors(backend, error):
    (lhs_shape, lhs_tile), (rhs_shape, rhs_tile), format, message = ERRORS[error]
    lhs, rhs = tensors((lhs_shape, rhs_shape), (lhs_tile, rhs_tile), "power of two", format=format)
    with pytest.raises(ValueError, match=message):
        fp8.scaled_matmul(lhs, rhs, kernels=kernels_of(backend))


@pytest.mark.parametrize("chip", [None, "h200"])
def test_a_chip_without_a_block_scaled_matmul_is_refused_by_name(chip):
    lhs, rhs = tensors(((2, 64), (64, 5)), ((1, 32), (32, 1)), "E8M0")
    with pytest.raises(ValueError, match=mentions(f"'cudnn' is made for Blackwell, but {chip=}")):
        fp8.Kernels(chip, matmuls="cudnn")
    y = multiply(lhs, rhs, None, kernels=fp8.Kernels(chip))
    assert distance(y, product(lhs, rhs)) <= CLOSE


# What an Explicit mesh of 4 x 2 splits of lhs [8, 256] and rhs [256, 64].
SPLITS = {
    "kept": (jax.P("data", None), jax.P(None, "tp")),
    "contracted": (jax.P("data", "tp"), jax.P("tp", None)),
}


ON_EXPLICIT = {
    ("float32", "kept", None),
    ("float32", "contracted", None),
    ("power of two", "contracted", None),
    ("E8M0", "kept", "b200"),
    ("E8M0", "contracted", "b200"),
}


@pytest.mark.parametrize(
    ("scales", "split", "chip"),
    [
        pytest.param(*row, marks=() if row in ON_EXPLICIT else pytest.mark.slow)
        for row in itertools.product(SCALES, SPLITS, (None, "b200"))
    ],
)
def test_explicit_meshes(scales, split, chip):
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    given = tensors(((8, 256), (256, 64)), ((1, 32), (32, 32)), scales)
    out = jax.P("data", "tp" if split == "kept" else None)
    with jax.set_mesh(mesh):
        lhs, rhs = (
            jax.tree.map(
                lambda leaf, spec=spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)), tensor
            )
            for tensor, spec in zip(given, SPLITS[split], strict=True)
        )
        kernels = fp8.Kernels(chip)
        run = jax.jit(
            lambda lhs, rhs: fp8.scaled_matmul(lhs, rhs, out_sharding=out, kernels=kernels)
        )
        if (scales, split) == ("float32", "contracted"):
            with pytest.raises(
                ValueError, match=r"an Explicit mesh splits over 'tp'.*Use power_of_two=True"
            ):
                run(lhs, rhs)
            return
        y = run(lhs, rhs)
    assert jax.typeof(y).sharding.spec == out
    assert distance(y, product(*given)) <= CLOSE
