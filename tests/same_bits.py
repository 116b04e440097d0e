"""Trees that are equal to the bit."""

import jax
import numpy as np


def assert_same_bits(mine, reference):
    for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(
            np.asarray(ours).reshape(-1).view(np.uint8),
            np.asarray(theirs).reshape(-1).view(np.uint8),
        )
