"""`dot_general` in FP8, with its gradient: three matmuls, each operand cast once.

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
from jaxfp8._typing import Array, Axes, DotDimensionNumbers, DType, Implementation
from jaxfp8.kernels.scaled_matmul._api import scaled_matmul
from jaxfp8.numerics._amax import amax as amax_of
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.ops._arguments import check_operands, fp8_precision
from jaxfp8.ops._checkpoint_policies import RESIDUAL
from jaxfp8.ops._dimension_numbers import Geometry, check, geometry, inverse_permutation
from jaxfp8.ops._ledger import encode, observe
from jaxfp8.ops._once import once
from jaxfp8.ops._state import MatmulState
from jaxfp8.quantizers._base import AbstractQuantizer, Operand
from jaxfp8.quantizers._current import Current
from jaxfp8.quantizers._delayed import Delayed
from jaxfp8.recipes._recipe import Matmul, Recipe, Tensor
from jaxfp8.sharding._amax import manual_axes, pmax, psum_to, types_tell, varying, vary_as
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    out_sharding: Any = None,
    reduce_axes: tuple[str, ...] | None = None,
    implementation: Implementation = None,
) -> Array:
    """`jax.lax.dot_general` with FP8 operands, forward and backward, as the recipe says.

    Args:
      lhs: activations x, [..., M, K] or as `dimension_numbers` say; bfloat16, float16, float32 (or float64, computed in
        float32).
      rhs: weights w, [K, N] or as `dimension_numbers` say.
      dimension_numbers: `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`.
      precision: of fprop: None or DEFAULT lets Hopper accumulate fast, HIGH and HIGHEST do not; dgrad and wgrad never do.
        Operands that stay in high precision get it as it is.
      preferred_element_type: dtype of the result; default: what the operands promote to.
      recipe: which quantizer for which operand.
      state: of this matmul, for recipes that have any (`fp8.init_state`).
      out_sharding: as in `jax.lax.dot_general`, for Explicit meshes.
      reduce_axes: mesh axes over which a tensor is split, to combine its amax over. Needed inside
        `shard_map(check_vma=False)` only; elsewhere types tell. (With state, `fp8.value_and_grad(reduce_axes=)` says it.)
      implementation: a kernel backend by name, or None for the first that can.

    Returns:
      [batch, lhs kept, rhs kept].

    Raises:
      TypeError, ValueError: for operands that are no float arrays, or do not fit.
      FP8StateError: if the state is missing, of another recipe, or would be lost.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, w = jnp.full((2, 4), 7.0), jnp.full((4, 3), 3.5)
      >>> fp8.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=fp8.recipes.current())
      Array([[98., 98., 98.],
             [98., 98., 98.]], dtype=float32)

    References:
      Micikevicius et al., arXiv:2209.05433; TransformerEngine user guide, FP8 primer.
    """
    lhs, rhs = check_operands(lhs, rhs, recipe)
    dimension_numbers = check(lhs.shape, rhs.shape, dimension_numbers)
    if recipe.is_identity:
        return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)
    out_dtype = jnp.promote_types(lhs.dtype, rhs.dtype) if preferred_element_type is None else preferred_element_type
    state = _check_state(state, recipe)
    probe = state.probe if state else None
    call = _Call(
        recipe=recipe,
        geometry=geometry(dimension_numbers, lhs.ndim, rhs.ndim),
        out_dtype=jnp.dtype(out_dtype),
        precision=precision,
        fast_accumulation=fp8_precision(precision),
        out_sharding=out_sharding,
        collected=bool(state) and not state.frozen,
        all_set=probe.all_set if probe else False,
        reduce_axes=_reduce_axes(recipe, reduce_axes, probe.reduce_axes if probe else None),
        implementation=implementation,
    )
    return _dot_general(call, lhs, rhs, state.scale if state else None, probe.ledger if probe else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
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
    implementation: Implementation


Seen: TypeAlias = dict[tuple[Tensor, int], Array]
"""The amax of each row of state that follows a tensor."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Primals:
    """The types of lhs and rhs, which their cotangents must have; static, to ride among the residuals."""

    lhs: Any
    rhs: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot_general(call: _Call, lhs: Array, rhs: Array, scale: Array | None, ledger: Array | None) -> Array:
    del ledger
    return _fprop(call, lhs, rhs, scale, None)[0]


def _fprop(call: _Call, lhs: Array, rhs: Array, scale: Array | None, ledger: Array | None) -> tuple[Array, Operand, Operand, Seen]:
    """y, the copy of x for wgrad, the copy of w for dgrad, and the amaxes of x and w."""
    x = _cast(call, "x", lhs, scale, wgrad=varying(lhs) - varying(rhs))
    w = _cast(call, "w", rhs, scale, dgrad=varying(rhs) - varying(lhs))
    x, x_seen = _collect(call, "x", lhs, x, ledger)
    w, w_seen = _collect(call, "w", rhs, w, ledger)
    y = _matmul(call, "fprop", x["fprop"], w["fprop"], call.out_dtype, call.out_sharding)
    return y, x["wgrad"], w["dgrad"], {**x_seen, **w_seen}


def _forward_rule(call: _Call, lhs, rhs, scale, ledger):
    if call.collected and (ledger is None or not ledger.perturbed):
        raise FP8StateError(
            "a matmul with quantizer state is being differentiated, but its state is not collected. Use fp8.value_and_grad "
            "(fp8.nnx.value_and_grad for nnx) in place of jax's, pass the state that it gives to the loss on to the layers, "
            "without stop_gradient, or fix the scales with fp8.freeze."
        )
    lhs, rhs = once((lhs.value, rhs.value))
    scale, ledger = (None if leaf is None else leaf.value for leaf in (scale, ledger))
    y, x, w, seen = _fprop(call, lhs, rhs, scale, ledger)
    x, w, seen = jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL), (x, w, seen))
    return y, (x, w, seen, scale, ledger, _Primals(jax.typeof(lhs), jax.typeof(rhs)))


def _backward_rule(call: _Call, residuals, gradient):
    x, w, seen, scale, ledger, primals = residuals
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        gradient = jnp.zeros(gradient.aval.shape, gradient.aval.dtype)
    gradient = once(gradient)
    x_varies, w_varies = (frozenset(aval.manual_axis_type.varying) for aval in (primals.lhs, primals.rhs))
    g = _cast(
        call, "g", gradient, scale,
        dgrad=(varying(gradient) | w_varies) - x_varies, wgrad=(varying(gradient) | x_varies) - w_varies,
    )  # fmt: skip
    g, g_seen = _collect(call, "g", gradient, g, ledger)
    dx_axes, dw_axes = call.geometry.product_axes
    dx = _matmul(call, "dgrad", g["dgrad"], w, primals.lhs.dtype, _product_sharding(primals.lhs, dx_axes))
    dw = _matmul(call, "wgrad", x, g["wgrad"], primals.rhs.dtype, _product_sharding(primals.rhs, dw_axes))
    dx, dw = (_cotangent(d, axes, aval) for d, axes, aval in ((dx, dx_axes, primals.lhs), (dw, dw_axes, primals.rhs)))
    if not call.collected:
        return dx, dw, None, None
    seen = {**seen, **g_seen}
    rows = [vary_as(seen[row.tensor, r], ledger) for r, row in enumerate(call.recipe.rows)]
    return dx, dw, None, encode(jnp.stack(rows))


_dot_general.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _cast(
    call: _Call, tensor: Tensor, value: Array, scale: Array | None, **contracted: frozenset[str]
) -> dict[Matmul, Operand]:
    """A tensor as each matmul reads it, cast once for those that read the same.

    `contracted`: the mesh axes along which a matmul contracts the tensor across devices; its row amaxes span them.
    """
    cast: dict[tuple[AbstractQuantizer, AbstractGranularity], Operand] = {}
    reads: dict[Matmul, Operand] = {}
    for matmul, quantizer in call.recipe.uses(tensor):
        granularity = quantizer.granularity.for_matmul(call.geometry.kept(matmul, tensor))
        stored = None
        if quantizer.stateful:
            assert scale is not None
            stored = scale[..., [row[:2] for row in call.recipe.rows].index((tensor, quantizer))]
        across = contracted.get(matmul, frozenset())
        if (quantizer, granularity) not in cast:
            amax = functools.partial(_amax, call, value, granularity, stored, across)
            cast[quantizer, granularity] = quantizer.quantize(
                value, granularity, amax=amax, scale=stored, all_set=call.all_set, implementation=call.implementation
            )
        reads[matmul] = cast[quantizer, granularity]
    return reads


def _amax(
    call: _Call, value: Array, granularity: AbstractGranularity, stored: Array | None, across: frozenset[str]
) -> Array:
    """The amax of the whole logical tensor, on every mesh."""
    if stored is not None:
        return pmax(observe(value, stored), (varying(value) - varying(stored)) | set(call.reduce_axes))
    if isinstance(granularity, PerTensor):
        return pmax(amax_of(value, granularity), varying(value) | set(call.reduce_axes))
    return pmax(amax_of(value, granularity), across)


def _collect(
    call: _Call, tensor: Tensor, value: Array, cast: dict[Matmul, Operand], ledger: Array | None
) -> tuple[dict[Matmul, Operand], Seen]:
    """A cast tensor, and the amax of each row of state that follows it, as far as it can be combined here."""
    if not call.collected or ledger is None:
        return cast, {}
    seen: Seen = {}
    for r, row in enumerate(call.recipe.rows):
        if row.tensor == tensor:
            like = ledger[r, 0]
            seen[tensor, r] = pmax(observe(value, like), varying(value) - varying(like))
    return jax.lax.optimization_barrier(cast) if call.all_set else cast, seen


def _matmul(call: _Call, matmul: Matmul, lhs: Operand, rhs: Operand, out_dtype: DType, out_sharding: Any) -> Array:
    """One of the three products; in FP8 if both operands are."""
    dimension_numbers = call.geometry.dimension_numbers[("fprop", "dgrad", "wgrad").index(matmul)]
    with jax.named_scope(f"jaxfp8.{matmul}"):
        if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
            return scaled_matmul(
                lhs, rhs, dimension_numbers=dimension_numbers, preferred_element_type=out_dtype,
                fast_accumulation=call.fast_accumulation and matmul == "fprop", out_sharding=out_sharding,
                implementation=call.implementation,
            )  # fmt: skip
        lhs, rhs = (t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (lhs, rhs))
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        return lax.dot_general(
            lhs.astype(dtype), rhs.astype(dtype), dimension_numbers, call.precision, out_dtype, out_sharding=out_sharding
        )


def _product_sharding(aval: Any, product_axes: Axes) -> Any:
    """The sharding that a product needs so that it becomes a cotangent of `aval`; None where the compiler decides."""
    mesh = aval.sharding.mesh
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    return jax.sharding.NamedSharding(mesh, jax.P(*(aval.sharding.spec[axis] for axis in product_axes)))


def _cotangent(product: Array, product_axes: Axes, aval: Any) -> Array:
    """A product with its axes in the order of its tensor, summed over the mesh axes that the tensor does not vary over."""
    missing = varying(product) - frozenset(aval.manual_axis_type.varying)
    if missing:
        product = lax.psum(product, tuple(sorted(missing)))
    return product.transpose(inverse_permutation(product_axes))


def _check_state(state: MatmulState | tuple[()] | None, recipe: Recipe) -> MatmulState | None:
    if not recipe.rows:
        if state is None or (isinstance(state, tuple) and not state):
            return None
        raise FP8StateError(f"recipe {recipe.name!r} has no state, got {type(state).__name__}; pass state=None.")
    if not isinstance(state, MatmulState):
        raise FP8StateError(
            f"recipe {recipe.name!r} needs the state of this matmul, got state={state!r}; make it with fp8.init_state(recipe)."
        )
    if state.rows != recipe.rows:
        raise FP8StateError(
            f"state belongs to another recipe: it has rows {state.rows}, recipe {recipe.name!r} has {recipe.rows}. "
            "Start from fp8.init_state(recipe)."
        )
    if state.scale.shape != (len(recipe.rows),):
        raise FP8StateError(
            f"state.scale has shape {list(state.scale.shape)}, but one matmul has [{len(recipe.rows)}]: index stacked states "
            "(scan, vmap, or state of one layer) before the call."
        )
    return state


def _reduce_axes(recipe: Recipe, given: tuple[str, ...] | None, probed: tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes to combine per-tensor amaxes over that types do not tell.

    Raises:
      FP8StateError: where nobody tells, rather than a local amax.
    """
    named = given if given is not None else probed
    if types_tell():
        if given:
            raise ValueError(f"reduce_axes={given} is not used here: types tell over which axes a value varies.")
        return ()
    if named is None:
        per_tensor = any(
            isinstance(q, Current | Delayed) and isinstance(q.granularity, PerTensor)
            for tensor in ("x", "w", "g")
            for _, q in recipe.uses(tensor)
        )
        if not per_tensor:
            return ()
        raise FP8StateError(
            f"inside shard_map(check_vma=False) over {manual_axes()} types do not tell which mesh axes a tensor is split over: "
            "name those that an amax has to be combined over with reduce_axes= (of fp8.value_and_grad, or of this call or layer)."
        )
    return tuple(axis for axis in named if axis in manual_axes())
