"""The ledger: the form in which an amax leaves the backward pass, so that sums cannot change it.

JAX adds the cotangents of a value that is used more than once. A sum of amaxes is not their
maximum. So the cotangent of a state's probe is not an amax but a ledger, a vector of magnitude
bins. The amax is written to the bin of its magnitude. All other bins are 0.

Adding ledgers never empties a bin, so the highest bin that is not 0 is always the right one. If one
amax was added to a bin, it is read back exactly. If several were, their sum is limited to the upper
edge of the bin. The result is never below the true maximum, and at most 1/8 above it.

Bins have 8 edges per octave. 448 and 57344, the largest values of E4M3 and E5M2, are 1.75 times a
power of two. So they are edges, and all amaxes of a bin give the same power-of-two multiplier.

A ledger has shape [..., BINS, R] for the R rows of a state: bins come before rows. States must be
stacked along leading axes, because `commit` would read another axis as rows. A loss may map states
over another axis by mistake. Then it maps the 1024 bins instead of its layers, so JAX or the matmul
raises an error. If there are as many layers as rows, the shapes of the state do not show the
mistake, but the ledger does.

Here are also `fork`, for two uses of a state, and the maximum over the mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array, FP8StateError, PyTree
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._exact import TINY
from jaxfp8.numerics._granularity import PerAxis, PerTensor
from jaxfp8.sharding._amax import manual_axes, pmax, types_show_varying, vary_as, varying_axes
from jaxfp8.state._state import MatmulState, is_state, map_states

BINS = 1024
"""8 bins per octave from 2^-64 to 2^64.

The first bin also holds smaller amaxes, the last bin larger ones.
"""
# The bin of a float32 is its exponent and its leading 3 mantissa bits, counted from that of 2^-64.
_BINS_PER_OCTAVE_BITS = 3
_SHIFT = 23 - _BINS_PER_OCTAVE_BITS
_FIRST = (127 - 64) << _BINS_PER_OCTAVE_BITS
_EDGES = ((np.arange(1, BINS) + _FIRST) << _SHIFT).astype(np.int32).view(np.float32)
_UPPER_EDGES = np.append(_EDGES, np.float32(np.inf))  # an amax on an edge is in the bin below it
# An amax below 2^-126 counts as 0, and is in no bin.
_LOWER_EDGES = np.insert(_EDGES, 0, np.nextafter(np.float32(TINY), np.float32(0)))


@jax.jit  # traced once for each number of rows
def encode(amaxes: Array) -> Array:
    """Ledgers [..., BINS, R] of amaxes [..., R].

    An amax of inf, which stands for NaN, too, is in the last bin. An amax of 0 or below 2^-126
    leaves all bins at 0.
    """
    amaxes = amaxes[..., None, :]
    lower, upper = (_along_bins(edges, amaxes.ndim) for edges in (_LOWER_EDGES, _UPPER_EDGES))
    return jnp.where((lower < amaxes) & (amaxes <= upper), amaxes, jnp.float32(0.0))


def decode(ledgers: Array) -> Array:
    """Amaxes [..., R] of sums of ledgers [..., BINS, R].

    0 means that nothing was seen. inf means that an amax was not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> decode(encode(jnp.float32([3.0])) + encode(jnp.float32([0.5])))
      Array([3.], dtype=float32)
    """
    # A single entry is at most its edge, so `minimum` keeps it exactly. It limits sums only.
    return jnp.max(jnp.minimum(ledgers, _along_bins(_UPPER_EDGES, ledgers.ndim)), axis=-2)


def _along_bins(edges: np.ndarray, ndim: int) -> np.ndarray:
    return edges.reshape((1,) * (ndim - 2) + (-1, 1))


def observe(x: Array, like: Array) -> Array:
    """The amax of x [...] for a row of state, with the shape of `like` [].

    `like` is an entry of the ledger. Under vmap, x may have a mapped axis that the state does not
    have, for instance examples. The maximum is then taken over that axis, too. An axis that both
    have, for instance experts or stacked layers, is kept.
    """
    return _observe(0)(x, like)


@functools.cache
def _observe(kept: int) -> Callable[[Array, Array], Array]:
    """`observe` for an x and a `like` whose first `kept` axes are stacked states."""

    @custom_vmap
    def observed(x: Array, like: Array) -> Array:
        largest = amax(x, PerAxis(*range(kept)) if kept else PerTensor())
        largest = jnp.squeeze(largest, axis=tuple(range(kept, largest.ndim)))
        # Devices may hold other states, of experts for instance, and the same tensor. The rule
        # below gives one amax to each state, so the result varies as the states do.
        return vary_as(largest, like)

    @observed.def_vmap
    def batched(size: int, mapped: list[bool], x: Array, like: Array) -> tuple[Array, bool]:
        del size
        x_mapped, like_mapped = mapped
        if not like_mapped:
            # One state for all examples: the mapped axis becomes an axis of the maximum.
            return observed(jnp.moveaxis(x, 0, kept), like), False
        if not x_mapped:
            # One tensor for several states: each of them sees the same amax.
            return observed(x, like[0])[None] + jnp.zeros_like(like), True
        return _observe(kept + 1)(x, like), True

    return observed


# Probes, which a state has inside a differentiated loss: add them, remove them, fork a state.


@jax.custom_vjp
def _split(ledger: Array) -> tuple[Array, Array]:
    return ledger, ledger


# JAX would add the two ledgers. Their maximum loses no amax, and is exact.
_split.defvjp(
    lambda ledger: ((ledger, ledger), None), lambda _, cotangents: (jnp.maximum(*cotangents),)
)


def fork(state: PyTree) -> tuple[PyTree, PyTree]:
    """Two handles on one state, for a layer that is used twice.

    Pass one handle to each use. The state then gets the exact maximum of both amaxes. In a loop,
    carry one handle and use the other.

    Without `fork`, JAX adds the ledgers of several uses. The amax that is read from the sum is
    never below the true maximum, and at most 1/8 above it.

    Args:
      state: a tree of states.

    Returns:
      Two trees of the same structure as `state`.

    Example:
      >>> import jaxfp8 as fp8
      >>> first, second = fp8.fork(fp8.init_state(fp8.recipes.delayed()))
    """

    def one(s: MatmulState) -> tuple[MatmulState, MatmulState]:
        if s.probe is None or s.probe.ledger is None:
            return s, s
        handles = (dataclasses.replace(s.probe, ledger=ledger) for ledger in _split(s.probe.ledger))
        first, second = (dataclasses.replace(s, probe=probe) for probe in handles)
        return first, second

    states, structure = jax.tree.flatten(state, is_leaf=is_state)
    pairs = map_states(one, states)
    first, second = (jax.tree.unflatten(structure, [pair[i] for pair in pairs]) for i in (0, 1))
    return first, second


def zero_ledgers(state: PyTree) -> PyTree:
    """Zeros f32[..., BINS, R], stacked and sharded as the states, and varying over their axes."""

    def one(s: MatmulState) -> Array:
        *stacked, rows = s.scale.shape
        # Multiplied from the scale, because `jnp.zeros` would have another sharding and type.
        return jnp.broadcast_to(s.scale[..., None, :] * 0, (*stacked, BINS, rows))

    return map_states(one, state)


# Amaxes over the mesh: the maximum over all devices that must agree on a state.


def read_reduce_axes(reduce_axes: Sequence[str] | None) -> tuple[str, ...] | None:
    """The argument `reduce_axes=` as a tuple. TypeError if it is one name."""
    if isinstance(reduce_axes, str):
        raise TypeError(
            f"reduce_axes={reduce_axes!r} must be a sequence of mesh axis names; write "
            f"({reduce_axes!r},)."
        )
    return None if reduce_axes is None else tuple(reduce_axes)


def check_named(named: tuple[str, ...] | None, argument: str) -> None:
    """Raise FP8StateError if neither types nor `reduce_axes=` give the axes of a reduction."""
    if named is None and not types_show_varying():
        raise FP8StateError(
            f"inside shard_map(check_vma=False) or pmap over {manual_axes()} types do not say over "
            "which mesh axes an amax is reduced. Name the axes, all but those of pipeline stages: "
            f"{argument}."
        )


def reduce_over_mesh(
    amaxes: list[Array], states: list[MatmulState], named: tuple[str, ...] | None
) -> list[Array]:
    """The amaxes over all devices that must agree on them.

    Amaxes of one type that span the same mesh axes share one `pmax`.
    """
    spans: dict[Any, list[int]] = {}
    for i, (own, state) in enumerate(zip(amaxes, states, strict=True)):
        if types_show_varying():
            axes = varying_axes(own) - varying_axes(state.scale)
        else:
            axes = frozenset(named or ()) & frozenset(manual_axes())
        if axes:
            spans.setdefault((axes, jax.typeof(own)), []).append(i)
    largest = list(amaxes)
    for (axes, _), places in spans.items():
        together = pmax(jnp.stack([amaxes[i] for i in places]), axes)
        for i, joint in zip(places, together, strict=True):
            largest[i] = joint
    return largest
