"""AdamW's device code: an update of weights and of stored moments, in one read and one write.

A group is 128 neighbouring values, which share a scale in each moment. A program updates BLOCK
groups. All arrays are contiguous: values [GROUPS, 128], and scales [GROUPS].

The rules are those of `optim._eight_bit_formats` and `optim._masters`. An amax is a maximum of
bits, as in `quantize._triton_kernels`.
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(2.0**-126)
# Bits of float32.
_TINY_BITS = tl.constexpr(0x00800000)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_QUIET = tl.constexpr(0x00400000)
# Of `optim._moment_formats`.
_PERIOD = tl.constexpr(16)
_STRIDE = tl.constexpr(7)
_LAST_2 = tl.constexpr(1 / 127**2)
_LAST_4 = tl.constexpr(1 / 255**4)
_LEAST_ROOT = tl.constexpr(2.0)
# E4M3.
_FP8_MAX = tl.constexpr(448.0)
_LOG2_RANGE = tl.constexpr(16.22239242133645)  # of 448 / (3 * 2^-9)
_FP8_BIASES = tl.constexpr(120 << 3)  # the bias of float32 minus that of E4M3, as a code
_LEAST_POWER = tl.constexpr(0.125)
_LEAST_SPREAD = tl.constexpr(1 + 2.0**-10)


@triton.jit
def adamw(
    first, first_largest, second, second_largest, weight, low, first_power, second_power,
    gradient, rate, first_correction, second_correction, threshold, skip,
    same_0, same_1, same_2, same_3, same_4, same_5, same_6, same_7,
    GROUPS: tl.constexpr, MODELS: tl.constexpr, BLOCK: tl.constexpr,
    B1: tl.constexpr, B2: tl.constexpr, EPS: tl.constexpr, EPS_ROOT: tl.constexpr,
    DECAY: tl.constexpr, EXPANDED: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """One step, which overwrites all but the gradient and the scalars.

    EXPANDED says whether moments are in expanded FP8. Otherwise they are integers, and nothing
    reads the powers. If LOW_BITS is 0, the weight is float32, and nothing reads `low`.

    rate, first_correction, second_correction, threshold, skip: float32 [MODELS], more than one
      under `jax.vmap`. Models have as many groups each. The corrections are `1 / (1 - b**step)`.
      The threshold is that of the first value of a group, see `optim._moment_formats`. With a skip
      of 1 the arrays stay as they are.
    same_0, ...: for jax-triton before 0.4, the overwritten arrays once more.
    """
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    model = group // (GROUPS // MODELS)
    exists = group < GROUPS
    skipped = tl.load(skip + model, mask=exists, other=1.0)
    there = skipped == 0.0  # a skipped step moves no bytes
    rates = tl.load(rate + model, mask=there, other=0.0)[:, None]
    for_first = tl.load(first_correction + model, mask=there, other=1.0)[:, None]
    for_second = tl.load(second_correction + model, mask=there, other=1.0)[:, None]
    lane = tl.arange(0, 128)[None, :]
    place = group[:, None] * 128 + lane
    inside = there[:, None]
    u = tl.load(threshold + model, mask=there, other=0.0)[:, None]
    u += ((lane * _STRIDE) % _PERIOD).to(tl.float32) * (1 / _PERIOD)
    u = tl.where(u >= 1, u - 1, u)

    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + place, mask=inside, other=0.0)
    v = tl.load(second + place, mask=inside, other=0.0)
    m_largest = tl.load(first_largest + group, mask=there, other=0.0)
    v_largest = tl.load(second_largest + group, mask=there, other=0.0)
    if not EXPANDED:
        root = m.to(tl.float32)
        m = root * tl.abs(root) * (m_largest * _LAST_2)[:, None]
        square = v.to(tl.float32) * v.to(tl.float32)
        v = square * square * (v_largest * _LAST_4)[:, None]
    else:
        m = _expanded(m, m_largest, tl.load(first_power + group, mask=there, other=1.0))
        v = _expanded(v, v_largest, tl.load(second_power + group, mask=there, other=1.0))
    m = (1 - B1) * g + B1 * m
    v = (1 - B2) * (g * g) + B2 * v

    if LOW_BITS == 0:
        p = tl.load(weight + place, mask=inside, other=0.0)
    else:
        p = _joined(
            tl.load(weight + place, mask=inside, other=0.0),
            tl.load(low + place, mask=inside, other=0),
            LOW_BITS,
        )
    step = tl.div_rn(m * for_first, tl.sqrt_rn(v * for_second + EPS_ROOT) + EPS)
    if DECAY != 0:
        step += DECAY * p
    p = p - rates * step
    if LOW_BITS == 0:
        tl.store(weight + place, p, mask=inside)
    else:
        high, rest = _split(p, LOW_BITS)
        tl.store(weight + place, high, mask=inside)
        tl.store(low + place, rest.to(low.dtype.element_ty), mask=inside)

    m_largest, n = _relative(m)
    if not EXPANDED:
        below = tl.floor(127.0 * tl.sqrt_rn(n))
        code = below + _goes_up(n, _square(below), _square(below + 1), u)
        codes = tl.where(m < 0, -code, code).to(tl.int8)
    else:
        power = _power(n)
        tl.store(first_power + group, power, mask=there)
        code = _expanded_code(n, power, u)
        codes = tl.where(m < 0, code | 0x80, code).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    tl.store(first + place, codes, mask=inside)
    tl.store(first_largest + group, m_largest, mask=there)

    v_largest, n = _relative(v)
    if not EXPANDED:
        below = tl.floor(255.0 * tl.sqrt_rn(tl.sqrt_rn(n)))
        code = below + _goes_up(n, _fourth_power(below), _fourth_power(below + 1), u)
        codes = tl.where(n > 0, tl.maximum(code, _LEAST_ROOT), 0.0).to(tl.uint8)
    else:
        power = _power(n)
        tl.store(second_power + group, power, mask=there)
        code = tl.where(n > 0, tl.maximum(_expanded_code(n, power, u), 1), 0)
        codes = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    tl.store(second + place, codes, mask=inside)
    tl.store(second_largest + group, v_largest, mask=there)


@triton.jit
def _square(root):
    """What a code of a first moment stands for, relative to the largest of its group."""
    return root * root * _LAST_2


@triton.jit
def _fourth_power(root):
    """What a code of a second moment stands for, relative to the largest of its group."""
    square = root * root
    return square * square * _LAST_4


@triton.jit
def _goes_up(n, low, high, u):
    """1 where n is above the threshold between the values of two codes, and 0 elsewhere."""
    return tl.where(n - low > u * (high - low), 1, 0)


@triton.jit
def _relative(x):
    """The largest magnitude of each group of x [BLOCK, 128], and |x| relative to it."""
    amax = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)
    finite = amax < _INF_BITS
    usable = finite & (amax >= _TINY_BITS)
    bits = tl.where(usable, amax, 0)
    largest = bits.to(tl.float32, bitcast=True)
    smaller = tl.where(largest > 1, 0.25, 1.0)
    inverse = tl.div_rn(1.0, tl.where(usable, largest * smaller, 1.0))
    magnitude = tl.abs(x)
    n = tl.minimum(magnitude * smaller[:, None] * inverse[:, None], 1.0)
    n = tl.where((magnitude >= _TINY) & usable[:, None], n, 0.0)
    return tl.where(finite, bits, _NAN_BITS).to(tl.float32, bitcast=True), n


@triton.jit
def _power(n):
    """The power of each group of n [BLOCK, 128] that makes its range that of E4M3."""
    smallest = tl.min(tl.where(n > 0, n, 1.0), axis=1)
    spread = tl.maximum(tl.div_rn(1.0, smallest), _LEAST_SPREAD)
    return tl.maximum(tl.div_rn(_LOG2_RANGE, tl.log2(spread)), _LEAST_POWER)


@triton.jit
def _expanded_code(n, power, u):
    """The code of E4M3 of n to the power, as a multiple of 448."""
    raised = tl.exp2(power[:, None] * tl.log2(tl.maximum(n, _TINY))) * _FP8_MAX
    raised = tl.where(n > 0, tl.minimum(raised, _FP8_MAX), 0.0)
    normal = (raised.to(tl.int32, bitcast=True) >> 20) - _FP8_BIASES
    below = tl.where(raised < 2.0**-6, (raised * 512).to(tl.int32), normal)
    inverse = tl.div_rn(1.0, power)[:, None]
    return below + _goes_up(n, _root(_fp8(below), inverse), _root(_fp8(below + 1), inverse), u)


@triton.jit
def _fp8(code):
    """The value of a code of E4M3 from 0 to 127. That of 127 stands above 448, and is not NaN."""
    normal = ((code + _FP8_BIASES) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * (1 / 512), normal)


@triton.jit
def _root(raised, inverse):
    """What a magnitude in E4M3 stands for, relative to the largest of its group."""
    n = tl.exp2(tl.log2(tl.maximum(raised * (1 / _FP8_MAX), _TINY)) * inverse)
    return tl.where(raised > 0, n, 0.0)


@triton.jit
def _expanded(values, largest, power):
    """The float32 values [BLOCK, 128] of a moment in expanded FP8."""
    x = values.to(tl.float32)
    # The product also makes NaN of a 0, if the largest magnitude is NaN: it spoils all values.
    n = _root(tl.abs(x), tl.div_rn(1.0, power)[:, None]) * largest[:, None]
    return tl.where(x < 0, -n, n)


@triton.jit
def _joined(high, low, LOW_BITS: tl.constexpr):
    """`optim._masters._joined`: bfloat16 and remainder as float32."""
    top = high.to(tl.uint16, bitcast=True).to(tl.int32)
    wide = low.to(tl.int32)
    if LOW_BITS == 8:
        wide = wide << 8
    return (((top - (wide >> 15)) << 16) | wide).to(tl.float32, bitcast=True)


@triton.jit
def _half_added(bits, HALF: tl.constexpr):
    """Bits plus half of the spacing that is left. NaN gets its quiet bit instead."""
    return tl.where((bits & _MAGNITUDE) > _INF_BITS, bits | _QUIET, bits + HALF)


@triton.jit
def _split(x, LOW_BITS: tl.constexpr):
    """`optim._masters._split`: float32 as bfloat16 and remainder."""
    bits = x.to(tl.int32, bitcast=True)
    if LOW_BITS == 8:
        bits = _half_added(bits, 1 << 7) & -256
    rest = tl.where((bits & _MAGNITUDE) > _INF_BITS, 0, bits) & 0xFFFF
    if LOW_BITS == 8:
        rest = rest >> 8
    high = (_half_added(bits, 1 << 15) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, rest
