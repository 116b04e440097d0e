"""The bits that a GPU gives for a matmul of FP8 operands: the order of its sums, in NumPy.

A rule says how a kernel takes K: how much of it the tensor cores add before the sum leaves them,
and when scales come in. What the tensor cores do with 32 products is a function of its own:
`jaxfp8.numerics._tensor_cores.wgmma` for Hopper, `tcgen05` for Blackwell. `tests/silicon` compares
both with MMA-Sim, and the rules with the interpreted kernels. `bits.py` compares them with a GPU.

What is not known:

- cuBLASLt publishes neither its order nor the interval at which it promotes sums. Its rules are
  those of CUTLASS's kernels: K in order, promoted every 128. It may split K.
- The order in which cuBLASLt multiplies two scales that are no powers of two.

Letters: M N K the axes of the matmul; C tiles along K, each with scales of its own.

References:
  MMA-Sim, arXiv 2511.10909; DeepSeek-V3, arXiv 2412.19437, section 3.3.2; CUTLASS,
  `GmmaFP8Accumulation`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfp8.numerics._tensor_cores import wgmma

Multiply = Callable[..., np.ndarray]
"""`multiply(lhs [M, K], rhs [N, K], sums [M, N])`: the sums after K, as tensor cores add."""
LARGEST = np.finfo(np.float32).max
STEP = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """How a kernel adds.

    Attributes:
      every: values along K after which a sum leaves the tensor cores. None for never.
      fused: True if a product is scaled and added with one rounding. False if scales come at the
        end.
    """

    every: int | None
    fused: bool


FAST = Rule(every=None, fused=False)
FULL = Rule(every=STEP, fused=False)


def tiles(side: int) -> Rule:
    """The rule for tiles of 128 or 32: each is scaled for itself."""
    return Rule(every=side, fused=True)


def hopper(lhs: Any, rhs: Any, sums: np.ndarray) -> np.ndarray:
    """`sums + lhs @ rhs.T` by Hopper's tensor cores, on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(_wgmma(np.ascontiguousarray(lhs), np.ascontiguousarray(rhs), sums))


_wgmma = jax.jit(wgmma)


def predicted(
    values: tuple[np.ndarray, np.ndarray],
    scales: tuple[np.ndarray, np.ndarray],
    rule: Rule,
    multiply: Multiply = hopper,
) -> np.ndarray:
    """float32 [M, N], before it is rounded to the dtype of the result.

    Args:
      values: FP8 [M, K] and [N, K].
      scales: float32 [M, C] and [N, C], one for each of C tiles along K. C is 1 for scales that all
        of K shares. A size of 1 broadcasts.
      rule: the rule.
      multiply: the tensor cores.
    """
    lhs, rhs = (_padded(each, STEP) for each in values)
    sums = np.zeros((lhs.shape[0], rhs.shape[0]), np.float32)
    of_lhs, of_rhs = scales
    if rule.every is None:
        return scaled(multiply(lhs, rhs, sums), of_lhs, of_rhs.T)
    nothing = sums
    for tile, first in enumerate(range(0, lhs.shape[1], rule.every)):
        along = slice(first, first + rule.every)
        product = multiply(lhs[:, along], rhs[:, along], nothing)
        if rule.fused and first < values[0].shape[1]:
            both = np.minimum(of_lhs[:, tile, None] * of_rhs[None, :, tile], LARGEST)
            sums = fused(sums, product, both)
        elif not rule.fused:
            sums = sums + product
    return sums if rule.fused else scaled(sums, of_lhs, of_rhs.T)


def matrix(operand: Any, last: bool, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Values [M, K] and scales [M, C] of a `QuantizedTensor` [M, K], or [K, M] if not `last`."""
    values, scale = np.asarray(operand.values), np.asarray(operand.scale).astype(np.float32)
    if operand.granularity.in_tiles:
        for axis, side in enumerate(operand.granularity.along(2)):
            scale = scale.repeat(side, axis)
        scale = scale[tuple(map(slice, values.shape))]
    scale = np.broadcast_to(scale, values.shape)
    values, scale = (x if last else x.T for x in (values, scale))
    return values, scale[:, :: rule.every] if rule.fused else scale[:, :1]


def scaled(sums: np.ndarray, of_rows: np.ndarray, of_columns: np.ndarray) -> np.ndarray:
    """`sums` times both scales, the smaller one first."""
    return sums * np.minimum(of_rows, of_columns) * np.maximum(of_rows, of_columns)


def fused(sums: np.ndarray, product: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`sums + product * scale` in float32, rounded once."""
    # The product of two float32 is exact in float64. Their sum is rounded to odd: if it is not
    # exact, its last bit is 1. So the second rounding, to float32, never sees a tie that is none
    # (Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008).
    exact, sums = product.astype(np.float64) * scale, sums.astype(np.float64)
    total = sums + exact
    head = total - exact
    error = (sums - head) + (exact - (total - head))
    bits = total.view(np.int64)
    outwards = (error > 0) == (total > 0)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    odd = np.where(inexact, np.where(outwards, bits + 1, bits - 1), bits)
    return odd.view(np.float64).astype(np.float32)


def tcgen05(
    lhs: np.ndarray,
    rhs: np.ndarray,
    sums: np.ndarray,
    of_lhs: np.ndarray | None = None,
    of_rhs: np.ndarray | None = None,
) -> np.ndarray:
    """`sums + lhs @ rhs.T` by Blackwell's tensor cores: 25 bits of a sum, truncated.

    Args:
      lhs: FP8 [M, K]. K is a multiple of 32.
      rhs: FP8 [N, K].
      sums: float32 [M, N].
      of_lhs: E8M0 scales [M, K / 32] of MXFP8, or None.
      of_rhs: E8M0 scales [N, K / 32], or None.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf, and what float32 cannot hold
        for step in range(lhs.shape[1] // 32):
            along = slice(32 * step, 32 * step + 32)
            power = np.ones(sums.shape)
            if of_lhs is not None and of_rhs is not None:
                power = np.multiply.outer(
                    of_lhs[:, step].astype(np.float64), of_rhs[:, step].astype(np.float64)
                )
            sums = _add(sums, lhs[:, along], rhs[:, along], power)
    return sums


def _add(sums: np.ndarray, lhs: np.ndarray, rhs: np.ndarray, power: np.ndarray) -> np.ndarray:
    """One step: T-FDPA with F = 25 and the rounding RZ-FP32, or ST-FDPA with scales."""
    products = lhs.astype(np.float64)[:, None] * rhs.astype(np.float64)[None] * power[..., None]
    powers = _power_of(lhs)[:, None] * _power_of(rhs)[None] * power[..., None]
    of_sums = np.exp2(np.maximum(np.frexp(sums.astype(np.float64))[1] - 1, -126))
    largest = np.where(products == 0, 0.0, powers).max(-1)
    largest = np.maximum(largest, np.where(sums == 0, 0.0, of_sums))
    usable = (largest > 0) & (largest < np.inf)
    unit = np.ldexp(np.where(usable, largest, 1.0), -25)
    whole = np.trunc(products / unit[..., None]).sum(-1) + np.trunc(sums / unit)
    return _toward_zero(whole * unit)


def _power_of(x: np.ndarray) -> np.ndarray:
    """2^exponent of FP8 values. Subnormal ones have that of the smallest normal value."""
    least = int(np.log2(float(jax.numpy.finfo(x.dtype).tiny)))
    exponents = np.frexp(x.astype(np.float64))[1] - 1
    return np.exp2(np.maximum(exponents, least))


def _toward_zero(x: np.ndarray) -> np.ndarray:
    """float64 truncated to float32. The NaN of tensor cores has all bits set but the sign."""
    spacing = np.exp2(np.maximum(np.frexp(x)[1] - 1, -126) - 23.0)
    kept = np.where(np.isfinite(x), np.trunc(x / spacing) * spacing, x).astype(np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF).view(np.float32), kept + np.float32(0))


def _padded(x: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, -x.shape[1] % multiple)])
