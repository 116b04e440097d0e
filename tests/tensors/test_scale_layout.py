"""Scale layouts against formulas of indices, written one scale at a time."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxfp8 as fp8
from jaxfp8.tensors import BlackwellLayout, HopperLayout, matmul_ready
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

HOPPER, BLACKWELL = HopperLayout(), BlackwellLayout()


def pad(size, multiple):
    return math.ceil(size / multiple) * multiple


def hopper(scale, a, b, tile, contracted):
    """TransformerEngine's shapes, one scale at a time; `scale` [.., ] is compact, values are [A, B]."""
    cells_a, cells_b = math.ceil(a / 128), math.ceil(b / 128)
    if tile == (1, 128):
        ready = np.zeros((cells_b, pad(a, 4)), scale.dtype)
        for row, cell in np.ndindex(a, cells_b):
            ready[cell, row] = scale[row, cell]
    elif tile == (128, 1):
        ready = np.zeros((cells_a, pad(b, 4)), scale.dtype)
        for cell, column in np.ndindex(cells_a, b):
            ready[cell, column] = scale[cell, column]
    elif contracted == -1:
        ready = np.zeros((cells_a, pad(cells_b, 4)), scale.dtype)
        for i, j in np.ndindex(cells_a, cells_b):
            ready[i, j] = scale[i, j]
    else:
        ready = np.zeros((cells_b, pad(cells_a, 4)), scale.dtype)
        for i, j in np.ndindex(cells_a, cells_b):
            ready[j, i] = scale[i, j]
    return ready


def blackwell(scale, a, b, tile, contracted):
    """cuBLAS's offsets in memory, in blocks of 512: of row r and tile c, (r % 32) * 16 + (r // 32) * 4 + c inside a block."""
    rows, tiles = (a, math.ceil(b / 32)) if contracted == -1 else (b, math.ceil(a / 32))
    memory = np.zeros(pad(rows, 128) * pad(tiles, 4), scale.dtype)
    for row, cell in np.ndindex(rows, tiles):
        block = (row // 128) * (pad(tiles, 4) // 4) + cell // 4
        kept = row // 32 if tile == (32, 32) else row
        offset = (row % 32) * 16 + (row % 128) // 32 * 4 + cell % 4
        memory[block * 512 + offset] = scale[(kept, cell) if contracted == -1 else (cell, kept)]
    return memory.reshape(pad(rows, 128) // 128, pad(tiles, 4) // 4, 32, 4, 4)


# layout, its oracle, T, dtype of scales
LAYOUTS = {
    "hopper, float32": (HOPPER, hopper, 128, np.float32),
    "hopper, E8M0": (HOPPER, hopper, 128, np.uint8),
    "blackwell": (BLACKWELL, blackwell, 32, np.uint8),
}
TILES = {"row-wise": (0, 1, -1), "column-wise": (1, 0, -2), "square": (1, 1, -1), "square, column-wise": (1, 1, -2)}


def tensor(layout_name, tile_name, shape, seed=0):
    """A tensor of random bits, and its tile and contracted axis: all bytes but zero, NaN (255) among them."""
    _, _, size, dtype = LAYOUTS[layout_name]
    along_a, along_b, contracted = TILES[tile_name]
    tile = (size if along_a else 1, size if along_b else 1)
    granularity = fp8.PerBlock(tile)
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale_shape = granularity.scale_shape(shape)
    scale = rng.integers(1, 256, scale_shape, np.uint8)
    if dtype == np.float32:
        scale = rng.standard_normal(scale_shape).astype(np.float32)
    held = jnp.asarray(scale if dtype == np.float32 else scale.view(ml_dtypes.float8_e8m0fnu))
    q = QuantizedTensor(jnp.asarray(values), held, granularity, jnp.dtype(jnp.bfloat16), dtype == np.uint8)
    return q, scale, tile, contracted


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def check_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(bits(one), bits(other))


@functools.partial(jax.jit, static_argnums=(1, 2))  # one program for each shape, where eager code is a dozen
def there_and_back(q, layout, contracted):
    ready = matmul_ready(q, layout, contracted=contracted)
    return ready, ready.compact()


SIZES = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 127, 128, 129, 257, 300, 513]))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", LAYOUTS)
@hypothesis.given(a=SIZES, b=SIZES)
@hypothesis.settings(max_examples=6)
def test_layout(name, tiles, a, b):
    layout, oracle, _, _ = LAYOUTS[name]
    q, scale, tile, contracted = tensor(name, tiles, (a, b))
    ready, compact = there_and_back(q, layout, contracted)
    np.testing.assert_array_equal(bits(ready.scale), bits(oracle(scale, a, b, tile, contracted)))
    swapped = layout is HOPPER and contracted == -2
    np.testing.assert_array_equal(bits(ready.values), bits(q.values).T if swapped else bits(q.values))
    check_same(compact, q)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_batch_axes_jit_and_vmap(name, tiles):
    layout = LAYOUTS[name][0]
    q, _, _, contracted = tensor(name, tiles, (2, 3, 130, 300))

    def forward(q):
        return matmul_ready(q, layout, contracted=contracted)

    ready = forward(q)
    check_same(ready.compact(), q)
    check_same(jax.jit(forward)(q), ready)
    check_same(jax.jit(lambda ready: ready.compact())(ready), q)
    # One matrix after the other: under vmap, and one by one.
    mapped = jax.jit(jax.vmap(jax.vmap(forward)))(q)
    check_same(mapped, ready)
    check_same(jax.jit(jax.vmap(lambda ready: ready.compact()))(mapped), q)
    check_same(jax.jit(forward)(jax.tree.map(lambda leaf: leaf[1, 2], q)), jax.tree.map(lambda leaf: leaf[1, 2], ready))


def test_padding_of_e8m0_is_its_smallest_scale():
    q, _, _, _ = tensor("blackwell", "row-wise", (1, 1))
    padding = np.delete(bits(matmul_ready(q, BLACKWELL).scale).ravel(), 0)
    assert not padding.any()  # byte 0, 2^-127


@pytest.mark.parametrize("shape", [(0, 40), (40, 0)])
def test_empty(shape):
    for name, (layout, *_) in LAYOUTS.items():
        q, _, _, _ = tensor(name, "row-wise", shape)
        check_same(there_and_back(q, layout, None)[1], q)


@functools.partial(jax.jit, static_argnums=(0, 1))
def quantized(tile, shape=(64, 96)):
    return fp8.quantize(jnp.ones(shape), fp8.E4M3, fp8.PerBlock(tile) if tile else fp8.PerTensor())


REFUSED = {
    "no tiles": (lambda: matmul_ready(quantized(None), HOPPER), r"PerTensor\(\).*PerBlock\(\(1, 128\)\)"),
    "other tiles": (lambda: matmul_ready(quantized((1, 32)), HOPPER), r"tile=\(1, 32\).*tiles of 128"),
    "tiles along a batch axis": (
        lambda: matmul_ready(quantized((128, 1, 128), (2, 64, 96)), HOPPER), r"tile=\(128, 1, 128\).*tiles of 128",
    ),
    "a vector": (lambda: matmul_ready(quantized((128,), (64,)), HOPPER), r"\[64\].*tile=\(128,\)"),
    "square tiles alone": (lambda: matmul_ready(quantized((128, 128)), HOPPER), "contracted is missing"),
    "the wrong direction": (
        lambda: matmul_ready(quantized((1, 128)), HOPPER, contracted=-2), "contracted=-2 contradicts.*axis -1",
    ),
    "no such axis": (lambda: matmul_ready(quantized((1, 128)), HOPPER, contracted=1), "contracted=1 must be -1 or -2"),
    "float32 on Blackwell": (
        lambda: matmul_ready(quantized((1, 32)), BLACKWELL), r"float32.*scale_format=fp8\.E8M0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row):
    call, message = REFUSED[row]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("layout", ["hopper", HopperLayout])
def test_no_layout(layout):
    with pytest.raises(TypeError, match=r"layout=.*HopperLayout\(\)"):
        matmul_ready(quantized((1, 128)), layout)
