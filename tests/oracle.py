"""The rules of FP8 written down a second time, in NumPy and exact arithmetic.

What the package must equal to the bit.

Nothing here imports jaxfp8. Arrays go in, arrays come out; a granularity is the tuple of axes that
are KEPT, None for one scale in all. A tile is the tuple of its sides along the trailing axes;
scales of tiles follow one of four rules, "float32", "power_of_two", "rceil" or "floor", the last
two of which give bytes (E8M0).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np

TINY = 2.0**-126
FLOAT32_MAX = float(np.finfo(np.float32).max)
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
DTYPE = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
# Codes of the finite values that are not negative run in ascending order. E4M3 has two codes for
# NaN and E5M2 has six: which one a compiler writes depends on its version and the fusion, and means
# nothing; here it is always this one.
FINITE_CODES = {"E4M3": 0x7F, "E5M2": 0x7C}
NAN_CODE = {"E4M3": 0x7F, "E5M2": 0x7E}


def values_of(fmt: str) -> np.ndarray:
    """The finite values of a format that are not negative, ascending, in float64.

    The index of a value is its code.
    """
    return np.arange(FINITE_CODES[fmt], dtype=np.uint8).view(DTYPE[fmt]).astype(np.float64)


def codes(values) -> np.ndarray:
    """The codes of an FP8 array, with one code for every NaN."""
    values = np.asarray(values)
    fmt = next(name for name, dtype in DTYPE.items() if values.dtype == dtype)
    return np.where(
        np.isnan(values.astype(np.float32)), np.uint8(NAN_CODE[fmt]), values.view(np.uint8)
    )


def to_float32(x: np.ndarray) -> np.ndarray:
    """Finite stays finite; what is below the smallest normal float32 becomes a zero of its sign."""
    x = np.asarray(x)
    with np.errstate(invalid="ignore"):
        if x.dtype == np.float64:
            x = np.where(np.isfinite(x), np.clip(x, -FLOAT32_MAX, FLOAT32_MAX), x)
        x = x.astype(np.float32)
        return np.where(np.abs(x) < np.float32(TINY), np.copysign(np.float32(0), x), x)


def amax(x: np.ndarray, kept: tuple[int, ...] | None) -> np.ndarray:
    """The largest magnitude of each scale cell, inf where the cell holds an inf or a NaN, 0 where
    it is empty.
    """
    magnitude = np.abs(to_float32(x))
    magnitude = np.where(np.isnan(magnitude), np.float32(np.inf), magnitude)
    if kept is None:
        return np.max(magnitude, initial=np.float32(0))
    return np.max(
        magnitude,
        axis=tuple(a for a in range(x.ndim) if a not in kept),
        initial=np.float32(0),
        keepdims=True,
    )


def _round_to_24_bits(x: np.ndarray) -> np.ndarray:
    """Float64 rounded to the significand of float32, at any exponent, ties to even."""
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(significand, 24)), exponent - 24)


def multiplier(
    amax: np.ndarray, fmt: str, *, margin: int = 0, power_of_two: bool = False
) -> np.ndarray:
    """`largest / amax`, correctly rounded; then the margin; then the power of two; then the clamp.

    1 if amax cannot tell.

    The float64 quotient of two float32 numbers, rounded again to float32's 24 bits, is the
    correctly rounded one: 53 is at least 2 * 24 + 2 (Figueroa, When is double rounding innocuous?,
    1995). `exact_multiplier` does without the theorem.
    """
    amax = np.asarray(amax, np.float64)
    usable = np.isfinite(amax) & (amax >= TINY)
    m = _round_to_24_bits(LARGEST[fmt] / np.where(usable, amax, 1.0))
    m = np.ldexp(m, -margin)
    if power_of_two:
        m = np.ldexp(0.5, np.frexp(m)[1])
    return np.where(usable, np.clip(m, 2.0**-126, 2.0**126), 1.0).astype(np.float32)


def inverse(m: np.ndarray) -> np.ndarray:
    """`1 / m`, correctly rounded."""
    return np.clip(_round_to_24_bits(1.0 / np.asarray(m, np.float64)), 2.0**-126, 2.0**126).astype(
        np.float32
    )


def exact_quotient(numerator: Fraction, denominator: Fraction) -> float:
    """The quotient rounded to 24 bits at any exponent, ties to even, in integers."""
    quotient = Fraction(numerator) / Fraction(denominator)
    exponent = quotient.numerator.bit_length() - quotient.denominator.bit_length() - 24
    if quotient / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    # round() of a Fraction goes to even
    return math.ldexp(round(quotient / Fraction(2) ** exponent), exponent)


def exact_multiplier(
    amax: float, fmt: str, *, margin: int = 0, power_of_two: bool = False
) -> float:
    """`multiplier` of one amax, without float64 division."""
    if not math.isfinite(amax) or amax < TINY:
        return 1.0
    m = math.ldexp(exact_quotient(Fraction(LARGEST[fmt]), Fraction(amax)), -margin)
    if power_of_two:
        m = math.ldexp(0.5, math.frexp(m)[1])
    return min(max(m, 2.0**-126), 2.0**126)


def nearest_codes(v: np.ndarray, fmt: str) -> np.ndarray:
    """The codes of the values of a format nearest to v, ties to the even code.

    Saturating; NaN for NaN.
    """
    values = values_of(fmt)
    magnitude = np.minimum(np.abs(v.astype(np.float64)), values[-1])
    low = np.clip(np.searchsorted(values, magnitude, side="right") - 1, 0, len(values) - 2)
    below, above = magnitude - values[low], values[low + 1] - magnitude
    up = (above < below) | ((above == below) & (low % 2 == 1))
    code = (low + up).astype(np.uint8) | (np.signbit(v).astype(np.uint8) << 7)
    return np.where(np.isnan(v), np.uint8(NAN_CODE[fmt]), code)


def scaled(x: np.ndarray, m: np.ndarray) -> np.ndarray:
    """`x * m` in float32, NaN where x is not finite."""
    x = to_float32(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(np.isfinite(x), x * np.asarray(m, np.float32), np.float32(np.nan))


def cast(x: np.ndarray, m: np.ndarray, fmt: str) -> np.ndarray:
    """Codes (uint8) of `round(clip(x * m))`."""
    return nearest_codes(scaled(x, m), fmt)


def quantize(
    x: np.ndarray, fmt: str, kept: tuple[int, ...] | None = None, *, power_of_two: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8) and float32 scales."""
    m = multiplier(amax(x, kept), fmt, power_of_two=power_of_two)
    return cast(x, m, fmt), inverse(m)


# Tiles


def cells(
    shape: tuple[int, ...], tile: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """For each tile, where its scale is and where its values are.

    The last one of an axis may be ragged.
    """
    sides = (1,) * (len(shape) - len(tile)) + tile
    for corner in itertools.product(
        *(range(0, size, side) for size, side in zip(shape, sides, strict=True))
    ):
        where = tuple(start // side for start, side in zip(corner, sides, strict=True))
        yield (
            where,
            tuple(slice(start, start + side) for start, side in zip(corner, sides, strict=True)),
        )


def tile_amax(x: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    """`amax` of each tile."""
    whole = amax(x, tuple(range(x.ndim)))  # of single values
    sides = (1,) * (x.ndim - len(tile)) + tile
    largest = np.zeros(
        [math.ceil(size / side) for size, side in zip(x.shape, sides, strict=True)], np.float32
    )
    for where, values in cells(x.shape, tile):
        largest[where] = whole[values].max()
    return largest


def spread(scale: np.ndarray, shape: tuple[int, ...], tile: tuple[int, ...]) -> np.ndarray:
    """What belongs to each tile, written at each of its values."""
    everywhere = np.empty(shape, scale.dtype)
    for where, values in cells(shape, tile):
        everywhere[values] = scale[where]
    return everywhere


def e8m0_bytes(amax: np.ndarray, fmt: str, rounding: str) -> np.ndarray:
    """The bytes e of scales 2^(e - 127): 0 for an amax of zero, 255 for one that is not finite.

    "rceil": the smallest scale under which amax is at most the largest value of the format.
    "floor": the largest that brings it to the binade of that value or above. Both by comparing with
    all 255 scales, in float64, which holds them exactly.
    """
    amax = np.asarray(amax, np.float64)
    scales = np.ldexp(1.0, np.arange(255) - 127)
    if rounding == "rceil":
        byte = np.searchsorted(scales * LARGEST[fmt], amax, side="left")
    else:
        byte = (
            np.searchsorted(scales * {"E4M3": 256.0, "E5M2": 32768.0}[fmt], amax, side="right") - 1
        )
    byte = np.where(amax < TINY, 0, np.clip(byte, 0, 254))
    return np.where(np.isfinite(amax), byte, 255).astype(np.uint8)


def quantize_tiles(
    x: np.ndarray, fmt: str, tile: tuple[int, ...], rule: str
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8) and scales (float32, or the bytes of E8M0)."""
    largest = tile_amax(x, tile)
    if rule in ("float32", "power_of_two"):
        m = multiplier(largest, fmt, power_of_two=rule == "power_of_two")
        return cast(x, spread(m, x.shape, tile), fmt), inverse(m)
    scale = e8m0_bytes(largest, fmt, rule)
    # a tile that is not finite is not scaled
    exponent = np.where(scale == 255, 0, scale.astype(np.int64) - 127)
    exact = to_float32(x).astype(np.float64)
    exact = np.ldexp(np.where(np.isfinite(exact), exact, np.nan), -spread(exponent, x.shape, tile))
    return nearest_codes(exact, fmt), scale


def dequantize_tiles(
    codes: np.ndarray, fmt: str, scale: np.ndarray, tile: tuple[int, ...], dtype
) -> np.ndarray:
    """`values * scale`, rounded to float32 once, then to a dtype, within its limits."""
    values = codes.view(DTYPE[fmt]).astype(np.float64)
    if scale.dtype == np.uint8:
        scale = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(np.int64) - 127))
    product = values * spread(scale.astype(np.float64), codes.shape, tile)  # exact: 4 bits times 24
    largest = min(float(ml_dtypes.finfo(dtype).max), FLOAT32_MAX)
    with np.errstate(under="ignore"):
        return np.clip(product, -largest, largest).astype(np.float32).astype(dtype)


# Delayed scaling


@dataclasses.dataclass
class DelayedRow:
    """One row of delayed scaling in Python floats, one step after the other as the rules tell
    them.
    """

    fmt: str
    history_length: int
    algorithm: str
    margin: int
    power_of_two: bool

    def __post_init__(self) -> None:
        self.scale = 0.0
        self.history = [0.0] * self.history_length
        self.nonfinite_steps = 0

    def step(self, amax: float) -> None:
        if not math.isfinite(amax):
            self.nonfinite_steps += 1
            return
        if amax < TINY:
            return
        self.history[0] = amax
        reference = max(self.history) if self.algorithm == "max" else amax
        m = exact_multiplier(
            reference, self.fmt, margin=self.margin, power_of_two=self.power_of_two
        )
        self.scale = exact_quotient(Fraction(1), Fraction(m))
        self.history = [0.0, *self.history[2:], amax] if self.history_length > 1 else [0.0]
