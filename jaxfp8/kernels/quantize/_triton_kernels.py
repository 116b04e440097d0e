"""The Triton quantizer's device code: the rules of `numerics`, on a block of x that is read once.

An amax is a maximum of bits, taken as integers, because Triton's maximum of floats loses NaN. The
bits of floats that are not negative have the same order as the floats. The bits of inf and NaN are
above all others.

Letters: L the leading axes, merged; M K the last two; T the side of a tile.

Constants of the format: LARGEST is the largest value, EXPONENT its exponent, NAN the byte of NaN.
Constants of the scale rule: E8M0 and POWER_OF_TWO are its options; CEIL is the rounding "rceil".
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-126)
_HUGE = tl.constexpr(2.0**126)
_INF = tl.constexpr(float("inf"))
# Up to this multiplier, a value below 2^-126 stays below 2^-26. That rounds to zero in both
# formats, because the smallest value of E5M2 is 2^-16.
_HARMLESS = tl.constexpr(2.0**100)
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
    """x [L, M, K] in up to three kinds of TILES; see `_write_tiles` for the results.

    A program reads BLOCK x BLOCK values. Results that TILES does not have are None.
    """
    across: tl.constexpr = (K + BLOCK - 1) // BLOCK
    down: tl.constexpr = (M + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    lead, i, j = program // (across * down), program // across % down, program % across
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    inside = (i * BLOCK + row < M)[:, None] & (j * BLOCK + column < K)[None, :]
    # An array may have more elements than int32 counts, so the first offset of a block is int64.
    # The offsets inside a block fit in int32 (`_Kernel._in_tiles` checks that). Values after the
    # array are read as zeros, which change no amax.
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

    Values are [L, M, K], scales [L, ceil(M / DOWN), ceil(K / ACROSS)]. If ACROSS is 1, the last two
    axes of values are transposed. If DOWN is 1, those of scales are transposed.
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
    """x [M, K] with one scale for each row: values [M, K], scale [M].

    A program reads ROWS rows. BLOCK is K rounded up to a power of two.
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
    """`ScaleRule.apply` for amaxes [..], given as bits.

    Returns multipliers in float32, and scales in float32 or as bytes. The third result is 1 if
    `_cast` may need its special case, and 0 otherwise. It needs that for inf, for NaN, and for a
    value below 2^-126 whose multiplier is so large that it would not round to zero.
    """
    finite = amax < _INF_BITS
    usable = finite & (amax >= _TINY_BITS)
    if E8M0 or POWER_OF_TWO:
        exponent = (amax >> 23) - 127 - EXPONENT
        if CEIL:
            exponent += tl.where((amax & _MANTISSA) > _LARGEST_MANTISSA, 1, 0)
        # The smallest scale of E8M0 is 2^-127. In float32 it is 2^-126, so that the scale is a
        # normal number.
        exponent = tl.maximum(exponent, -127 if E8M0 else -126)
        multiplier = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        if E8M0:
            scales = tl.where(finite, tl.where(usable, exponent + 127, 0), 255).to(tl.uint8)
        else:
            scales = ((tl.where(usable, exponent, 0) + 127) << 23).to(tl.float32, bitcast=True)
    else:
        # `div_rn` rounds correctly, as `numerics` does. Triton's `/` does not.
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

    A NaN is written as the byte NAN, because in E5M2 the NaN of the hardware is not that of JAX.
    """
    codes = tl.clamp(block * multiplier, -LARGEST, LARGEST).to(dtype).to(tl.uint8, bitcast=True)
    # Almost no block takes this branch. Without the branch, the number of instructions would double
    # for all blocks.
    if odd > 0:
        magnitude = tl.abs(block)
        # Values below 2^-126 count as zeros. The product keeps the sign of the value.
        scaled = block * tl.where(magnitude < _TINY, 0.0, multiplier)
        codes = tl.clamp(scaled, -LARGEST, LARGEST).to(dtype).to(tl.uint8, bitcast=True)
        codes = tl.where(magnitude < _INF, codes, NAN).to(tl.uint8)
    return codes.to(dtype, bitcast=True)
