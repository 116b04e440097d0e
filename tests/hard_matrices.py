"""Matrices for kernels: every kind of tile, row and column in one array of a few tiles."""

import jax
import numpy as np


def hard(shape):
    """Rows and columns of very different sizes, and tiles with zeros, subnormals, ties, inf and NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp2(rng.uniform(-12, 12, (*shape[:-1], 1)) + rng.uniform(-12, 12, shape[-1]))
    corner = x[..., :128, :128]
    corner[...] = rng.choice([448.0, -449, 464, 1.0625, 0.0078125, 0], corner.shape)
    x[..., 128:256, :128] *= 1e-38
    x[..., 128:256, 128:256] = 0
    x = np.clip(x, -6e4, 6e4)  # what float16 holds
    x[..., 3, -3], x[..., 5, -56] = np.nan, -np.inf
    return x


def assert_same_bits(mine, reference):
    for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(
            np.asarray(ours).reshape(-1).view(np.uint8), np.asarray(theirs).reshape(-1).view(np.uint8)
        )
