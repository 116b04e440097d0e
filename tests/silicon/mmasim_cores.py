"""Tensor cores by MMA-Sim (arXiv 2511.10909), in the arrays of this library."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `silicon` brings it")
sim = pytest.importorskip("mmasim.nv_ptx.sim", reason="the extra `silicon` brings it")

NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}
TYPES = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}
torch.set_num_threads(1)  # beside the workers of pytest
K = 32  # of one instruction with FP8 operands


def as_torch(x):
    """The same bits; float4 as bytes, two values in each."""
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.float4_e2m1fn:
        bits = x.view(np.uint8) & 15
        return torch.from_numpy(bits[..., 0::2] << 4 | bits[..., 1::2])
    if x.dtype.itemsize == 1:
        return torch.from_numpy(x.view(np.uint8)).view(TYPES[x.dtype.name])
    return torch.from_numpy(x)


def _in_order(operation, lhs, rhs, sums):
    """All of K, one instruction after the other."""
    a, b, c = as_torch(lhs), as_torch(rhs), as_torch(sums)
    every = a[:, None].expand(-1, len(b), -1), b[None].expand(len(a), -1, -1)
    for first in range(0, lhs.shape[1], K):
        c = operation.dpa(*(x[..., first : first + K] for x in every), c)
    return c.numpy()


def hopper(lhs, rhs, sums):
    """`sums + lhs @ rhs.T` by `wgmma`, [M, N]. The shape of an instruction changes no bit."""
    kinds = f"{NAMES[lhs.dtype.name]}.{NAMES[rhs.dtype.name]}"
    return _in_order(sim.WGMMA("Hopper", f"m64n256k32.f32.{kinds}"), lhs, rhs, sums)


def blackwell(lhs, rhs, sums):
    """`sums + lhs @ rhs.T` by `tcgen05.mma`."""
    kinds = f"{NAMES[lhs.dtype.name]}.{NAMES[rhs.dtype.name]}"
    name = f"m128n256k32.kind::f8f6f4.f32.{kinds}"
    return _in_order(sim.TCGen05MMA("Blackwell", name), lhs, rhs, sums)


def blackwell_scaled(lhs, rhs, sums, of_lhs, of_rhs, *, kind, block, k):
    """The same with scales [M, K / block] and [N, K / block], by `tcgen05.mma.block_scale`."""
    kinds = f"{NAMES[lhs.dtype.name]}.{NAMES[rhs.dtype.name]}"
    scale = {"float8_e8m0fnu": "ue8m0", "float8_e4m3fn": "ue4m3"}[of_lhs.dtype.name]
    name = f"m128n256k{k}.kind::{kind}.block{block}.f32.{kinds}.{scale}"
    operation = sim.TCGen05MMABlockScale("Blackwell", name)
    c = as_torch(sums)
    for first in range(0, lhs.shape[1], k):
        along, cells = slice(first, first + k), slice(first // block, (first + k) // block)
        a, b, s, t = (
            as_torch(x) for x in (lhs[:, along], rhs[:, along], of_lhs[:, cells], of_rhs[:, cells])
        )
        c = operation.dpa(
            a[:, None].expand(-1, len(b), -1),
            b[None].expand(len(a), -1, -1),
            c,
            s[:, None].expand(-1, len(t), -1),
            t[None].expand(len(s), -1, -1),
        )
    return c.numpy()
