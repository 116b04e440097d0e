"""The operand of a grouped matmul whose rows come from other devices: cast first, sent in FP8.

Tokens are cast where they are, once, for the first matmul that reads them: fprop reads x, and dgrad
reads g. Values and scales are sent as bytes, and multiplied as they arrive. wgrad contracts the
rows of an expert, so it needs tiles along them, which no sender knows. These are made from the FP8
values that arrived. With scales that are powers of two, these values are exact in bfloat16, and a
second cast changes only exponents. So it loses nothing, except of values that become subnormal.

Letters: T tokens, k choices of a token, S slots, E experts of all devices, K features, P rows of a
tile, R tiles.

References:
  DeepSeek-V3, arXiv:2412.19437, section 3.3 (dispatch in FP8); FP8-Flow-MoE, arXiv:2511.02302 (two
  casts, exponent shifts).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Matmul, Tensor
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.matmul._arrays import Copy, QuantizerArrays, Rows, name_residuals
from jaxfp8.matmul._call import Call, Variation
from jaxfp8.matmul._grouped_operands import Stack, quantize_groups
from jaxfp8.matmul._operands import Quantized, rounding_key
from jaxfp8.matmul._stats import CastStats, cast_stats, join_stats
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._granularity import PerAxis, PerTensor
from jaxfp8.quantizers._base import Operand, ScaleInputs
from jaxfp8.recipes._recipe import PlannedCast, Recipe, plan_casts
from jaxfp8.sharding._place import take_rows
from jaxfp8.sharding._route import Route

_NO_SCALE = 1.0  # the scale of empty slots, whose values are 0
_FIRST: dict[Tensor, Matmul] = {"x": "fprop", "g": "dgrad"}


def check_sent_in_fp8(recipe: Recipe, tensor: Tensor, cure: str) -> None:
    """Raise ValueError unless wgrad can read the copy of x or g that is sent in FP8.

    `cure` says how the caller sends it in high precision.
    """
    (_, first), (_, second) = sorted(recipe.uses(tensor), key=lambda use: use[0] == "wgrad")
    if first.value_format is None:
        return  # it is sent in high precision, as the recipe says
    if second != first:
        raise ValueError(
            f"recipe {recipe.name!r} quantizes {tensor} in one way for {_FIRST[tensor]} and in "
            f"another for wgrad. After a dispatch in FP8 only one copy is there. {cure}"
        )
    granularity = first.granularity.for_matmul((0,), 2)  # both first matmuls contract axis 1
    if not granularity.in_one and granularity.scale_shape((2, 1))[0] != 2:
        raise ValueError(
            f"recipe {recipe.name!r} has scales that tokens share, in {tensor} with "
            f"{first.granularity!r}. The tokens of an expert are on many devices before they are "
            f"sent, so no device knows these scales. Use tiles of one token, PerBlock((1, T)). Or: "
            f"{cure}"
        )
    if not (granularity.in_one or first.rule.exact):
        raise ValueError(
            f"recipe {recipe.name!r} has scales that are no powers of two. wgrad needs {tensor} in "
            "another direction, and would round values that are rounded already. Make the recipe "
            f"with power_of_two=True. Or: {cure}"
        )


def quantize_rows(
    rows: Rows,
    call: Call,
    tensor: Tensor,
    value: Array,
    arrays: QuantizerArrays,
    variation: Variation,
    *,
    only: Matmul | None = None,
) -> Quantized:
    """A tensor of a grouped matmul, cast once, and sent if it has to be; see `quantize_groups`.

    `value` are matrices [E, K, N], rows [S, K], or tokens [T, K] that become rows.
    """
    groups, route = rows.groups, rows.route
    if route is None or rows.routed != tensor:
        return quantize_groups(groups, call, tensor, value, arrays, variation, only=only)
    first = _FIRST[tensor]
    (planned,) = plan_casts(
        call.recipe, call.geometry, tensor, getattr(call.backends, tensor), only=first
    )
    sender = _Sender(route, Stack(groups, call, tensor, value, variation), planned, arrays)
    packed = sender.packed()
    saved = copies = [Copy(_each(route.exchanged, packed), (first, "wgrad"))]
    if tensor == "x":
        copies, saved = name_residuals(copies, tensor)
    received = copies[0].operand
    now = {first: _tiled(route, groups, received)}
    if tensor == "g":
        now["wgrad"] = wgrad_operand(rows, call, tensor, received, arrays, variation)
    return Quantized(
        now=now,
        saved={"wgrad": saved[0]},
        seen=sender.seen(),
        column_sums=None,
        watched=sender.watched(packed),
    )


def wgrad_operand(
    rows: Rows,
    call: Call,
    tensor: Tensor,
    received: Operand,
    arrays: QuantizerArrays,
    variation: Variation,
    *,
    after: Array | None = None,
) -> Operand:
    """The copy [R, P, K] that wgrad reads, of the slots [S, K] that arrived.

    If one scale holds for an expert, wgrad reads the same copy. Otherwise slots become bfloat16 for
    a second cast, which waits for the array `after`.
    """
    groups, route = rows.groups, rows.route
    assert route is not None
    if isinstance(received, QuantizedTensor):
        if received.granularity.in_one:
            return _tiled(route, groups, received)
        # Without the barrier XLA would do this earlier, fused with work of another matmul, and keep
        # the rows in bfloat16 until then.
        if after is not None:
            both: tuple[QuantizedTensor, Array] = lax.optimization_barrier((received, after))
            received = both[0]
        received = received.dequantize(jnp.bfloat16)
    value, unseen = route.in_order(received), arrays._replace(ledger=None)
    cast = quantize_groups(groups, call, tensor, value, unseen, variation, only="wgrad")
    return cast.now["wgrad"]


@dataclasses.dataclass(frozen=True)
class _Sender:
    """The cast of tokens on the device that has them."""

    route: Route
    stack: Stack  # for its amaxes; nothing reads its tiles
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
        known = self._known
        found = self._of_slots(self._amax(known))
        if known is not None:
            known = KnownScale(*map(self._of_slots, known))
        keys = None if key is None else jax.random.split(key, self.route.rows)

        def one(x: Array, amax: Array, stored: Any, key: Any) -> QuantizedTensor:
            multiplier, scale = stored or (None, None)
            inputs = ScaleInputs(lambda _: amax, scale, settled, multiplier)
            ((copy,), _) = self.planned.quantizer.quantize(x, cast, inputs, key=key)
            return copy

        return jax.vmap(one)(self.route.packed(self.stack.value), found, known, keys)

    @property
    def _known(self) -> KnownScale | None:
        """The stored scale for each expert of this device, with its multiplier."""
        row = self.planned.row
        return None if row is None else self.stack.known(self.arrays.known, row)

    def _of_slots(self, of_experts: Array) -> Array:
        """The entry of each slot's expert, [S], of entries of the experts of this device."""
        if self.route.axis is not None:
            of_experts = lax.all_gather(of_experts, self.route.axis, tiled=True)
        return of_experts.at[self.route.expert].get(mode="fill", fill_value=1)

    def _found(self) -> Array:
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

    def _amax(self, known: KnownScale | None) -> Array:
        return self.stack.joined(PerTensor(), self._found(), known)

    def seen(self) -> dict[tuple[Tensor, int], Array]:
        """The amax for each row of state of the tensor; see `Stack.seen`."""
        return self.stack.seen_of_groups(self.arrays.ledger, self._found)

    def watched(self, packed: Operand) -> tuple[CastStats, ...]:
        """The statistics of the cast. An empty slot counts as zeros."""
        if self.stack.call.watched is None or not isinstance(packed, QuantizedTensor):
            return ()
        tensor = self.stack.tensor
        readers: tuple[Matmul, ...] = (_FIRST[tensor], "wgrad")
        value = self.route.packed(self.stack.value)
        if not packed.granularity.in_one:
            return (cast_stats(value, packed, tensor, readers),)
        each = jax.vmap(lambda x, copy: cast_stats(x, copy, tensor, readers))(value, packed)
        return (join_stats(each, value.size),)


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


def _each(function: Any, operand: Operand) -> Operand:
    """The function of an array, or of values and scale."""
    if not isinstance(operand, QuantizedTensor):
        return function(operand)
    return dataclasses.replace(
        operand, values=function(operand.values), scale=function(operand.scale)
    )
