"""The operands of grouped matmuls: rows in tiles, and one matrix for each group.

Each group is quantized as if it stood alone. A tile of rows is cast by itself (`jax.vmap`), and so
is the matrix of a group. Only an amax that spans all rows of a group joins tiles: the largest of
its tiles. Rows for other devices are cast first, and sent in FP8.

Letters: T rows or tokens, k choices of a token, S slots, E groups (experts), P rows of a tile,
  R tiles; K N the axes of matrices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Matmul, Tensor
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.matmul._arrays import Copy, QuantizerArrays, Rows, name_residuals, stored_scale
from jaxfp8.matmul._call import Call
from jaxfp8.matmul._operands import Quantized, Seen, by_reader, rounding_key
from jaxfp8.matmul._stats import CastStats, cast_stats
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._granularity import AbstractGranularity, PerAxis, PerTensor
from jaxfp8.prologues._prologue import Gathered, Source
from jaxfp8.quantizers._base import Operand, ScaleInputs
from jaxfp8.recipes._recipe import PlannedCast, plan_casts
from jaxfp8.sharding._amax import pmax, varying_axes
from jaxfp8.sharding._place import take_rows
from jaxfp8.sharding._route import Route
from jaxfp8.state._ledger import observe


def _quantize_groups(
    groups: Groups,
    call: Call,
    tensor: Tensor,
    value: Array,
    arrays: QuantizerArrays,
    *,
    only: Matmul | None = None,
) -> Quantized:
    """As `quantize_operand`, of rows [T, K] of x or g, or of matrices [E, K, N]."""
    stack = _Stack(groups, call, tensor, value)
    copies: list[Copy] = []
    largest = None
    for planned in plan_casts(
        call.recipe, call.geometry, tensor, getattr(call.backends, tensor), only=only
    ):
        if planned.cast is None:
            copies += [Copy(stack.values, readers) for readers in planned.readers]
            continue
        made, extras = stack.cast(planned, arrays)
        copies += [
            Copy(operand, readers) for operand, readers in zip(made, planned.readers, strict=True)
        ]
        largest = extras.largest if largest is None else largest
    watched = stack.watched(copies) if call.watched is not None else ()
    seen = stack.seen(arrays.ledger, stack.values if largest is None else largest)
    now, saved = by_reader(copies, tensor)
    return Quantized(now, saved, seen, watched=watched)


@dataclasses.dataclass(frozen=True)
class _Stack:
    """A tensor as a stack of matrices: tiles of rows [R, P, K], or one of each group [E, K, N]."""

    groups: Groups
    call: Call
    tensor: Tensor
    value: Array

    @functools.cached_property
    def values(self) -> Array:
        return self.value if self.tensor == "w" else self.groups.tiled(self.value)

    @property
    def source(self) -> Source:
        if self.tensor == "w":
            return self.values
        # Kernels read the rows of tiles where they are.
        groups = self.groups
        return Gathered(self.values, self.value, groups.first_row, groups.live_rows)

    def cast(
        self, planned: PlannedCast, arrays: QuantizerArrays
    ) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
        """The copies by one quantizer, with the axis of the stack in front."""
        quantizer, settled = planned.quantizer, self.call.settled
        assert planned.cast is not None
        cast = dataclasses.replace(planned.cast, separate=self.tensor == "w")
        known = None if planned.row is None else self.known(arrays.known, planned.row)
        wanted: tuple[AbstractGranularity, ...] = ()
        if quantizer.uses_amax:
            asked = dict.fromkeys((*cast.granularities, PerTensor()))
            wanted = tuple(each for each in asked if not each.in_tiles)
        key = None
        if cast.rounding == "stochastic":
            key = rounding_key(arrays.key, self.call, self.tensor, self.value)
        if all(each.in_tiles for each in cast.granularities):
            # No tile of values spans two matrices of the stack, so all of it is one array.
            inputs = ScaleInputs(lambda each: amax(self.values, each), None, settled)
            return quantizer.quantize(self.source, cast, inputs, key=key)
        keys = None if key is None else jax.random.split(key, self.values.shape[0])

        def one(
            x: Array, amaxes: tuple[Array, ...], stored: Any, key: Any
        ) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
            def find(granularity: AbstractGranularity) -> Array:
                if granularity in wanted:
                    return amaxes[wanted.index(granularity)]
                return amax(x, granularity)  # a tile of values is inside one tile of rows

            multiplier, scale = stored or (None, None)
            inputs = ScaleInputs(find, scale, settled, multiplier)
            return quantizer.quantize(x, cast, inputs, key=key)

        found = tuple(self.amax(each, known) for each in wanted)
        if known is not None and self.tensor != "w":
            # Of one state for all groups XLA sees that each tile has the same scale.
            one_state = arrays.known is not None and arrays.known.ndim == 1
            of_tiles = self._repeated if one_state else self.groups.of_tiles
            known = KnownScale(*map(of_tiles, known))
        return jax.vmap(one)(self.values, found, known, keys)

    def _repeated(self, of_groups: Array) -> Array:
        """The first entry of [E] for each tile, [R]."""
        return jnp.broadcast_to(of_groups[0], (self.groups.count,))

    def amax(self, granularity: AbstractGranularity, known: KnownScale | None) -> Array:
        """The amax of each matrix of the stack, [R, ...] or [E, ...], in the shape of its scale."""
        found = jax.vmap(lambda x: amax(x, granularity))(self.values)
        # If a scale spans all rows of a group, so does the amax, on every mesh.
        spans_tiles = self.tensor != "w" and not granularity.has_cells_along(0, 2)
        if spans_tiles:
            found = self.groups.largest(found)
        found = self.joined(granularity, found, known)
        return self.groups.of_tiles(found) if spans_tiles else found

    def joined(
        self, granularity: AbstractGranularity, found: Array, known: KnownScale | None
    ) -> Array:
        """Amaxes of groups or matrices, with those of other devices and of mapped axes."""
        found = self.over_mesh(granularity, found, known)
        # The amax of a state that a mapped axis shares spans that axis, too.
        if known is not None and granularity.in_one:
            found = jax.vmap(observe)(found, known.scale)
        return found

    def over_mesh(
        self, granularity: AbstractGranularity, found: Array, known: KnownScale | None
    ) -> Array:
        """The maximum over the mesh axes over which the values of one scale span devices."""
        axes = self.call.amax_axes
        if not axes.manual:
            return found
        if granularity.in_one:
            apart = self.call.apart
            if known is not None:  # devices that have states of their own have their own amaxes
                apart |= varying_axes(known.scale)
            return pmax(found, (varying_axes(found) - apart) | axes.untyped)
        readers: list[Matmul] = [
            matmul
            for matmul, quantizer in self.call.recipe.uses(self.tensor)
            if quantizer.granularity.in_rows
            and self._granularity(matmul, quantizer.granularity) == granularity
        ]
        contracted = [self.call.contracted(each, self.tensor) for each in readers[:1]]
        return pmax(found, frozenset().union(*contracted) & varying_axes(found))

    def _granularity(self, matmul: Matmul, granularity: AbstractGranularity) -> AbstractGranularity:
        axes = self.call.geometry.axes(matmul, self.tensor)
        return granularity.for_matmul(axes.not_contracted, len(axes.order))

    def known(self, known: Array | None, row: int) -> KnownScale:
        """The stored scale for each group, [E], with its multiplier."""
        assert known is not None
        # One state for all groups has one scale for all.
        return KnownScale(
            *(jnp.broadcast_to(each, (self.groups.experts,)) for each in stored_scale(known, row))
        )

    def seen(self, ledger: Array | None, like: Array) -> Seen:
        """The amax for each row of state of the tensor: [E] for a state of each group, else []."""

        def find() -> Array:
            found = jax.vmap(lambda x: amax(x, PerTensor()))(like)
            if self.tensor == "w":
                # A group without rows keeps its state, that of its matrix, too.
                return jnp.where(self.groups.tiles > 0, found, 0.0)
            return self.groups.largest(found)

        return self.seen_of_groups(ledger, find)

    def seen_of_groups(self, ledger: Array | None, find: Callable[[], Array]) -> Seen:
        """The same, of the amax of each group, [E], that `find` computes if a row needs it."""
        rows = [r for r, row in enumerate(self.call.recipe.rows) if row.tensor == self.tensor]
        if not self.call.collected or ledger is None or not rows:
            return {}
        found = find()
        likes = {(self.tensor, r): ledger[..., 0, r] for r in rows}
        # If a mapped axis shares the state, the maximum is taken over that axis, too.
        each = jax.vmap(observe) if ledger.ndim == 3 else observe
        axes = varying_axes(found) - varying_axes(ledger)
        return {key: pmax(each(found, like), axes) for key, like in likes.items()}

    def watched(self, copies: list[Copy]) -> tuple[CastStats, ...]:
        """The statistics of each FP8 copy. Rows of no group count as zeros."""
        return tuple(
            _stats_of_stack(self.values, copy.operand, self.tensor, copy.readers, self.value.size)
            for copy in copies
            if isinstance(copy.operand, QuantizedTensor)
        )


def _stats_of_stack(
    stack: Array, copies: QuantizedTensor, tensor: Tensor, readers: tuple[Matmul, ...], values: int
) -> CastStats:
    """The statistics of copies of n arrays, of `values` values together without padding."""
    each = jax.vmap(lambda x, copy: cast_stats(x, copy, tensor, readers))(stack, copies)
    joined: dict[str, Any] = {
        "amax": jnp.max(each.amax, initial=0.0),
        "scale_min": jnp.min(each.scale_min, initial=jnp.inf),
        "scale_max": jnp.max(each.scale_max, initial=-jnp.inf),
    }
    counts = ("saturated", "underflowed", "nonzero", "nonfinite")
    joined |= {name: jnp.sum(getattr(each, name)) for name in counts}
    return dataclasses.replace(each, values=values, **joined)


# Rows that come from other devices: cast first, sent in FP8.
#
# Tokens are cast where they are, once, for the first matmul that reads them: fprop reads x, and
# dgrad reads g. Values and scales are sent as bytes, and multiplied as they arrive. wgrad contracts
# the rows of an expert, so it needs tiles along them, which no sender knows. These are made from
# the FP8 values that arrived. With scales that are powers of two, these values are exact in
# bfloat16, and a second cast changes only exponents. So it loses nothing, except of values that
# become subnormal.
#
# References:
#     DeepSeek-V3, arXiv:2412.19437, section 3.3 (dispatch in FP8); FP8-Flow-MoE, arXiv:2511.02302
#     (two casts, exponent shifts).

_NO_SCALE = 1.0  # the scale of empty slots, whose values are 0
FIRST_READER: dict[Tensor, Matmul] = {"x": "fprop", "g": "dgrad"}


def quantize_rows(
    rows: Rows,
    call: Call,
    tensor: Tensor,
    value: Array,
    arrays: QuantizerArrays,
    *,
    only: Matmul | None = None,
) -> Quantized:
    """As `_quantize_groups`; tokens [T, K] of a tensor that is sent become rows [S, K]."""
    groups, route = rows.groups, rows.route
    if route is None or rows.routed != tensor:
        return _quantize_groups(groups, call, tensor, value, arrays, only=only)
    first = FIRST_READER[tensor]
    (planned,) = plan_casts(
        call.recipe, call.geometry, tensor, getattr(call.backends, tensor), only=first
    )
    sender = _Sender(route, _Stack(groups, call, tensor, value), planned, arrays)
    packed = sender.packed()
    saved = copies = [Copy(jax.tree.map(route.exchanged, packed), (first, "wgrad"))]
    if tensor == "x":
        copies, saved = name_residuals(copies, tensor)
    received = copies[0].operand
    now = {first: _tiled(route, groups, received)}
    if tensor == "g":
        now["wgrad"] = wgrad_operand(rows, call, tensor, received, arrays)
    return Quantized(
        now=now,
        saved={"wgrad": saved[0]},
        seen=sender.stack.seen_of_groups(arrays.ledger, sender.found),
        watched=sender.watched(packed),
    )


def wgrad_operand(
    rows: Rows,
    call: Call,
    tensor: Tensor,
    received: Operand,
    arrays: QuantizerArrays,
    *,
    after: Array | None = None,
) -> Operand:
    """The copy [R, P, K] that wgrad reads, of the slots [S, K] that arrived."""
    groups, route = rows.groups, rows.route
    assert route is not None
    if isinstance(received, QuantizedTensor):
        if received.granularity.in_one:
            return _tiled(route, groups, received)
        # Slots become bfloat16 for a second cast, which waits for the array `after`. Without the
        # barrier XLA would do this earlier, fused with work of another matmul, and keep the rows in
        # bfloat16 until then.
        if after is not None:
            both: tuple[QuantizedTensor, Array] = lax.optimization_barrier((received, after))
            received = both[0]
        received = received.dequantize(jnp.bfloat16)
    value, unseen = route.in_order(received), arrays._replace(ledger=None)
    cast = _quantize_groups(groups, call, tensor, value, unseen, only="wgrad")
    return cast.now["wgrad"]


@dataclasses.dataclass(frozen=True)
class _Sender:
    """The cast of tokens on the device that has them."""

    route: Route
    stack: _Stack  # for its amaxes; nothing reads its tiles
    planned: PlannedCast
    arrays: QuantizerArrays

    def packed(self) -> Operand:
        """The send buffer [S, K], in FP8 if the recipe says so."""
        cast, value = self.planned.cast, self.stack.value
        if cast is None:
            return self.route.packed(value)
        key = None
        if cast.rounding == "stochastic":
            key = rounding_key(self.arrays.key, self.stack.call, self.stack.tensor, value)
        if cast.granularities[0].in_one:
            return self._by_expert(key)

        def of_rows(granularity: Any) -> Array:
            if granularity.in_one:
                raise ValueError(
                    f"{self.planned.quantizer!r} chooses scales of rows from the amax of a whole "
                    "tensor, which is on many devices before it is sent. Use sent_in_fp8=False."
                )
            return self.stack.over_mesh(granularity, amax(value, granularity), None)

        inputs = ScaleInputs(of_rows, None, self.stack.call.settled)
        ((copy,), _) = self.planned.quantizer.quantize(value, cast, inputs, key=key)
        return dataclasses.replace(
            copy,
            values=self.route.packed(copy.values),
            scale=self.route.packed(copy.scale, _NO_SCALE),
        )

    def _by_expert(self, key: Array | None) -> QuantizedTensor:
        """A cast of each slot with the scale of its expert: scales are [S]."""
        cast, settled = self.planned.cast, self.stack.call.settled
        assert cast is not None
        # A kernel for one row at a time would be launched for each slot. XLA fuses the gather.
        cast = dataclasses.replace(cast, backends=("xla",))
        row = self.planned.row
        known = None if row is None else self.stack.known(self.arrays.known, row)
        found = self._of_slots(self.stack.joined(PerTensor(), self.found(), known))
        if known is not None:
            known = KnownScale(*map(self._of_slots, known))
        keys = None if key is None else jax.random.split(key, self.route.rows)

        def one(x: Array, amax: Array, stored: Any, key: Any) -> QuantizedTensor:
            multiplier, scale = stored or (None, None)
            inputs = ScaleInputs(lambda _: amax, scale, settled, multiplier)
            ((copy,), _) = self.planned.quantizer.quantize(x, cast, inputs, key=key)
            return copy

        return jax.vmap(one)(self.route.packed(self.stack.value), found, known, keys)

    def _of_slots(self, of_experts: Array) -> Array:
        """For each slot [S] the entry of its expert."""
        if self.route.axis is not None:
            of_experts = lax.all_gather(of_experts, self.route.axis, tiled=True)
        return of_experts.at[self.route.expert].get(mode="fill", fill_value=1)

    def found(self) -> Array:
        """The amax of all rows of each expert of this device, on any device of the axis."""
        route = self.route
        of_tokens = jnp.squeeze(amax(self.stack.value, PerAxis(0)), axis=1)
        found = jax.ops.segment_max(
            route.packed(of_tokens), route.expert, route.experts, mode="drop"
        )
        found = jnp.maximum(found, 0)
        if route.axis is None:
            return found
        here = route.experts // lax.axis_size(route.axis)
        found = lax.pmax(found, route.axis)
        return lax.dynamic_slice_in_dim(found, lax.axis_index(route.axis) * here, here)

    def watched(self, packed: Operand) -> tuple[CastStats, ...]:
        """The statistics of the cast. An empty slot counts as zeros."""
        if self.stack.call.watched is None or not isinstance(packed, QuantizedTensor):
            return ()
        tensor = self.stack.tensor
        readers: tuple[Matmul, ...] = (FIRST_READER[tensor], "wgrad")
        value = self.route.packed(self.stack.value)
        if not packed.granularity.in_one:
            return (cast_stats(value, packed, tensor, readers),)
        return (_stats_of_stack(value, packed, tensor, readers, value.size),)


def _tiled(route: Route, groups: Groups, received: Operand) -> Operand:
    """The rows of each tile [R, P, K], of received slots [S, K]. Rows that no group has are 0."""
    slot = route.slot_of_row(groups.row)
    if not isinstance(received, QuantizedTensor):
        return take_rows(received, slot)
    # With one scale for an expert, a tile has the scale of its first row.
    of_scale = slot[:, 0] if received.granularity.in_one else slot
    return dataclasses.replace(
        received,
        values=take_rows(received.values, slot),
        scale=take_rows(received.scale, of_scale, _NO_SCALE),
    )
