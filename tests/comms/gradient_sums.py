"""Sums of gradients a second time, in NumPy, and the meshes on which the package computes them.

The first functions do not use jaxfp8. Gradients are [devices, ...], one of each device.
"""

import functools

import jax
import numpy as np
import oracle
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

MAX = float(np.finfo(np.float32).max)


def two_phase(grads, *, group=128, rule="power_of_two", fmt="E4M3", mean=True):
    """(the slice of each device in float32 [devices, n], the gathered sum like a gradient)"""
    devices, *shape = grads.shape
    flat = grads.reshape(devices, -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % (devices * group))))
    first = dequantized(flat, group, rule, fmt)
    total = first[0]
    for other in first[1:]:
        total = total + other
    total = (total * np.float32(1 / devices if mean else 1)).reshape(devices, -1)
    whole = dequantized(total, group, rule, fmt).reshape(-1)
    return total, whole[: np.prod(shape)].reshape(shape)


def dequantized(x, group, rule, fmt):
    """x [rows, n] in float32, after a cast in groups. A group with inf or NaN is NaN."""
    values, scale = oracle.quantize_tiles(x, fmt, (1, group), rule)
    result = oracle.dequantize_tiles(values, fmt, scale, (1, group), np.float32)
    return np.where(
        np.repeat(np.isfinite(oracle.tile_amax(x, (1, group))), group, 1), result, np.nan
    )


def multiplier_of(grads, mu=1.0, *, scaling="auto", power_of_two=True, fmt="E4M3"):
    """The smallest multiplier of the devices, times mu, or divided by their number."""
    amaxes = [oracle.amax(g, None) for g in grads]
    # A device with zeros only takes any multiplier, so it does not have a say.
    amaxes = [amax for amax in amaxes if amax >= oracle.TINY] or [0.0]
    each = [oracle.multiplier(amax, fmt, power_of_two=power_of_two) for amax in amaxes]
    factor = {"auto": np.float32(mu), "pre": np.float32(1 / len(grads)), "post": np.float32(1)}
    return np.float32(min(each)) * factor[scaling]


def auto_scaled(grads, mu=1.0, *, mean=True, fmt="E4M3", **how):
    """(the sum, how many values were clipped, how many became zero on all devices)

    A sum beyond float32 is clipped, too. A result below 2^-126 is zero for all devices.
    """
    m = multiplier_of(grads, mu, fmt=fmt, **how)
    payload = oracle.cast(grads, m, fmt).view(oracle.DTYPE[fmt]).astype(np.float32)
    total = payload[0]
    for other in payload[1:]:
        total = total + other
    largest = oracle.LARGEST[fmt]
    clipped = np.sum(np.abs(oracle.scaled(grads, m)) > largest) + np.sum(np.abs(total) > largest)
    zeros = np.sum((grads != 0) & (payload == 0))
    rounded = oracle.nearest_codes(total, fmt).view(oracle.DTYPE[fmt]).astype(np.float32)
    if mean:
        rounded = rounded * np.float32(1 / len(grads))
    result = rounded.astype(np.float64) * oracle.inverse(m).astype(np.float64)
    lost = np.abs(result) < oracle.TINY
    zeros += len(grads) * np.sum(lost & (total != 0))
    clipped += 0 if mean else np.sum(np.abs(result) > MAX)
    return np.float32(np.clip(np.where(lost, 0 * result, result), -MAX, MAX)), clipped, zeros


def heavy_tailed(*shape, seed=0):
    """Gradients of Student's t distribution with 3 degrees of freedom, each device its own."""
    return (np.random.default_rng(seed).standard_t(3, shape) * 1e-3).astype(np.float32)


def mesh_of(**sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def on_devices(function, mesh, names, *, vma=True, out=None):
    """`function(gradient of this device, *replicated)`, of gradients [devices, ...], jitted."""

    def local(grads, *replicated):
        return function(jax.tree.map(lambda g: g[0], grads), *replicated)

    def call(grads, *replicated):
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(names), *(P() for _ in replicated)),
            out_specs=P() if out is None else out,
            check_vma=vma,
        )
        return mapped(grads, *replicated)

    return jax.jit(call)


def reduced(grads, mesh, names, *, vma=True, **options):
    """`all_reduce_gradients` of gradients [devices, ...].

    With types the result is one array, because they show that all devices have the same. Without
    types it is [devices, ...], what each of them has.
    """

    state = options.pop("state", None)
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return _reducing(mesh, names, vma, tuple(options.items()))(grads, state)


@functools.cache
def _reducing(mesh, names, vma, options):
    """The program for gradients of one shape. Their values are its arguments."""

    def local(g, state):
        return fp8.comms.all_reduce_gradients(g, names, state=state, **dict(options))

    def each(g, state):
        return jax.tree.map(lambda leaf: leaf[None], local(g, state))

    if vma:
        return on_devices(local, mesh, names)
    return on_devices(each, mesh, names, vma=False, out=P(names))
