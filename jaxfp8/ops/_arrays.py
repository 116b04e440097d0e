"""The arrays of one call of a matmul, which JAX traces and differentiates."""

from typing import NamedTuple

from jaxfp8._typing import Array


class QuantizerArrays(NamedTuple):
    """The arrays that quantizers need besides a tensor: the state, with R rows, and the key.

    Attributes:
      known: f32[2, R], multiplier and scale of each row (`state._identity.known_scales`); None for
        recipes without state.
      ledger: f32[BINS, R], the ledger that collects amaxes (`state._ledger`); None without one.
      key: a jax PRNG key, or None.
    """

    known: Array | None = None
    ledger: Array | None = None
    key: Array | None = None


class Arrays(NamedTuple):
    """The arrays of a call. A field is None if the call has no such array.

    Attributes:
      x: activations [...]. With a prologue, the array that it makes; the gradient flows to it.
      w: weights [...].
      bias: [batch axes, axes that w keeps].
      parts: the arrays that the prologue makes x from.
      quantizers: the state and the key.
    """

    x: Array
    w: Array
    bias: Array | None
    parts: tuple[Array, ...] | None
    quantizers: QuantizerArrays
