"""Tiles that break careless scales, and the rules that scales of tiles follow."""

import ml_dtypes
import numpy as np
import oracle

TILES = {
    "x".join(map(str, tile)): tile
    for tile in [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (32, 32)]
}


def neighbours(values: np.ndarray, dtype) -> np.ndarray:
    """Positive values in a dtype, with the next ones below and above.

    What it cannot hold is left out.
    """
    info = ml_dtypes.finfo(dtype)
    values = values[
        (values >= float(info.smallest_subnormal)) & (values <= float(info.max))
    ].astype(dtype)
    bits = values.view(f"uint{info.bits}")
    around = np.concatenate([bits - 1, bits, bits + 1]).astype(bits.dtype).view(dtype)
    return np.unique(around[np.isfinite(around.astype(np.float64))].astype(np.float64))


def hard_amaxes(dtype) -> np.ndarray:
    """Amaxes at which a scale changes its exponent, overflows or is subnormal, in float64,
    ascending.

    `448 * 2^k` is where RCEIL and powers of two step (57344 is 448 * 2^7), `2^k` where FLOOR does.
    """
    powers = np.ldexp(1.0, np.arange(-149, 128))
    info = ml_dtypes.finfo(dtype)
    ends = np.array(
        [float(info.smallest_subnormal), float(info.max), 1.3e-36, oracle.TINY, 2 * oracle.TINY]
    )
    return neighbours(np.concatenate([448 * powers, powers, ends]), dtype)


def hard_tiles(tile: tuple[int, int], dtype, most: int | None = None) -> np.ndarray:
    """An array [M, K] of whole tiles, each hard in one way.

    Args:
      tile: sides of a tile.
      dtype: of the array.
      most: how many of `hard_amaxes` to take, from all over their range; both ends are always in.
    """
    random = np.random.default_rng(0)
    amaxes = hard_amaxes(dtype)
    if most is not None:
        amaxes = amaxes[np.unique(np.linspace(0, len(amaxes) - 1, most).astype(int))]
    size = tile[0] * tile[1]
    kinds = []
    for amax in amaxes:
        values = amax * random.uniform(-1, 1, size)
        values[random.integers(size)] = amax * random.choice([-1, 1])
        kinds.append(values)
    normal = random.standard_normal(size)
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    largest = float(ml_dtypes.finfo(dtype).max)
    wide = np.ldexp(normal, random.integers(-140, 100, size))
    kinds += [
        np.zeros(size),
        np.copysign(0.0, normal),
        np.copysign(smallest, normal),
        np.copysign(largest, normal),
    ]
    kinds += [
        np.rint(100 * normal) * smallest,
        np.full(size, np.nan),
        np.full(size, -np.inf),
        np.clip(wide, -largest, largest),
    ]
    for bad in (np.inf, -np.inf, np.nan):
        for values in (normal.copy(), 1e3 * normal, np.zeros(size)):
            values[random.integers(size)] = bad
            kinds.append(values)
    mixed = normal.copy()
    mixed[:3] = np.nan, np.inf, -np.inf
    kinds.append(mixed)
    columns = 4
    rows = -(-len(kinds) // columns)
    x = np.zeros((rows * tile[0], columns * tile[1]))
    for index, values in enumerate(kinds):
        i, j = index // columns * tile[0], index % columns * tile[1]
        x[i : i + tile[0], j : j + tile[1]] = values.reshape(tile)
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(dtype)


def uneven(shape: tuple[int, ...], side: int = 128) -> np.ndarray:
    """Rows and columns of very different sizes, and tiles with zeros, subnormals, ties, inf and
    NaN, in float64.

    What float16 holds. An array [.., M, K] with M > 5 and K > 55.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=shape)
    x *= np.exp2(random.uniform(-12, 12, (*shape[:-1], 1)) + random.uniform(-12, 12, shape[-1]))
    ties = x[..., :side, :side]
    ties[...] = random.choice([448.0, -449, 464, 1.0625, 0.0078125, 0], ties.shape)
    x[..., side : 2 * side, :side] *= 1e-38
    x[..., side : 2 * side, side : 2 * side] = 0
    x = np.clip(x, -6e4, 6e4)
    x[..., 3, -3], x[..., 5, -56] = np.nan, -np.inf
    return x


def scale_of(q) -> np.ndarray:
    """The scale of a QuantizedTensor as the oracle has it: float32, or the bytes of E8M0."""
    scale = np.asarray(q.scale)
    return scale.view(np.uint8) if scale.dtype == ml_dtypes.float8_e8m0fnu else scale


def assert_equals_oracle(q, x, tile, rule, message="") -> None:
    """A QuantizedTensor has the oracle's scales, payloads and dequantized values, bit for bit."""
    x = np.asarray(x)
    codes, scale = oracle.quantize_tiles(x, q.format.name, tile, rule)
    np.testing.assert_array_equal(scale_of(q), scale, err_msg=f"scale {message}", strict=True)
    np.testing.assert_array_equal(
        oracle.codes(q.values), codes, err_msg=f"values {message}", strict=True
    )
    assert q.dtype == x.dtype, message
    assert q.power_of_two == (rule != "float32"), message


def assert_dequantizes(q, y, x, message="") -> None:
    """y is what the oracle makes of payloads and scales.

    Finite where x is, or where its tile is if scales are bytes.
    """
    y, tile = np.asarray(y), q.granularity.tile
    assert y.dtype == x.dtype, message
    scale = scale_of(q)
    codes = np.asarray(q.values).view(np.uint8)
    product, expected = (
        oracle.dequantize_tiles(codes, q.format.name, scale, tile, dtype).astype(np.float32)
        for dtype in (np.float32, x.dtype)
    )
    y, x = (array.astype(np.float32) for array in (y, x))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected), err_msg=message)
    # What is subnormal in float32 may be flushed before it is rounded to x.dtype.
    normal = ~(np.abs(product) < oracle.TINY)
    np.testing.assert_array_equal(y[normal], expected[normal], err_msg=message)
    assert (np.abs(y[~normal]) <= oracle.TINY).all(), message
    finite = np.isfinite(x)
    if scale.dtype == np.uint8:  # one scale byte of NaN spoils a whole tile
        finite = oracle.spread(np.isfinite(oracle.tile_amax(x, tile)), x.shape, tile)
    np.testing.assert_array_equal(np.isfinite(y), finite, err_msg=message)
