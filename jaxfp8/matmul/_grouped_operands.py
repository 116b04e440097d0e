"""The operands of grouped matmuls: rows in tiles, and one matrix for each group.

Each group is quantized as if it stood alone. A tile of rows is cast by itself (`jax.vmap`), and so
is the matrix of a group. Only an amax that spans all rows of a group joins tiles: the largest of
its tiles.

Letters: T rows, E groups, P rows of a tile, R tiles; K N the axes of matrices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._quantized_tensor import CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Matmul, Tensor
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.matmul._arrays import Copy, QuantizerArrays, name_residuals
from jaxfp8.matmul._call import Call, Variation
from jaxfp8.matmul._operands import Quantized, Seen, rounding_key
from jaxfp8.matmul._stats import CastStats, cast_stats, join_stats
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.prologues._prologue import Gathered, Source
from jaxfp8.quantizers._base import ScaleInputs
from jaxfp8.recipes._recipe import PlannedCast, plan_casts
from jaxfp8.sharding._amax import pmax, varying_axes
from jaxfp8.state._ledger import observe


def quantize_groups(
    groups: Groups,
    call: Call,
    tensor: Tensor,
    value: Array,
    arrays: QuantizerArrays,
    variation: Variation,
    *,
    only: Matmul | None = None,
) -> Quantized:
    """A tensor, cast once for the matmuls that read the same copy of it; see `quantize_operand`.

    `value` are rows [T, K] of x or g, or matrices [E, K, N]. The geometry of the call is that of
    one group.
    """
    stack = Stack(groups, call, tensor, value, variation)
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
    saved = copies
    if tensor != "g":
        copies, saved = name_residuals(copies, tensor)
    return Quantized(
        now={matmul: copy.operand for copy in copies for matmul in copy.readers},
        saved={matmul: copy for copy in saved for matmul in copy.readers},
        seen=seen,
        column_sums=None,
        watched=watched,
    )


@dataclasses.dataclass(frozen=True)
class Stack:
    """A tensor as a stack of matrices: tiles of rows [R, P, K], or one of each group [E, K, N]."""

    groups: Groups
    call: Call
    tensor: Tensor
    value: Array
    variation: Variation

    @functools.cached_property
    def values(self) -> Array:
        return self.value if self.tensor == "w" else self.groups.tiled(self.value)

    @property
    def source(self) -> Source:
        """The stack. Kernels read the rows of tiles where they are."""
        if self.tensor == "w":
            return self.values
        groups = self.groups
        return Gathered(self.values, self.value, groups.first_row, groups.live_rows)

    def cast(
        self, planned: PlannedCast, arrays: QuantizerArrays
    ) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
        """The copies by one quantizer. Every array has the axis of the stack in front."""
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
            known = KnownScale(*map(self.groups.of_tiles, known))
        return jax.vmap(one)(self.values, found, known, keys)

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
        """The maximum over the mesh axes over which the values of one scale span devices.

        Devices that have states of their own have amaxes of their own.
        """
        axes = self.call.amax_axes
        if not axes.manual:
            return found
        if granularity.in_one:
            apart = self.variation.apart
            if known is not None:
                apart |= varying_axes(known.scale)
            return pmax(found, (varying_axes(found) - apart) | axes.untyped)
        readers: list[Matmul] = [
            matmul
            for matmul, quantizer in self.call.recipe.uses(self.tensor)
            if quantizer.granularity.in_rows
            and self._granularity(matmul, quantizer.granularity) == granularity
        ]
        contracted = [self.variation.contracted(each, self.tensor) for each in readers[:1]]
        return pmax(found, frozenset().union(*contracted) & varying_axes(found))

    def _granularity(self, matmul: Matmul, granularity: AbstractGranularity) -> AbstractGranularity:
        axes = self.call.geometry.axes(matmul, self.tensor)
        return granularity.for_matmul(axes.not_contracted, len(axes.order))

    def known(self, known: Array | None, row: int) -> KnownScale:
        """The stored scale for each group, [E], with its multiplier."""
        assert known is not None
        pair = known[..., row]
        if pair.ndim == 1:  # one state for all groups
            pair = jnp.broadcast_to(pair, (self.groups.experts, 2))
        return KnownScale(pair[:, 0], pair[:, 1])

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
            self._stats(copy.operand, copy.readers)
            for copy in copies
            if isinstance(copy.operand, QuantizedTensor)
        )

    def _stats(self, operand: QuantizedTensor, readers: tuple[Matmul, ...]) -> CastStats:
        each = jax.vmap(lambda x, copy: cast_stats(x, copy, self.tensor, readers))(
            self.values, operand
        )
        return join_stats(each, self.value.size)
