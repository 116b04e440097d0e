"""A cast of each tensor, for all matmuls that read it.

This module also reduces amaxes across devices, and makes the keys of stochastic rounding.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
from jax import lax

from jaxfp8._quantized_tensor import CastExtras, QuantizedTensor
from jaxfp8._typing import Array, FP8StateError, Matmul, Tensor
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.matmul._arrays import (
    Copy,
    KnownAmaxes,
    QuantizerArrays,
    name_amax,
    name_residuals,
    stored_scale,
)
from jaxfp8.matmul._call import Call
from jaxfp8.matmul._stats import CastStats, cast_stats
from jaxfp8.numerics._amax import amaxes
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.prologues._prologue import Source, value_of
from jaxfp8.quantizers._base import Operand, ScaleInputs
from jaxfp8.recipes._recipe import PlannedCast, plan_casts
from jaxfp8.sharding._amax import manual_axes, pmax, varying_axes
from jaxfp8.sharding._place import Place
from jaxfp8.state._ledger import observe

# The PRNG key of a cast with stochastic rounding: each tensor and each shard has its own.

_INDEX: dict[Tensor, int] = {"x": 0, "w": 1, "g": 2}


def rounding_key(key: Array | None, call: Call, tensor: Tensor, value: Array) -> Array:
    """The key for one tensor of one call."""
    if key is None:
        raise ValueError(
            f"key=None, but recipe {call.recipe.name!r} rounds {tensor} stochastically. That "
            "needs a new PRNG key at each step. Functions: pass key= to fp8.dot, dot_general or "
            "einsum. linen: write model.apply(..., rngs={'fp8': key}), and pass "
            "split_rngs={'fp8': True} to nn.scan and nn.vmap. nnx: pass rngs=nnx.Rngs(0, fp8=1) "
            "to the layer, and call model.train() after model.eval()."
        )
    # Each tensor folds in its own index, so x, w and g of one call do not share random bits.
    key = jax.random.fold_in(key, _INDEX[tensor])
    if not call.amax_axes.manual:
        return key  # arrays are global, and so are random bits: they do not depend on the mesh
    # A device does not know the position of its shard in the array. So its index over the mesh axes
    # that the tensor varies over is folded in: shards get their own bits, replicas the same ones.
    if not call.amax_axes.typed:
        raise ValueError(
            f"recipe {call.recipe.name!r} rounds {tensor} stochastically inside "
            f"shard_map(check_vma=False) over {manual_axes()}. There types do not distinguish "
            f"shards of {tensor} from replicas, which must get the same random bits. Use "
            "jax.shard_map(check_vma=True)."
        )
    if axes := tuple(sorted(varying_axes(value))):
        key = jax.random.fold_in(key, lax.axis_index(axes))
    return key


# The casts of one tensor: its scales, its copies, its amaxes.

# The amax for each row of state that belongs to a tensor: {(tensor, index of the row): f32[]}.
Seen: TypeAlias = dict[tuple[Tensor, int], Array]


class Quantized(NamedTuple):
    """A tensor as each matmul reads it."""

    now: dict[Matmul, Operand]  # for the matmuls of this pass
    saved: dict[Matmul, Copy]  # the same copies as residuals, for those of the backward pass
    seen: Seen
    column_sums: Array | None = None
    watched: tuple[CastStats, ...] = ()  # the statistics of each copy, if casts are watched
    amaxes: KnownAmaxes = KnownAmaxes()  # those that the quantizers asked for


def quantize_operand(
    call: Call,
    tensor: Tensor,
    source: Source,
    arrays: QuantizerArrays,
    *,
    column_sums: bool = False,
    only: Matmul | None = None,
) -> Quantized:
    """A tensor, cast once for the matmuls of this pass that read the same copy, or `only` one."""
    value, place = value_of(source), getattr(call.places, tensor)
    copies: list[Copy] = []
    extras = CastExtras()
    found = dict(zip(arrays.amaxes.keys, arrays.amaxes.amaxes, strict=True))
    backends = getattr(call.backends, tensor)
    # Both copies of g are gathered in one pass, those of x and w in different passes.
    gathered = tensor == "g" and place.mesh is not None
    by_xla = call.kernels.by_xla(call.backends)
    for planned in plan_casts(
        call.recipe, call.geometry, tensor, backends, column_sums, gathered, by_xla, only
    ):
        if planned.cast is None:
            copies += [Copy(value, readers) for readers in planned.readers]
            continue
        stored = None if planned.row is None else _stored(call, tensor, planned.row, arrays)
        key = None
        if planned.cast.rounding == "stochastic":
            key = rounding_key(arrays.key, call, tensor, value)
        find = _amax_of(call, tensor, value, planned, stored, found)
        multiplier, scale = stored or (None, None)
        inputs = ScaleInputs(find, scale, call.settled, multiplier)
        made, more = planned.quantizer.quantize(source, planned.cast, inputs, key=key)
        for operand, readers in zip(made, planned.readers, strict=True):
            copies.append(Copy.of(operand, readers, planned, stored))
        extras = extras.or_else(more)
    watched: tuple[CastStats, ...] = ()
    if call.watched is not None:
        scaled = [(copy.with_scale(arrays.known), copy.readers) for copy in copies]
        watched = tuple(
            cast_stats(value, each, tensor, readers)
            for each, readers in scaled
            if isinstance(each, QuantizedTensor)
        )
    # `largest` has the amax of `value`, and comes from the cast kernel: no second read of `value`.
    seen = _seen(call, tensor, value if extras.largest is None else extras.largest, arrays.ledger)
    if seen and call.settled:
        # The barrier keeps cast and amax in one kernel. Without it, XLA moves the transpose that
        # cuBLASLt needs on Hopper through the cast. The amax then reads the tensor a second time.
        copies = lax.optimization_barrier(copies)
    now, saved = by_reader(copies, tensor, arrays.known)
    known = KnownAmaxes(tuple(found), tuple(found.values()))
    return Quantized(now, saved, seen, extras.column_sums, watched, known)


def by_reader(
    copies: list[Copy], tensor: Tensor, known: Array | None = None
) -> tuple[dict[Matmul, Operand], dict[Matmul, Copy]]:
    """For each matmul its operand, and the same copy as a residual. `known`: as in `with_scale`."""
    saved = copies
    if tensor != "g":
        # The copies are named before any matmul reads them. A rematerialized fprop then starts
        # from a saved copy, if it reads the same one as the backward pass.
        copies, saved = name_residuals(copies, tensor)
    # One operand for all readers of a copy: `_gathered_once` compares identities.
    scaled = [(copy.with_scale(known), copy.readers) for copy in copies]
    return (
        {matmul: operand for operand, readers in scaled for matmul in readers},
        {matmul: copy for copy in saved for matmul in copy.readers},
    )


def _stored(call: Call, tensor: Tensor, row: int, arrays: QuantizerArrays) -> KnownScale:
    """The stored scale [] of a stateful quantizer, with its multiplier."""
    assert arrays.known is not None
    known = stored_scale(arrays.known, row)
    if not call.amax_axes.manual:
        return known
    if split := getattr(call.places, tensor).manual_axes & varying_axes(known.scale):
        raise FP8StateError(
            f"{tensor} is gathered over {sorted(split)}, but its state varies over it. All shards "
            "need one scale. Pass the state to shard_map with a spec that does not split it over "
            "that axis."
        )
    return known


def _amax_of(
    call: Call, tensor: Tensor, value: Array, planned: PlannedCast, stored: KnownScale | None,
    known: dict[tuple[int | None, AbstractGranularity], Array],
) -> Callable[[AbstractGranularity], Array]:  # fmt: skip
    """A function that finds the amax of the whole logical tensor, and adds it to those `known`."""
    assert planned.cast is not None
    place: Place = getattr(call.places, tensor)
    manual = call.amax_axes.manual
    # The mesh axes over which the values of one scale span devices. It is an error if they would
    # cut a tile.
    across: dict[AbstractGranularity, frozenset[str]] = {}
    for each, readers in zip(planned.cast.granularities, planned.readers, strict=True):
        if each not in across:  # two copies may have one granularity, and the first one decides
            across[each] = place.amax_axes(each, value.shape)
            if manual and not each.in_one:
                across[each] |= call.contracted(readers[0], tensor)
    local: dict[AbstractGranularity, Array] = {}

    def find(granularity: AbstractGranularity) -> Array:
        if granularity in across:
            axes = across[granularity]
        elif granularity.in_one:  # a quantizer may also ask for PerTensor()
            axes = place.amax_axes(granularity, value.shape)
        else:
            raise ValueError(
                f"a quantizer asks for the amax of {tensor} by {granularity!r}. It may ask for its "
                f"own granularities {list(across)}, and for PerTensor()."
            )
        if stored is not None:
            found = observe(value, stored.scale)
        else:
            # A quantizer asks for one at a time, but all of them are found in one read.
            if granularity not in local:
                local.update(amaxes(value, [*across] if granularity in across else [granularity]))
            found = local[granularity]
        if not manual:
            return found  # arrays are global, so the amax is global, too
        if stored is not None:
            axes |= varying_axes(value) - varying_axes(stored.scale)
        elif granularity.in_one:
            axes |= varying_axes(value) - call.apart
        if stored is not None or granularity.in_one:
            axes |= call.amax_axes.untyped
        return pmax(found, axes)

    def amax(granularity: AbstractGranularity) -> Array:
        key = planned.row, granularity
        if key not in known:
            found = find(granularity)
            # Remat may save it if it is small. The amaxes of tiles are found in the cast.
            known[key] = found if tensor == "g" or granularity.in_tiles else name_amax(found)
        return known[key]

    return amax


def _seen(call: Call, tensor: Tensor, value: Array, ledger: Array | None) -> Seen:
    """The amax for each row of state of the tensor, reduced over the axes that are known here."""
    if not call.collected or ledger is None:
        return {}
    likes = {
        (row.tensor, r): ledger[0, r]
        for r, row in enumerate(call.recipe.rows)
        if row.tensor == tensor
    }
    if not call.amax_axes.manual:
        return {key: observe(value, like) for key, like in likes.items()}
    # Without types, only the `Shard` says over which axes the amax of a gathered operand spans
    # devices. With types, value_and_grad reduces the amaxes of all matmuls at once.
    named = call.amax_axes.named or frozenset()
    gathered = getattr(call.places, tensor).manual_axes
    untyped = frozenset() if call.amax_axes.typed else gathered - named
    return {
        key: pmax(observe(value, like), (varying_axes(value) - varying_axes(like)) | untyped)
        for key, like in likes.items()
    }
