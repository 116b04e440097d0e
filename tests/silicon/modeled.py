"""Interpreted kernels whose tensor cores are a model, in place of NumPy's matmul."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import predicted
from interpreter import interpreted

from jaxfp8.kernels.scaled_matmul.hopper import _consumer


class _Product:
    """`lhs @ rhs`, computed when the interpreter adds it to an accumulator."""

    __array_ufunc__ = None  # NumPy leaves `accumulator + self` to this class

    def __init__(self, lhs, rhs, counted):
        self.lhs, self.rhs, self.counted = np.asarray(lhs), np.asarray(rhs), counted

    def __radd__(self, accumulator):
        self.counted.append(self.lhs.shape)
        return predicted.hopper(self.lhs, self.rhs.T, np.asarray(accumulator))


class _NumPy:
    """The NumPy of the interpreter, but for its matmul."""

    def __init__(self, counted):
        self.counted = counted

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, lhs, rhs, dtype=None):
        assert dtype == np.float32, "the accumulators of `wgmma` are float32 here"
        return _Product(lhs, rhs, self.counted)


def on_host(function):
    """The function of NumPy arrays, in a kernel that is interpreted. Its result is like sums."""

    def in_kernel(sums, *others):
        whole = [jnp.broadcast_to(x, sums.shape) for x in others]
        shape = jax.ShapeDtypeStruct(sums.shape, jnp.float32)
        numpy = lambda *arrays: function(*map(np.asarray, arrays))
        return jax.pure_callback(numpy, shape, sums, *whole, vmap_method="sequential")

    return in_kernel


# `_consumer._plus_scaled` rounded once, as the compiled kernel rounds it (FFMA).
plus_scaled = on_host(predicted.fused)


@contextlib.contextmanager
def tensor_cores():
    """Kernels that are interpreted in this context multiply as Hopper does, and yields a count."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    counted = []
    with (
        mock.patch.object(gpu_callbacks, "np", _NumPy(counted)),
        mock.patch.object(_consumer, "_plus_scaled", plus_scaled),
    ):
        yield counted
    assert counted, "no `wgmma` was interpreted"


def bits(function, *arguments):
    """The result of a kernel whose tensor cores are modeled."""
    with tensor_cores():
        return np.asarray(interpreted(function, *arguments))
