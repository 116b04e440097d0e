"""Operands of the tests: random values of several kinds."""

import ml_dtypes
import numpy as np

FORMATS = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
KINDS = ("any bits", "normal", "one sign", "wide", "few", "not finite")


def values(kind, seed, shape, dtype):
    """FP8 values. All are finite unless the kind says otherwise."""
    random, most = np.random.default_rng(seed), float(ml_dtypes.finfo(dtype).max)
    if kind == "any bits":
        x = random.integers(0, 256, shape).astype(np.uint8).view(dtype)
        return np.where(np.isfinite(x.astype(np.float32)), x, np.asarray(0, dtype))
    x = random.standard_normal(shape) * most / 7
    if kind == "one sign":
        x = np.abs(x)
    if kind in ("wide", "few"):
        x *= 2.0 ** random.integers(-24, 1, shape)
    if kind == "few":
        x *= random.random(shape) < 0.05
    x = np.clip(x, -most, most).astype(dtype)
    if kind == "not finite":
        for bad in (np.nan, np.inf, -np.inf)[: 1 if dtype == FORMATS[0] else 3]:
            x[random.integers(0, shape[0]), random.integers(0, shape[1])] = bad
    return x


def same_bits(got, wanted):
    """Fails unless all float32 have the same bits. Any NaN equals any other NaN."""
    got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
    assert got.shape == wanted.shape
    different = (got.view(np.uint32) != wanted.view(np.uint32)) & ~(
        np.isnan(got) & np.isnan(wanted)
    )
    count = int(different.sum())
    assert not count, f"{count} of {got.size} differ: {got[different][:3]}, {wanted[different][:3]}"
