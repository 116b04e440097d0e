"""The custom gradient of `dot_general`: three matmuls, each operand cast once.

The forward rule casts x and w for every matmul that will read them, multiplies, and saves the copy of x that wgrad reads
and the copy of w that dgrad reads. The backward rule casts g, multiplies twice, and hands the amaxes of x, w and g to the
state's probe as a ledger.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, Axes, DType, Implementation, PyTree
from jaxfp8.comms._collectives import check_borders, gather_parts, has_cells_along
from jaxfp8.comms._shard import Shard
from jaxfp8.kernels.scaled_matmul._api import scaled_matmul
from jaxfp8.numerics._amax import amax as amax_of
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.ops._checkpoint_policies import RESIDUAL
from jaxfp8.ops._dimension_numbers import Geometry, inverse_permutation
from jaxfp8.ops._ledger import encode, observe
from jaxfp8.ops._once import once
from jaxfp8.quantizers._base import AbstractQuantizer, Operand
from jaxfp8.recipes._recipe import Matmul, Recipe, Tensor
from jaxfp8.sharding._amax import pmax, vary_as, varying
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
    reduce_axes: tuple[str, ...]  # mesh axes that types do not tell
    shards: tuple[tuple[Tensor, Shard], ...]  # operands that are gathered in FP8
    implementation: Implementation

    def shard(self, tensor: Tensor) -> Shard | None:
        return dict(self.shards).get(tensor)

    def over(self, tensor: Tensor) -> frozenset[str]:
        """The mesh axes over which a tensor is split and gathered, so that a matmul sees the whole."""
        shard = self.shard(tensor)
        return frozenset() if shard is None else frozenset({shard.axis_name})


Seen: TypeAlias = dict[tuple[Tensor, int], Array]
"""The amax of each row of state that follows a tensor."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Primals:
    """The types of lhs and rhs, which their cotangents must have; static, to ride among the residuals."""

    lhs: Any
    rhs: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def three_matmuls(call: Call, lhs: Array, rhs: Array, scale: Array | None, ledger: Array | None) -> Array:
    del ledger
    return _fprop(call, lhs, rhs, scale, None)[0]


def _fprop(
    call: Call, lhs: Array, rhs: Array, scale: Array | None, ledger: Array | None
) -> tuple[Array, Operand, Operand, Seen]:
    """y, the copy of x for wgrad, the copy of w for dgrad, and the amaxes of x and w."""
    x_varies, w_varies = varying(lhs) - call.over("x"), varying(rhs) - call.over("w")
    x, x_saved, x_seen = _cast(call, "x", lhs, scale, ledger, wgrad=x_varies - w_varies)
    w, w_saved, w_seen = _cast(call, "w", rhs, scale, ledger, dgrad=w_varies - x_varies)
    x_whole, w_whole = _gathered(call, "x", x["fprop"]), _gathered(call, "w", w["fprop"])
    y = _matmul(call, "fprop", x_whole, w_whole, call.out_dtype, call.out_sharding)
    return y, x_saved["wgrad"], w_saved["dgrad"], {**x_seen, **w_seen}


def _forward_rule(call: Call, lhs: Any, rhs: Any, scale: Any, ledger: Any) -> tuple[Array, Any]:
    if call.collected and (ledger is None or not ledger.perturbed):
        raise FP8StateError(
            "a matmul with quantizer state is being differentiated, but its state is not collected. Use fp8.value_and_grad "
            "(fp8.nnx.value_and_grad for nnx) in place of jax's, pass the state that it gives to the loss on to the layers, "
            "without stop_gradient, or fix the scales with fp8.freeze."
        )
    lhs, rhs = once((lhs.value, rhs.value))
    scale, ledger = (None if leaf is None else leaf.value for leaf in (scale, ledger))
    y, x, w, seen = _fprop(call, lhs, rhs, scale, ledger)
    return y, (x, w, seen, scale, ledger, _Primals(jax.typeof(lhs), jax.typeof(rhs)))


def _backward_rule(call: Call, residuals: Any, gradient: Any) -> tuple[Array, Array, None, Array | None]:
    x, w, seen, scale, ledger, primals = residuals
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        aval: Any = gradient.aval
        gradient = jnp.zeros(aval.shape, aval.dtype)
    gradient = once(gradient)
    x_varies = frozenset(primals.lhs.manual_axis_type.varying) - call.over("x")
    w_varies = frozenset(primals.rhs.manual_axis_type.varying) - call.over("w")
    g, _, g_seen = _cast(
        call, "g", gradient, scale, ledger,
        dgrad=(varying(gradient) | w_varies) - x_varies, wgrad=(varying(gradient) | x_varies) - w_varies,
    )  # fmt: skip
    dx_axes, dw_axes = call.geometry.product_axes
    x, w = _gathered(call, "x", x), _gathered(call, "w", w)
    dx = _matmul(call, "dgrad", g["dgrad"], w, primals.lhs.dtype, _product_sharding(primals.lhs, dx_axes))
    dw = _matmul(call, "wgrad", x, g["wgrad"], primals.rhs.dtype, _product_sharding(primals.rhs, dw_axes))
    dx = _cotangent(dx, dx_axes, primals.lhs, call.shard("x"))
    dw = _cotangent(dw, dw_axes, primals.rhs, call.shard("w"))
    if not call.collected:
        return dx, dw, None, None
    seen = {**seen, **g_seen}
    rows = [vary_as(seen[row.tensor, r], ledger) for r, row in enumerate(call.recipe.rows)]
    return dx, dw, None, encode(jnp.stack(rows))


three_matmuls.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _cast(
    call: Call, tensor: Tensor, value: Array, scale: Array | None, ledger: Array | None, **contracted: frozenset[str]
) -> tuple[dict[Matmul, Operand], dict[Matmul, Operand], Seen]:
    """A tensor as each matmul reads it, cast once for those that read the same; the same as residuals; its rows' amaxes.

    `contracted`: the mesh axes along which a matmul contracts the tensor across devices; its row amaxes span them.
    """
    # One call of a quantizer for all the directions in which matmuls read its result.
    directions: dict[AbstractQuantizer, dict[AbstractGranularity, frozenset[str]]] = {}
    kinds: dict[Matmul, tuple[AbstractQuantizer, AbstractGranularity]] = {}
    for matmul, quantizer in call.recipe.uses(tensor):
        granularity = quantizer.granularity.for_matmul(call.geometry.kept(matmul, tensor), value.ndim)
        across = contracted.get(matmul, frozenset()) | _spanned(call, tensor, value, granularity)
        directions.setdefault(quantizer, {}).setdefault(granularity, across)
        kinds[matmul] = quantizer, granularity
    operands: list[Operand] = []
    order: list[tuple[AbstractQuantizer, AbstractGranularity]] = []
    for quantizer, spans in directions.items():
        stored = None if scale is None else _stored(call.recipe, tensor, quantizer, scale)
        if stored is not None and (split := call.over(tensor) & varying(stored)):
            raise FP8StateError(
                f"{tensor} is gathered over {sorted(split)}, but its state varies over it, so each part would have a scale of "
                "its own; pass the state to shard_map with a spec that does not split it over that axis."
            )
        operands += quantizer.quantize(
            value, tuple(spans), amax=functools.partial(_amax, call, value, stored, spans), scale=stored,
            all_set=call.all_set, implementation=call.implementation,
        )  # fmt: skip
        order += [(quantizer, granularity) for granularity in spans]
    reads = {matmul: order.index(kind) for matmul, kind in kinds.items()}
    seen = _seen(call, tensor, value, ledger)
    if seen and call.all_set:
        # Keeps cast and amax in one kernel: on Hopper XLA would move the transpose that cuBLASLt wants through the cast.
        operands = lax.optimization_barrier(operands)
    saved = operands
    if tensor != "g":
        # Named before any matmul reads them, so that a rematerialized fprop starts from what was saved and casts nothing.
        (operands, saved), (seen, _) = _named(operands), _named(seen)
    now, later = ({matmul: each[index] for matmul, index in reads.items()} for each in (operands, saved))
    return now, later, seen


def _spanned(call: Call, tensor: Tensor, value: Array, granularity: AbstractGranularity) -> frozenset[str]:
    """The mesh axes over which scale cells of a split tensor span devices."""
    shard = call.shard(tensor)
    if shard is None:
        return frozenset()
    if has_cells_along(granularity, value.ndim, shard.axis):
        check_borders(granularity, value.shape, shard.axis, value.shape[shard.axis])
        return frozenset()
    return call.over(tensor)


def _gathered(call: Call, tensor: Tensor, operand: Operand) -> Operand:
    """The whole of an operand, of which each device has a part."""
    shard = call.shard(tensor)
    if shard is None:
        return operand
    if isinstance(operand, QuantizedTensor):
        return gather_parts(operand, shard.axis_name, shard.axis)
    return lax.all_gather(operand, shard.axis_name, axis=shard.axis, tiled=True)


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
    granularity: AbstractGranularity,
) -> Array:
    """The amax of the whole logical tensor, on every mesh."""
    across = spans[granularity]
    if stored is not None:
        return pmax(observe(value, stored), (varying(value) - varying(stored)) | set(call.reduce_axes) | across)
    if isinstance(granularity, PerTensor):
        return pmax(amax_of(value, granularity), varying(value) | set(call.reduce_axes) | across)
    return pmax(amax_of(value, granularity), across)


def _seen(call: Call, tensor: Tensor, value: Array, ledger: Array | None) -> Seen:
    """The amax of each row of state that follows the tensor, as far as it can be combined here."""
    if not call.collected or ledger is None:
        return {}
    likes = {(row.tensor, r): ledger[r, 0] for r, row in enumerate(call.recipe.rows) if row.tensor == tensor}
    return {key: pmax(observe(value, like), varying(value) - varying(like)) for key, like in likes.items()}


def _matmul(call: Call, matmul: Matmul, lhs: Operand, rhs: Operand, out_dtype: DType, out_sharding: Any) -> Array:
    """One of the three products; in FP8 if both operands are."""
    dimension_numbers = call.geometry.dimension_numbers[("fprop", "dgrad", "wgrad").index(matmul)]
    with jax.named_scope(f"jaxfp8.{matmul}"):
        if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
            return scaled_matmul(
                lhs, rhs, dimension_numbers=dimension_numbers, preferred_element_type=out_dtype,
                fast_accumulation=call.fast_accumulation and matmul == "fprop", out_sharding=out_sharding,
                chip=call.recipe.chip, implementation=call.implementation,
            )  # fmt: skip
        lhs, rhs = (t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (lhs, rhs))
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        return lax.dot_general(
            lhs.astype(dtype),
            rhs.astype(dtype),
            dimension_numbers,
            call.precision,
            out_dtype,
            out_sharding=out_sharding,
        )


def _product_sharding(aval: Any, product_axes: Axes) -> Any:
    """The sharding that a product needs so that it becomes a cotangent of `aval`; None where the compiler decides."""
    mesh = aval.sharding.mesh
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    return jax.sharding.NamedSharding(mesh, jax.P(*(aval.sharding.spec[axis] for axis in product_axes)))


def _cotangent(product: Array, product_axes: Axes, aval: Any, shard: Shard | None) -> Array:
    """A product with its axes in the order of its tensor, summed over the mesh axes that the tensor does not vary over.

    Of a tensor that was gathered each device keeps its part of the sum.
    """
    missing = varying(product) - frozenset(aval.manual_axis_type.varying)
    if missing:
        product = lax.psum(product, tuple(sorted(missing)))
    product = product.transpose(inverse_permutation(product_axes))
    if shard is None:
        return product
    return lax.psum_scatter(product, shard.axis_name, scatter_dimension=shard.axis, tiled=True)
