"""The operands of the three matmuls: each tensor quantized once for all that read it, and what else that takes.

Amaxes that span devices, residuals by name, and operands that are gathered in FP8.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import AbstractPrologue, Source, value_of
from jaxfp8.numerics._amax import amax as amax_of
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.ops._checkpoint_policies import RESIDUAL
from jaxfp8.ops._dimension_numbers import Geometry
from jaxfp8.ops._ledger import observe
from jaxfp8.quantizers._base import AbstractQuantizer, Operand
from jaxfp8.recipes._recipe import Matmul, Recipe, Tensor
from jaxfp8.sharding._amax import pmax, varying
from jaxfp8.sharding._shard import PlacedShard
from jaxfp8.sharding._specs import check_borders, has_cells_along
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Everything about a call that is no array."""

    recipe: Recipe
    geometry: Geometry
    out_dtype: DType
    precision: Any
    fast_accumulation: bool
    out_sharding: Any
    collected: bool  # amaxes go to the state's probe
    all_set: bool  # no stored scale is unset
    reduce_axes: frozenset[str] | None  # manual mesh axes that amaxes are combined over, where the caller names them
    types_tell: bool  # over which manual axes a value varies
    shards: tuple[tuple[Tensor, PlacedShard | None], ...]  # operands that are gathered in FP8
    implementations: Implementations
    prologue: AbstractPrologue | None  # what makes x, in the quantizer

    def shard(self, tensor: Tensor) -> PlacedShard | None:
        return dict(self.shards)[tensor]

    def over(self, tensor: Tensor) -> frozenset[str]:
        """The manual mesh axes over which a tensor is split and gathered, so that a matmul sees the whole."""
        shard = self.shard(tensor)
        return frozenset() if shard is None else shard.manual_axes

    def split_or_apart(self, both: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Of the mesh axes along which x and w both vary, those that split a contraction, and those that part stages.

        Types cannot tell these from each other, nor from experts; only the caller can.
        """
        if self.reduce_axes is None:
            return frozenset(), frozenset()
        return frozenset() if self.geometry.batched else both & self.reduce_axes, both - self.reduce_axes


Seen: TypeAlias = dict[tuple[Tensor, int], Array]
"""The amax of each row of state that follows a tensor."""


def quantize_operand(
    call: Call,
    tensor: Tensor,
    source: Source,
    scale: Array | None,
    ledger: Array | None,
    apart: frozenset[str],
    *,
    column_sums: bool = False,
    **contracted: frozenset[str],
) -> tuple[dict[Matmul, Operand], dict[Matmul, Operand], Seen, Array | None]:
    """A tensor as each matmul reads it, cast once for those that read the same; the same as residuals; its rows' amaxes.

    Last what a kernel summed of its columns (`Met.column_sums`), if it was told to.

    `apart`: the mesh axes along which it is several tensors and not parts of one. `contracted`: those over which a matmul
    contracts it across devices; its row amaxes span them.
    """
    value = value_of(source)
    # One call of a quantizer for all the directions in which matmuls read its result.
    directions: dict[AbstractQuantizer, dict[tuple[AbstractGranularity, bool], frozenset[str]]] = {}
    kinds: dict[Matmul, tuple[AbstractQuantizer, tuple[AbstractGranularity, bool]]] = {}
    for matmul, quantizer in call.recipe.uses(tensor):
        kept = call.geometry.kept(matmul, tensor)
        granularity = quantizer.granularity.for_matmul(kept, value.ndim)
        across = _spanned(call, tensor, value, granularity)
        if not isinstance(granularity, PerTensor):
            across |= contracted.get(matmul, frozenset())
        # A kernel lays each copy as its matmul reads it, with what is contracted last, where that swaps the last two axes.
        turned = value.ndim - 1 in kept and value.ndim - 2 not in kept
        direction = granularity, turned and call.implementations.casts == "mosaic"
        directions.setdefault(quantizer, {}).setdefault(direction, across)
        kinds[matmul] = quantizer, direction
    operands: list[Operand] = []
    order: list[tuple[AbstractQuantizer, tuple[AbstractGranularity, bool]]] = []
    met = Met()
    for quantizer, copies in directions.items():
        stored = None if scale is None else _stored(call.recipe, tensor, quantizer, scale)
        if stored is not None and (split := call.over(tensor) & varying(stored)):
            raise FP8StateError(
                f"{tensor} is gathered over {sorted(split)}, but its state varies over it, so each part would have a scale of "
                "its own; pass the state to shard_map with a spec that does not split it over that axis."
            )
        granularities, transposed = zip(*copies, strict=True)
        spans = {granularity: across for (granularity, _), across in copies.items()}
        made, met_now = quantizer.quantize(
            source, granularities, amax=functools.partial(_amax, call, value, stored, spans, apart), scale=stored,
            all_set=call.all_set, transposed=transposed, column_sums=column_sums and met.column_sums is None,
            implementation=call.implementations.casts,
        )  # fmt: skip
        operands += made
        order += [(quantizer, direction) for direction in copies]
        met = Met(
            met_now.largest if met.largest is None else met.largest,
            met_now.column_sums if met.column_sums is None else met.column_sums,
        )
    reads = {matmul: order.index(kind) for matmul, kind in kinds.items()}
    seen = _seen(call, tensor, value if met.largest is None else met.largest, ledger)
    if seen and call.all_set:
        # Keeps cast and amax in one kernel: on Hopper XLA would move the transpose that cuBLASLt wants through the cast.
        operands = lax.optimization_barrier(operands)
    saved = operands
    if tensor != "g":
        # Named before any matmul reads them, so that a rematerialized fprop starts from what was saved and casts nothing.
        (operands, saved), (seen, _) = _named(operands), _named(seen)
    now, later = ({matmul: each[index] for matmul, index in reads.items()} for each in (operands, saved))
    return now, later, seen, met.column_sums


def _spanned(call: Call, tensor: Tensor, value: Array, granularity: AbstractGranularity) -> frozenset[str]:
    """The mesh axes over which scale cells of a split tensor span devices."""
    shard = call.shard(tensor)
    if shard is None:
        return frozenset()
    if has_cells_along(granularity, value.ndim, shard.axis):
        if shard.devices > 1:
            check_borders(granularity, value.shape, shard.axis, shard.part(value.shape))
        return frozenset()
    return call.over(tensor)


def whole(call: Call, tensor: Tensor, operand: Operand) -> Operand:
    """The whole of an operand, of which each device has a part.

    A scale that spans devices is common to them already, though a type may hide it: an `optimization_barrier` makes what it
    holds vary over all the axes of its members.
    """
    shard = call.shard(tensor)
    if shard is None:
        return operand
    if not isinstance(operand, QuantizedTensor):
        return shard.gather(operand)
    split = has_cells_along(operand.granularity, operand.ndim, shard.axis)
    scale = shard.gather(operand.scale) if split else operand.scale
    return dataclasses.replace(operand, values=shard.gather(operand.values), scale=scale)


def _named(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The same arrays, saved under the name RESIDUAL; twice: to be read now, and by the backward pass.

    FP8 values are saved as bytes: on what is both saved and read in the forward pass `jax.checkpoint` puts a
    `lax.reduce_precision`, which takes E4M3FN for an IEEE format with infinities, and turns its values above 240 into NaN.
    """

    def one(leaf: Array) -> tuple[Array, Array]:
        if not leaf.dtype.name.startswith("float8"):
            leaf = checkpoint_name(leaf, RESIDUAL)
            return leaf, leaf
        values = checkpoint_name(lax.bitcast_convert_type(leaf, jnp.uint8), RESIDUAL)
        return lax.bitcast_convert_type(values, leaf.dtype), lax.bitcast_convert_type(values, leaf.dtype)

    leaves, structure = jax.tree.flatten(tree)
    now, later = zip(*map(one, leaves), strict=True) if leaves else ((), ())
    return jax.tree.unflatten(structure, now), jax.tree.unflatten(structure, later)


def _stored(recipe: Recipe, tensor: Tensor, quantizer: AbstractQuantizer, scale: Array) -> Array | None:
    """The stored scale [] of a stateful quantizer; None for the others."""
    rows: list[tuple[Tensor, AbstractQuantizer]] = [(row.tensor, row.quantizer) for row in recipe.rows]
    return scale[rows.index((tensor, quantizer))] if (tensor, quantizer) in rows else None


def _amax(
    call: Call,
    value: Array,
    stored: Array | None,
    spans: dict[AbstractGranularity, frozenset[str]],
    apart: frozenset[str],
    granularity: AbstractGranularity,
) -> Array:
    """The amax of the whole logical tensor, on every mesh."""
    across = spans[granularity]
    untold = frozenset() if call.types_tell else call.reduce_axes or frozenset()
    if stored is not None:
        return pmax(observe(value, stored), (varying(value) - varying(stored)) | untold | across)
    if isinstance(granularity, PerTensor):
        return pmax(amax_of(value, granularity), (varying(value) - apart) | untold | across)
    return pmax(amax_of(value, granularity), across)


def _seen(call: Call, tensor: Tensor, value: Array, ledger: Array | None) -> Seen:
    """The amax of each row of state that follows the tensor, as far as it can be combined here."""
    if not call.collected or ledger is None:
        return {}
    likes = {(row.tensor, r): ledger[0, r] for r, row in enumerate(call.recipe.rows) if row.tensor == tensor}
    # Without types only the shard says over which axes the amax of a gathered operand spans devices.
    # With types value_and_grad knows, and reduces the amaxes of all matmuls at once.
    untold = frozenset() if call.types_tell else call.over(tensor) - (call.reduce_axes or frozenset())
    return {key: pmax(observe(value, like), (varying(value) - varying(like)) | untold) for key, like in likes.items()}
