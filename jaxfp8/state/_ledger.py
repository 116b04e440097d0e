"""The ledger: how an amax crosses the backward pass without being summed away.

JAX adds the cotangents of a value that is used more than once, and an amax that is added is wrong.
So the cotangent of a state's probe is no amax but a vector of magnitude bins: the amax stands in
its own bin, all others are 0. Adding ledgers never empties a bin, hence the highest bin is always
right. Within a bin a single entry comes back exactly; a sum of several is cut off at the bin's
upper edge, at most 1/8 above the true maximum and never below it. Edges lie at eighths of an
octave, so that all amaxes of a bin ask for the same power-of-two multiplier (448 and 57344 are 1.75
times a power of two).

A ledger has shape [..., BINS, R] for the R rows of a state: bins come before rows. States must be
stacked along leading axes, because `commit` would read another axis as rows. A loss that maps
states over another axis maps the 1024 bins instead of its layers, so JAX or the matmul raises an
error. This works even if there are as many layers as rows, where the shapes of the state do not
show the mistake.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._granularity import PerAxis, PerTensor

BINS = 1024
"""8 bins an octave from 2^-64 to 2^64.

The first and the last are open towards zero and infinity.
"""
_BINS_PER_OCTAVE_BITS = 3
_SHIFT = 23 - _BINS_PER_OCTAVE_BITS
_FIRST = (127 - 64) << _BINS_PER_OCTAVE_BITS
_EDGES = ((np.arange(1, BINS) + _FIRST) << _SHIFT).astype(np.int32).view(np.float32)
UPPER_EDGES = np.append(_EDGES, np.float32(np.inf))  # inclusive


def encode(amaxes: Array) -> Array:
    """Ledgers [..., BINS, R] of amaxes [..., R].

    Not finite -> inf in the last bin, 0 -> all bins 0.

    Example:
      >>> import jax.numpy as jnp
      >>> encode(jnp.float32([3.0, 0.5])).shape
      (1024, 2)
    """
    amaxes = jnp.where(jnp.isfinite(amaxes), amaxes, jnp.inf)[..., None, :]
    # Bin of an amax: its exponent and leading three bits, (lo, hi].
    bins = ((lax.bitcast_convert_type(amaxes, jnp.int32) - 1) >> _SHIFT) - _FIRST
    shape = (*amaxes.shape[:-2], BINS, amaxes.shape[-1])
    here = lax.broadcasted_iota(jnp.int32, shape, amaxes.ndim - 2) == jnp.clip(bins, 0, BINS - 1)
    return jnp.where(here, amaxes, jnp.float32(0.0))


def decode(ledgers: Array) -> Array:
    """Amaxes [..., R] of sums of ledgers [..., BINS, R]; 0 = nothing seen, inf = not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> decode(encode(jnp.float32([3.0])) + encode(jnp.float32([0.5])))
      Array([3.], dtype=float32)
    """
    edges = UPPER_EDGES.reshape((1,) * (ledgers.ndim - 2) + (-1, 1))
    return jnp.max(jnp.minimum(ledgers, edges), axis=-2)


def observe(x: Array, like: Array) -> Array:
    """The amax of x [...] as the state sees it, of the shape of `like` [].

    Under vmap, an axis that x has and the state has not (examples) is one more axis to take the
    maximum over; an axis that both have (experts, stacked layers) is kept.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jax.vmap(observe, in_axes=(0, None))(jnp.array([[1.0], [-5.0]]), jnp.float32(0.0))
      Array([5., 5.], dtype=float32)
    """
    return _observe(0)(x, like)


@functools.cache
def _observe(kept: int) -> Callable[[Array, Array], Array]:
    """`observe` for an x and a `like` whose first `kept` axes are stacked states."""

    @custom_vmap
    def observed(x: Array, like: Array) -> Array:
        if not kept:
            return amax(x, PerTensor())
        return jnp.squeeze(amax(x, PerAxis(*range(kept))), axis=tuple(range(kept, x.ndim)))

    @observed.def_vmap
    def batched(size: int, mapped: list[bool], x: Array, like: Array) -> tuple[Array, bool]:
        del size
        x_mapped, like_mapped = mapped
        if not like_mapped:
            return observed(jnp.moveaxis(x, 0, kept), like), False
        if not x_mapped:
            return observed(x, like[0])[None] + jnp.zeros_like(like), True
        return _observe(kept + 1)(x, like), True

    return observed
