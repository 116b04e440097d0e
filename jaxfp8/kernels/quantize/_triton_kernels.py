"""The Triton quantizer's device code: the rules of numerics, on a block of x that is read once.

An amax is a maximum of bits, as integers: Triton's maximum of floats loses NaN, and the bits of
floats that are not negative are in their order, with those of inf and NaN above all others.

Letters: L the leading axes, merged; M K the last two; T the side of a tile. Of the format LARGEST
  is the largest value,
EXPONENT its exponent, NAN the byte of NaN; E8M0, POWER_OF_TWO and CEIL say what the scale rule is.
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-126)
_HUGE = tl.constexpr(2.0**126)
_INF = tl.constexpr(float("inf"))
_HARMLESS = tl.constexpr(2.0**100)  # times what is below 2^-126 it rounds to zero in either format
# Bits of float32.
_TINY_BITS = tl.constexpr(0x00800000)
_ONE_BITS = tl.constexpr(0x3F800000)
_INF_BITS = tl.constexpr(0x7F800000)
_MANTISSA = tl.constexpr(0x007FFFFF)
_LARGEST_MANTISSA = tl.constexpr(0x600000)  # of 448 and of 57344, which are 1.75 * 2^n


@triton.jit
def quantize_tiles(
    x, values_0, scale_0, values_1, scale_1, values_2, scale_2,
    M: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, NAN: tl.constexpr,
    E8M0: tl.constexpr, POWER_OF_TWO: tl.constexpr, CEIL: tl.constexpr,
):  # fmt: skip
    """x [L, M, K] in up to three TILES, of which `_write_tiles` has the results.

    A program reads BLOCK x BLOCK values.
    """
    across: tl.constexpr = (K + BLOCK - 1) // BLOCK
    down: tl.constexpr = (M + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    lead, i, j = program // (across * down), program // across % down, program % across
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    inside = (i * BLOCK + row < M)[:, None] & (j * BLOCK + column < K)[None, :]
    # Arrays have more elements than int32 counts, a block's reach has not.
    first = (lead.to(tl.int64) * M + i * BLOCK) * K + j * BLOCK
    block = tl.load(x + first + (row[:, None] * K + column[None, :]), mask=inside, other=0.0).to(
        tl.float32
    )
    _write_tiles(
        block, values_0, scale_0, lead, i, j, M, K, BLOCK, TILES[0][0], TILES[0][1],
        LARGEST, EXPONENT, NAN, E8M0, POWER_OF_TWO, CEIL,
    )  # fmt: skip
    if len(TILES) > 1:
        _write_tiles(
            block, values_1, scale_1, lead, i, j, M, K, BLOCK, TILES[1][0], TILES[1][1],
            LARGEST, EXPONENT, NAN, E8M0, POWER_OF_TWO, CEIL,
        )  # fmt: skip
    if len(TILES) > 2:
        _write_tiles(
            block, values_2, scale_2, lead, i, j, M, K, BLOCK, TILES[2][0], TILES[2][1],
            LARGEST, EXPONENT, NAN, E8M0, POWER_OF_TWO, CEIL,
        )  # fmt: skip


@triton.jit
def _write_tiles(
    block, values, scale, lead, i, j,
    M: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, NAN: tl.constexpr,
    E8M0: tl.constexpr, POWER_OF_TWO: tl.constexpr, CEIL: tl.constexpr,
):  # fmt: skip
    """The block in tiles of DOWN x ACROSS.

    Values [L, M, K] and scale [L, ceil(M / DOWN), ceil(K / ACROSS)].

    Values of columns and scales of rows are written with the last two axes in the other order.
    """
    rows: tl.constexpr = BLOCK // DOWN
    columns: tl.constexpr = BLOCK // ACROSS
    bits = tl.reshape(tl.abs(block).to(tl.int32, bitcast=True), (rows, DOWN, columns, ACROSS))
    amax = tl.max(tl.max(bits, axis=3), axis=1)
    multiplier, scales, odd = _scales_of(amax, LARGEST, EXPONENT, E8M0, POWER_OF_TWO, CEIL)
    spread = tl.broadcast_to(multiplier[:, None, :, None], (rows, DOWN, columns, ACROSS))
    codes = _cast(
        block, tl.reshape(spread, (BLOCK, BLOCK)), odd, values.dtype.element_ty, LARGEST, NAN
    )

    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    if ACROSS == 1:
        first = (lead.to(tl.int64) * K + j * BLOCK) * M + i * BLOCK
        inside = (j * BLOCK + column < K)[:, None] & (i * BLOCK + row < M)[None, :]
        tl.store(
            values + first + (column[:, None] * M + row[None, :]), tl.trans(codes), mask=inside
        )
    else:
        first = (lead.to(tl.int64) * M + i * BLOCK) * K + j * BLOCK
        inside = (i * BLOCK + row < M)[:, None] & (j * BLOCK + column < K)[None, :]
        tl.store(values + first + (row[:, None] * K + column[None, :]), codes, mask=inside)

    most_down: tl.constexpr = (M + DOWN - 1) // DOWN
    most_across: tl.constexpr = (K + ACROSS - 1) // ACROSS
    row, column = (
        (i * rows + tl.arange(0, rows))[:, None],
        (j * columns + tl.arange(0, columns))[None, :],
    )
    place = column * most_down + row if DOWN == 1 else row * most_across + column
    inside = (row < most_down) & (column < most_across)
    tl.store(scale + lead.to(tl.int64) * (most_down * most_across) + place, scales, mask=inside)


@triton.jit
def quantize_rows(
    x, values, scale,
    M: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, NAN: tl.constexpr,
    E8M0: tl.constexpr, POWER_OF_TWO: tl.constexpr, CEIL: tl.constexpr,
):  # fmt: skip
    """x [M, K] with one scale a row: values [M, K], scale [M].

    A program reads ROWS of them, each in BLOCK >= K values.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    place = first * K + (row[:, None] * K + column[None, :])
    inside = (first + row < M)[:, None] & (column < K)[None, :]
    block = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(block).to(tl.int32, bitcast=True), axis=1)
    multiplier, scales, odd = _scales_of(amax, LARGEST, EXPONENT, E8M0, POWER_OF_TWO, CEIL)
    codes = _cast(block, multiplier[:, None], odd, values.dtype.element_ty, LARGEST, NAN)
    tl.store(values + place, codes, mask=inside)
    tl.store(scale + first + row, scales, mask=first + row < M)


@triton.jit
def _scales_of(
    amax, LARGEST: tl.constexpr, EXPONENT: tl.constexpr,
    E8M0: tl.constexpr, POWER_OF_TWO: tl.constexpr, CEIL: tl.constexpr,
):  # fmt: skip
    """`ScaleRule.apply` to the bits of amaxes [..].

    Multipliers, float32, and scales, float32 or bytes.

    Also whether a value under one of them may be inf, NaN, or below 2^-126 and yet no zero in FP8.
    """
    finite = amax < _INF_BITS
    usable = finite & (amax >= _TINY_BITS)
    if E8M0 or POWER_OF_TWO:
        exponent = (amax >> 23) - 127 - EXPONENT
        if CEIL:
            exponent += tl.where((amax & _MANTISSA) > _LARGEST_MANTISSA, 1, 0)
        # Of E8M0 the smallest scale is 2^-127; that of float32 and its inverse are normal numbers.
        exponent = tl.maximum(exponent, -127 if E8M0 else -126)
        multiplier = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        if E8M0:
            scales = tl.where(finite, tl.where(usable, exponent + 127, 0), 255).to(tl.uint8)
        else:
            scales = ((tl.where(usable, exponent, 0) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        multiplier = tl.div_rn(
            LARGEST, tl.where(usable, amax, _ONE_BITS).to(tl.float32, bitcast=True)
        )
        multiplier = tl.clamp(multiplier, _TINY, _HUGE)
        scales = tl.div_rn(1.0, tl.where(usable, multiplier, 1.0))
    multiplier = tl.where(usable, multiplier, 1.0)
    odd = tl.max((~finite | (multiplier > _HARMLESS)).to(tl.int32))
    return multiplier, scales, odd


@triton.jit
def _cast(block, multiplier, odd, dtype: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr):
    """`saturating_cast`: float32 to `dtype`.

    The NaN is chosen by its byte, since the hardware's is not JAX's in E5M2.
    """
    codes = tl.clamp(block * multiplier, -LARGEST, LARGEST).to(dtype).to(tl.uint8, bitcast=True)
    # in a branch: nearly no block takes it, and it would double the instructions of all
    if odd > 0:
        magnitude = tl.abs(block)
        # a zero with the sign of the value
        scaled = block * tl.where(magnitude < _TINY, 0.0, multiplier)
        codes = tl.clamp(scaled, -LARGEST, LARGEST).to(dtype).to(tl.uint8, bitcast=True)
        codes = tl.where(magnitude < _INF, codes, NAN).to(tl.uint8)
    return codes.to(dtype, bitcast=True)
