"""Operands, sizes and recipes of the tests of `fp8.ragged_dot`, and its oracle."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8 as fp8

K, N = 136, 72  # no multiples of 32
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise_high": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "float32_scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "identity": fp8.recipes.identity(),
}
SIZES = {
    "some_empty": [0, 37, 0, 130, 5],
    "all_in_one": [0, 0, 200, 0, 0],
    "none": [0, 0, 0, 0, 0],
    "full": [40, 40, 40, 40, 40],
    "one_row": [1, 0, 1, 128, 70],
}
T, E = 200, 5


def arrays(seed=0, dtype=jnp.bfloat16, t=T, e=E, k=K, n=N):
    """x [t, k], w [e, k, n] and g [t, n], of NumPy: it compiles nothing."""
    normal = np.random.default_rng(seed).standard_normal
    x = normal((t, k)) * np.exp(2 * normal((t, 1)))
    w = normal((e, k, n)) * np.arange(1.0, e + 1)[:, None, None]
    g = normal((t, n)) * 1e-3
    return x.astype(dtype), w.astype(dtype), g.astype(dtype)


def loop(x, w, sizes, recipe, states=None):
    """The rows of each group by `fp8.dot`, one group after the other. Empty groups are left out."""
    y = jnp.zeros((x.shape[0], w.shape[2]), jnp.promote_types(x.dtype, w.dtype))
    start = 0
    for e, size in enumerate(sizes):
        if size:
            rows = slice(start, start + size)
            state = None if states is None else states[e]
            y = y.at[rows].set(fp8.dot(x[rows], w[e], recipe=recipe, state=state))
        start += size
    return y


def close(got, want, bound=2e-2):
    """A bfloat16 result may differ by a last bit, because float32 sums have another order."""
    got, want = (np.asarray(each, np.float64) for each in (got, want))
    assert np.isfinite(got).all()
    size = np.linalg.norm(want)
    assert np.linalg.norm(got - want) <= bound * 2e-1 * size + 1e-30, (
        np.linalg.norm(got - want) / size
    )


def cotangents(function, x, w, g):
    y, pull = jax.vjp(function, x, w)
    return (y, *pull(g))


def clear(x, sizes, value):
    """`x` with a value in the rows of no group."""
    return np.where((np.arange(len(x)) < sum(sizes))[:, None], x, np.asarray(value, x.dtype))


def stacked(state, e=E):
    """A state of each group."""
    return jax.tree.map(lambda leaf: np.stack([leaf] * e), state)
