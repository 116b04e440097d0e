"""Route: the way of tokens to the devices of their experts, and back.

A router chooses k experts for each token. A pair of a token and one of its experts is a choice.
Each device sorts its choices by expert. Its send buffer has C slots for each device of the mesh
axis that splits experts, so that one all-to-all of equal parts sends all of it. The slots that no
choice fills are empty. A device sorts the slots that it receives by expert, and the order of the
rows of an expert is that of devices, and then of tokens. So it does not depend on the number of
devices. The way back is the same in reverse, without a sort.

Letters: T tokens of a device, k choices of a token, E experts, D devices along the mesh axis, C
  slots for each of them, S = D * C slots.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._typing import Array, ArrayLike
from jaxfp8.numerics._formats import sum_dtype
from jaxfp8.sharding._amax import vary_as
from jaxfp8.sharding._place import in_bytes, take_rows


@register_node
@dataclasses.dataclass(frozen=True)
class Route:
    """The way of tokens to the devices of their experts, and back; see `fp8.moe.route`.

    Attributes:
      source: i32[S], the choice that is in each slot of the send buffer, counted over tokens and
        then their choices; T * k for an empty slot.
      slot: i32[T * k], the slot of each choice; S for a choice that is not sent.
      order: i32[S], the received slot that each row holds. Rows are sorted by expert, and empty
        slots come last. None if the slots are sorted: one device holds all experts.
      position: i32[S], the row that holds each received slot. None as above.
      expert: i32[S], the expert of each slot of the send buffer; E for an empty slot.
      sizes: i32[E / D], the rows of each expert of this device.
      dropped: i32[], how many choices of this device were dropped, for lack of slots.
      choices: k (static).
      experts: E (static).
      axis: the mesh axis that splits experts (static); None if this device holds all experts.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> route = fp8.moe.route(jnp.array([[2, 0], [0, 1]]), experts=3)
      >>> route.sizes, route.source  # both tokens chose expert 0
      (Array([2, 1, 1], dtype=int32), Array([1, 2, 3, 0], dtype=int32))
    """

    source: Array
    slot: Array
    order: Array | None
    position: Array | None
    expert: Array
    sizes: Array
    dropped: Array
    choices: int = dataclasses.field(metadata=STATIC)
    experts: int = dataclasses.field(metadata=STATIC)
    axis: str | None = dataclasses.field(metadata=STATIC)

    @classmethod
    def of(
        cls, chosen: Array, *, experts: int, axis: str | None, capacity_factor: float | None
    ) -> "Route":
        """The route of choices i32[T, k]. A number that is no expert is not sent."""
        tokens, choices = chosen.shape
        devices = 1 if axis is None else lax.axis_size(axis)
        here = experts // devices
        slots = _slot_count(tokens, choices, experts, devices, capacity_factor)
        wanted = chosen.reshape(-1)
        wanted = jnp.where((wanted >= 0) & (wanted < experts), wanted, experts).astype(jnp.int32)
        kept = wanted
        if slots < tokens * min(choices, here):
            kept = _first_choices(wanted, choices, here, slots, experts)
        by_expert = jnp.argsort(kept, stable=True).astype(jnp.int32)
        expert = jnp.take(kept, by_expert)
        device = jnp.minimum(expert // here, devices)
        place = _places(device, devices)
        total = devices * slots
        slot = jnp.where((device < devices) & (place < slots), device * slots + place, total)
        empty = vary_as(jnp.full(total, tokens * choices, jnp.int32), slot)
        source = empty.at[slot].set(by_expert, mode="drop")
        slot_of = jnp.zeros_like(slot).at[by_expert].set(slot)
        of_slots = kept.at[source].get(mode="fill", fill_value=experts)
        sent = jnp.sum(slot < total, dtype=jnp.int32)
        dropped = jnp.sum(wanted < experts, dtype=jnp.int32) - sent
        counts = _counts(of_slots, experts)
        order = position = None
        if axis is not None:
            # Slots are sorted by expert, so the numbers of rows say which expert each slot has.
            counts = lax.all_to_all(counts.reshape(devices, here), axis, 0, 0, tiled=True)
            ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)[:, :, None]
            received = jnp.arange(slots, dtype=jnp.int32)[None, None]
            mine = jnp.sum(ends <= received, axis=1, dtype=jnp.int32).reshape(-1)
            order = jnp.argsort(mine, stable=True).astype(jnp.int32)
            position = jnp.zeros_like(order).at[order].set(jnp.arange(total, dtype=jnp.int32))
            counts = jnp.sum(counts, axis=0, dtype=jnp.int32)
        return cls(
            source, slot_of, order, position, of_slots, counts, dropped, choices, experts, axis
        )

    @property
    def rows(self) -> int:
        """S, the number of rows, of which the first `sum(sizes)` hold a choice."""
        return self.source.shape[0]

    @property
    def tokens(self) -> int:
        """T."""
        return self.slot.shape[0] // self.choices

    @property
    def of_choices(self) -> "Route":
        """The route of values of choices [T * k, ...], instead of tokens [T, ...]."""
        return dataclasses.replace(self, choices=1)

    def packed(self, x: Array, fill: float = 0.0) -> Array:
        """The send buffer [S, ...] of values of tokens x [T, ...]. Empty slots have `fill`."""
        return take_rows(x, self.source // self.choices, fill)

    def exchanged(self, slots: Array) -> Array:
        """Sends slots [S, ...] to the devices of their experts, or from there back."""
        if self.axis is None:
            return slots
        axis = self.axis
        return in_bytes(lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True), slots)

    def in_order(self, slots: Array) -> Array:
        """Rows [S, ...], sorted by expert, of received slots [S, ...]."""
        return slots if self.order is None else jnp.take(slots, self.order, axis=0)

    def slot_of_row(self, row: Array) -> Array:
        """The received slot of each row; S for rows that do not exist."""
        if self.order is None:
            return row
        return self.order.at[row].get(mode="fill", fill_value=self.rows)

    def to_experts(self, x: Array) -> Array:
        """Rows [S, ...] of the experts of this device, of tokens x [T, ...]."""
        return self.in_order(self.exchanged(self.packed(x)))

    def to_tokens(self, rows: Array) -> Array:
        """Tokens [T, ...], each the sum of its rows, of rows [S, ...]. It reverses `to_experts`.

        A sum is in float32, and in the order of choices.
        """
        slots = rows if self.position is None else jnp.take(rows, self.position, axis=0)
        found = self.exchanged(slots).at[self.slot].get(mode="fill", fill_value=0)
        if self.choices == 1:
            return found
        each = found.reshape(-1, self.choices, *found.shape[1:])
        wide = sum_dtype(found.dtype)
        total = each[:, 0].astype(wide)
        for choice in range(1, self.choices):
            total += each[:, choice].astype(wide)
        return total.astype(found.dtype)


def _slot_count(
    tokens: int, choices: int, experts: int, devices: int, capacity_factor: float | None
) -> int:
    """C, the slots of a device's send buffer for each device."""
    # A token sends no more choices to a device than that device has experts.
    most = tokens * min(choices, experts // devices)
    if capacity_factor is None:
        return most
    return min(most, math.ceil(capacity_factor * tokens * choices / devices))


def _first_choices(wanted: Array, choices: int, here: int, slots: int, experts: int) -> Array:
    """The experts of choices, [T * k], without those that find no slot: E in their place.

    First choices find a slot before second choices, and earlier tokens before later ones.
    """
    device = (wanted // here).reshape(-1, choices).T.reshape(-1)
    by_device = jnp.argsort(device, stable=True)
    place = _places(jnp.take(device, by_device), experts // here)
    fits = jnp.zeros(device.shape, bool).at[by_device].set(place < slots)
    fits = fits.reshape(choices, -1).T.reshape(-1)
    return jnp.where(fits, wanted, experts)


def _places(device: Array, devices: int) -> Array:
    """For each entry of an ascending array i32[n], how many entries before it are equal to it."""
    counts = _counts(device, devices + 1)
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts
    return jnp.arange(device.shape[0], dtype=jnp.int32) - jnp.take(first, device)


def _counts(expert: Array, experts: int) -> Array:
    """i32[E], how often each expert occurs."""
    each = jnp.arange(experts, dtype=jnp.int32)
    return jnp.sum(expert[None, :] == each[:, None], axis=1, dtype=jnp.int32)


def _linear(
    forward: Callable[[Route, Array], Array], backward: Callable[[Route, Array], Array]
) -> Callable[[Route, Array], Array]:
    """A linear function of an array, whose transpose is another one: no scatter, no sort."""

    @jax.custom_vjp
    def apply(route: Route, x: Array) -> Array:
        return forward(route, x)

    def transposed(route: Route, cotangent: Array) -> tuple[None, Array]:
        return None, backward(route, cotangent)

    apply.defvjp(lambda route, x: (forward(route, x), route), transposed)
    return apply


_dispatch = _linear(Route.to_experts, Route.to_tokens)
_combine = _linear(Route.to_tokens, Route.to_experts)


def dispatch(route: Route, x: ArrayLike) -> Array:
    """Sends an array in high precision to its experts: `route.to_experts` with a gradient.

    Args:
      route: the way, from `fp8.moe.route`.
      x: [T, ...], values of tokens. With `route.of_choices`: of choices, [T * k, ...].

    Returns:
      [S, ...], rows of the experts of this device, sorted by expert, 0 behind them.

    Raises:
      ValueError: for another number of values than the route has tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> way = fp8.moe.route(jnp.array([[1], [0]]), experts=2)
      >>> dispatch(way, jnp.array([5.0, 7.0]))
      Array([7., 5.], dtype=float32)
    """
    x = _checked("fp8.moe.dispatch", x, route.tokens, "values of tokens", route)
    return _dispatch(route, vary_as(x, route.slot))  # x may be the same on some devices


def combine(route: Route, rows: ArrayLike) -> Array:
    """Sends rows of experts back, and sums those of each token: `route.to_tokens` with a gradient.

    Args:
      route: the way, from `fp8.moe.route`.
      rows: [S, ...], in the order that `dispatch` gives.

    Returns:
      [T, ...], in the dtype of the rows. A sum is in float32, and in the order of choices.

    Raises:
      ValueError: for another number of rows than the route has.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> way = fp8.moe.route(jnp.array([[1, 0], [0, 1]]), experts=2)
      >>> combine(way, jnp.array([1.0, 2.0, 10.0, 20.0]))  # of experts 0, 0, 1 and 1
      Array([11., 22.], dtype=float32)
    """
    rows = _checked("fp8.moe.combine", rows, route.rows, "rows of experts", route)
    return _combine(route, vary_as(rows, route.slot))


def _checked(function: str, given: ArrayLike, count: int, what: str, route: Route) -> Array:
    x = jnp.asarray(given)
    if x.ndim and x.shape[0] == count:
        return x
    of_choices = ""
    if route.choices > 1 and what == "values of tokens":
        of_choices = (
            f" For a value of each choice, [{route.slot.shape[0]}, ...], pass route.of_choices."
        )
    raise ValueError(
        f"{function} takes {what}, [{count}, ...] for this route, but got shape {list(x.shape)}."
        f"{of_choices}"
    )
