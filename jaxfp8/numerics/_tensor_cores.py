"""The sums of Hopper's FP8 tensor cores, to the bit.

`wgmma` on FP8 operands keeps fewer bits of a sum than float32 has. It adds 32 products and the
accumulator at once, in four steps:

1. P is the largest power of two among them: 2^(exponent of a + exponent of b) of each product, and
   2^(exponent) of the accumulator. Subnormal numbers have the exponent of the smallest normal one.
2. Each of the 33 is truncated toward zero to a multiple of P * 2^-13.
3. The multiples are added exactly.
4. The sum is truncated toward zero to 13 bits after the leading one.

A matmul of more than 32 values along K does so once for each 32, in order. So with 4096 values of
one sign about 128 truncations all go the same way. "Promoted" sums leave the tensor cores every 128
values, and are added in float32.

References:
  MMA-Sim (arXiv 2511.10909): the model T-FDPA with F = 13 and the rounding RZ-E8M13, which its
  authors compared with the hardware. DeepSeek-V3 (arXiv 2412.19437), section 3.3.2: promotion.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.numerics._formats import format_of

WGMMA_K = 32
"""Values along K that one `wgmma` of FP8 operands adds at once."""
PROMOTED = 128
"""Values along K after which a sum leaves the tensor cores, unless accumulation is fast."""
_BITS = 13


def wgmma(lhs: Array, rhs: Array, accumulator: Array | None = None) -> Array:
    """`accumulator + lhs @ rhs.T` as Hopper's tensor cores compute it.

    Args:
      lhs: FP8 values [M, K].
      rhs: FP8 values [N, K].
      accumulator: float32 [M, N], a result of this function. Zeros if it is None.

    Returns:
      float32 [M, N]. NaN is the one with all bits of the significand set.

    Raises:
      ValueError: if K is no multiple of 32, as the hardware needs it.
    """
    if lhs.shape[1] % WGMMA_K or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"lhs is {list(lhs.shape)} and rhs {list(rhs.shape)}. The last axes must be equal, and "
            f"multiples of {WGMMA_K}. Pad them with zeros, which change no sum."
        )
    if accumulator is None:
        accumulator = _zeros(lhs, rhs)
    values = [_in_steps(x.astype(jnp.float32)) for x in (lhs, rhs)]
    powers = [_in_steps(_power_of(x)) for x in (lhs, rhs)]
    total, _ = lax.scan(lambda c, step: (_add(c, *step), None), accumulator, (*values, *powers))
    return total


def _zeros(lhs: Array, rhs: Array) -> Array:
    """float32 [M, N], with the mesh axes and mapped axes of both operands, as a carry needs it."""
    lhs, rhs = (lax.bitcast_convert_type(x[:, :1], jnp.uint8) & 0 for x in (lhs, rhs))
    return (lhs | rhs.T).astype(jnp.float32)


def _in_steps(x: Array) -> Array:
    """[K / 32, M, 32] of [M, K]."""
    return x.reshape(x.shape[0], -1, WGMMA_K).swapaxes(0, 1)


def _power_of(x: Array) -> Array:
    """2^exponent of FP8 values, in float32; 0 for zeros, and 1 for what is not finite."""
    size = jnp.abs(x.astype(jnp.float32))
    power = jnp.maximum(_leading(size), 2.0 ** format_of(x.dtype).min_exponent)
    return jnp.where(size == 0, 0.0, jnp.where(size < jnp.inf, power, 1.0))


def _leading(x: Array) -> Array:
    """2^exponent of float32 values, 0 for zeros; inf for what is not finite."""
    return lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000, jnp.float32
    )


def _add(c: Array, a: Array, b: Array, power_of_a: Array, power_of_b: Array) -> Array:
    """c [M, N] plus 32 products of a [M, 32] and b [N, 32]. All operations are exact in float32."""
    largest = jnp.max(power_of_a[:, None] * power_of_b[None], axis=-1)
    largest = jnp.maximum(largest, _leading(c))
    # Zeros alone have no exponent. What is not finite stays so in every unit.
    largest = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)
    unit = largest * 2.0**-_BITS
    # The inverse of a power of two, from its bits: GPUs do not divide exactly.
    bits = lax.bitcast_convert_type(unit, jnp.int32)
    inverse = lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
    # Truncated terms are integers below 2^15, so float32 adds them exactly in any order.
    products = jnp.trunc(a[:, None] * b[None] * inverse[..., None])
    total = (jnp.sum(products, axis=-1) + jnp.trunc(c * inverse)) * unit
    kept = lax.bitcast_convert_type(total, jnp.int32) & -(1 << (23 - _BITS))
    kept = jnp.where(jnp.isnan(total), 0x7FFFFFFF, kept)
    # A sum of negative zeros is a positive zero.
    return lax.bitcast_convert_type(jnp.where(total == 0, 0, kept), jnp.float32)


# The same sums by several ways, to compare them.


class Sums(NamedTuple):
    """The sums of one matmul, float32 [M, N]."""

    exact: Array  # in float32
    magnitude: Array  # the sums of the magnitudes of all products
    promoted: Array  # added in float32 after each step
    fast: Array  # never promoted; without scales


def sums_of(lhs: Array, rhs: Array, scales: tuple[Array, Array] | None = None) -> Sums:
    """The sums over K of a matmul, exactly and as Hopper's tensor cores compute them.

    Letters: C steps of S values along K. S is a multiple of 32. Sums leave the tensor cores after
    each step, so without scales S is 128.

    "Exact" sums are float32, too: products of FP8 values are exact there. With operands of a normal
    distribution and K = 65536 their error was 4e-7. The tensor cores lose 100 times as much.

    Args:
      lhs: FP8 values [M, C, S].
      rhs: FP8 values [N, C, S].
      scales: float32 [M, C] and [N, C], which multiply the sum of each step. None leaves them out.
    """

    def add(sums: Sums, step: list[Array]) -> tuple[Sums, None]:
        a, b, *factors = step

        def scaled(total: Array) -> Array:
            if not factors:
                return total
            of_rows, of_columns = factors[0][:, None], factors[1][None]
            # The smaller scale first, so that no product overflows if no result does.
            return (total * jnp.minimum(of_rows, of_columns)) * jnp.maximum(of_rows, of_columns)

        def dot(a: Array, b: Array) -> Array:
            return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)

        wide = [x.astype(jnp.float32) for x in (a, b)]
        return Sums(
            sums.exact + scaled(dot(*wide)),
            sums.magnitude + scaled(dot(*map(jnp.abs, wide))),
            sums.promoted + scaled(wgmma(a, b)),
            sums.fast if factors else wgmma(a, b, sums.fast),
        ), None

    zeros = _zeros(lhs[:, 0], rhs[:, 0])
    steps = (lhs, rhs, *(scales or ()))
    return lax.scan(add, Sums(*[zeros] * 4), [x.swapaxes(0, 1) for x in steps])[0]
