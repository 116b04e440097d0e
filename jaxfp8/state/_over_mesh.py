"""Amaxes over the mesh: the maximum over all devices that must agree on a state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.sharding._amax import manual_axes, pmax, types_tell, varying
from jaxfp8.state._state import MatmulState


def axes_named(reduce_axes: Sequence[str] | None) -> tuple[str, ...] | None:
    """The argument `reduce_axes=` as a tuple.

    Raises:
      TypeError: if it is one name, and not a sequence of names.

    Example:
      >>> axes_named(["data"])
      ('data',)
    """
    if isinstance(reduce_axes, str):
        raise TypeError(
            f"reduce_axes={reduce_axes!r} must be a sequence of mesh axis names; write "
            f"({reduce_axes!r},)."
        )
    return None if reduce_axes is None else tuple(reduce_axes)


def vary_everywhere(ledger: Array) -> Array:
    """The ledger, with a type that varies over all manual mesh axes.

    Backward rules then emit no collective for its cotangent. `over_mesh` follows at the end.

    Example:
      >>> import jax.numpy as jnp
      >>> vary_everywhere(jnp.float32(0.0))
      Array(0., dtype=float32)
    """
    missing = tuple(sorted(set(manual_axes()) - varying(ledger))) if types_tell() else ()
    return lax.pcast(ledger, missing, to="varying") if missing else ledger


def over_mesh(
    amaxes: list[Array], states: list[MatmulState], named: tuple[str, ...] | None
) -> list[Array]:
    """The amaxes over all devices that must agree on them.

    Amaxes of one type that span the same mesh axes share one `pmax`.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = fp8.init_state(fp8.recipes.delayed())
      >>> over_mesh([state.scale], [state], None)
      [Array([0., 0., 0.], dtype=float32)]
    """
    spans: dict[Any, list[int]] = {}
    for i, (amax, state) in enumerate(zip(amaxes, states, strict=True)):
        if types_tell():
            axes = varying(amax) - varying(state.scale)
        else:
            axes = frozenset(named or ()) & frozenset(manual_axes())
        if axes:
            spans.setdefault((axes, jax.typeof(amax)), []).append(i)
    largest = list(amaxes)
    for (axes, _), places in spans.items():
        together = pmax(jnp.stack([amaxes[i] for i in places]), axes)
        for i, amax in zip(places, together, strict=True):
            largest[i] = amax
    return largest
