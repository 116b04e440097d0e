"""The arrays of one call of a matmul, which JAX traces and differentiates."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from jaxfp8._typing import Array
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.ops._residuals import Copy
from jaxfp8.ops._rows import Rows


@functools.partial(jax.tree_util.register_dataclass, data_fields=["amaxes"], meta_fields=["keys"])
@dataclasses.dataclass(frozen=True)
class KnownAmaxes:
    """Amaxes of a tensor that were found before: a second cast does not look for them.

    Attributes:
      keys: for each amax, the row of state (None without one) and the granularity (static).
      amaxes: f32[...], in the shape of the scale.
    """

    keys: tuple[tuple[int | None, AbstractGranularity], ...] = ()
    amaxes: tuple[Array, ...] = ()


class QuantizerArrays(NamedTuple):
    """The arrays that quantizers need besides a tensor: the state, with R rows, and the key.

    Attributes:
      known: f32[2, R], multiplier and scale of each row (`state._identity.known_scales`); None for
        recipes without state.
      ledger: f32[BINS, R], the ledger that collects amaxes (`state._ledger`); None without one.
      key: a jax PRNG key, or None.
      amaxes: amaxes of the tensor that are known.
    """

    known: Array | None = None
    ledger: Array | None = None
    key: Array | None = None
    amaxes: KnownAmaxes = KnownAmaxes()


class HeldCopies(NamedTuple):
    """The FP8 copies of a weight that the model holds, so that no matmul casts it.

    Attributes:
      copies: a copy for each direction, with its scale.
      seen: f32[W], the amax of the weight for each of its W rows of state; None without state.
    """

    copies: tuple[Copy, ...]
    seen: Array | None


class Arrays(NamedTuple):
    """The arrays of a call. A field is None if the call has no such array.

    Attributes:
      x: activations [...]. With a prologue, the array that it makes; the gradient flows to it.
      w: weights [...]. With `held` nobody reads them, and only the gradient flows to them.
      bias: [batch axes, axes that w keeps].
      parts: the arrays that the prologue makes x from.
      quantizers: the state and the key.
      held: the FP8 copies of w, if the model holds them.
      rows: which rows of x belong to which matrix of w, for a grouped matmul.
    """

    x: Array
    w: Array
    bias: Array | None
    parts: tuple[Array, ...] | None
    quantizers: QuantizerArrays
    held: HeldCopies | None = None
    rows: Rows | None = None
