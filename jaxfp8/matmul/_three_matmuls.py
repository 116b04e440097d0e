"""The custom gradient of `dot_general`: three matmuls, each operand cast once.

The matmuls are fprop (y = x w), dgrad (dx = g w^T) and wgrad (dw = x^T g). g is the gradient of y.

The forward rule casts x and w for every matmul that will read them, and multiplies. It saves the
copy of x for wgrad and the copy of w for dgrad, or with `save_original` x or w itself. A weight
whose FP8 copies the model holds is not cast.

The backward rule casts g, sums it for the bias, and multiplies twice. It returns the amaxes of x, w
and g in a ledger, as the cotangent of the state's probe.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import TrainingGeometry, inverse_permutation
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import (
    Array,
    Axes,
    DType,
    FP8StateError,
    Matmul,
    PyTree,
    Tensor,
    UncollectedStateError,
)
from jaxfp8.matmul._arrays import (
    Arrays,
    Copy,
    HeldCopies,
    KnownAmaxes,
    QuantizerArrays,
    Rows,
    name_amax,
)
from jaxfp8.matmul._call import Call, Varying
from jaxfp8.matmul._given import add_bias
from jaxfp8.matmul._grouped_operands import quantize_rows, wgrad_operand
from jaxfp8.matmul._operands import Quantized, Seen, quantize_operand
from jaxfp8.matmul._stats import CastStats, Stats, send_stats
from jaxfp8.matmul._tpu_hints import row_major, row_major_copy, weight_first
from jaxfp8.numerics._formats import sum_dtype
from jaxfp8.numerics._rounding import undifferentiable
from jaxfp8.prologues._prologue import Produced, Source, produce_again, value_of
from jaxfp8.quantizers._base import Operand
from jaxfp8.sharding._amax import manual_axes, vary_as, varying_axes, varying_axes_of_type
from jaxfp8.sharding._place import Place
from jaxfp8.state._ledger import encode


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The types that cotangents must have. Static, so residuals can include it."""

    x: Any
    w: Any
    bias: Any  # None if its gradient is not needed
    learns_w: bool  # whether the gradient of w is needed


class _Forward(NamedTuple):
    y: Array
    # The copies of x for wgrad and of w for dgrad, or with `save_original` the amaxes of x or w.
    x: Copy | KnownAmaxes
    w: Copy | KnownAmaxes
    seen: Array | None
    watched: tuple[Stats, ...]


class _Original(NamedTuple):
    """A residual in high precision, which the backward pass casts."""

    arrays: tuple[Array, ...]  # the operand, or the operands of the prologue that makes it
    amaxes: KnownAmaxes  # so that the second cast reads it once


def _second_derivative(_: PyTree) -> Exception:
    return FP8StateError(
        "FP8 matmuls have no second derivative. Where one is needed, use "
        "recipe=fp8.recipes.identity()."
    )


_once = undifferentiable(_second_derivative)  # for operands


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def three_matmuls(call: Call, arrays: Arrays) -> Array:
    """The result y [...]. Its gradient is dx, dw, db and the ledger of amaxes."""
    # Nothing differentiates this call, so no cotangent can bring amaxes back: none are computed.
    arrays = arrays._replace(quantizers=arrays.quantizers._replace(ledger=None))
    forward = _fprop(call, arrays)
    send_stats(call.watched, tuple(each for each in forward.watched if "fprop" in each.matmuls))
    return add_bias(forward.y, arrays.bias, call.geometry)


@functools.partial(jax.jit, static_argnums=0)  # traced and lowered once for all equal layers
def _fprop(call: Call, arrays: Arrays) -> _Forward:
    call = _in_pass(call, jax.typeof(arrays.x), jax.typeof(arrays.w), arrays.rows)
    x = _cast_forward(call, "x", _source(call, arrays), arrays)
    if arrays.held is None:
        w = _cast_forward(call, "w", call.places.w.stored(arrays.w), arrays)
    else:
        w = _held_operand(call, arrays.held, arrays.quantizers.ledger)
    operand = x.now["fprop"]
    if call.differentiated:  # otherwise no scan saves a copy, and `jax.export` takes no constraint
        operand = row_major_copy(operand, call.geometry.fprop.lhs)
    whole_x = call.places.x.gather_operand(operand)
    whole_w = call.places.w.gather_operand(w.now["fprop"])
    out = call.out_dtype, call.out_sharding
    y = _multiply(call, arrays.rows, "fprop", whole_x, whole_w, *out)
    y = call.places.g.scatter(y)
    seen = _rows(call, {**x.seen, **w.seen}, arrays.quantizers.ledger)
    return _Forward(
        y,
        _residual(call.places.x, x, "wgrad", whole_x),
        _residual(call.places.w, w, "dgrad", whole_w),
        seen,
        (*x.watched, *w.watched, *_sum_stats(call, arrays.rows, "fprop", whole_x, whole_w)),
    )


def _residual(place: Place, cast: Quantized, reader: Matmul, whole: Operand) -> Copy | KnownAmaxes:
    """What the backward pass finds of a tensor. `whole` is what fprop read of it."""
    if reader not in cast.saved:  # it reads the original, see `save_original`
        return cast.amaxes
    return cast.saved[reader].gathered(whole) if place.stored_whole else cast.saved[reader]


def _cast_forward(call: Call, tensor: Tensor, source: Source, arrays: Arrays) -> Quantized:
    only: Matmul | None = "fprop" if tensor in call.save_original else None
    return _quantize(call, tensor, source, arrays.quantizers, arrays.rows, only=only)


def _held_operand(call: Call, held: HeldCopies, ledger: Array | None) -> Quantized:
    """A weight whose FP8 copies the model holds. Its residuals are these copies."""
    by_reader = {matmul: copy for copy in held.copies for matmul in copy.readers}
    seen: Seen = {}
    if call.collected and ledger is not None and held.seen is not None:
        rows = (r for r, row in enumerate(call.recipe.rows) if row.tensor == "w")
        seen = {("w", r): held.seen[i] for i, r in enumerate(rows)}
    now = {matmul: copy.operand for matmul, copy in by_reader.items()}
    return Quantized(now, by_reader, seen, None)


def _quantize(
    call: Call, tensor: Tensor, source: Source, own: QuantizerArrays, rows: Rows | None, *,
    column_sums: bool = False, only: Matmul | None = None,
) -> Quantized:  # fmt: skip
    """A tensor, cast once for all matmuls that read it: as one, or each group by itself."""
    if rows is not None:
        return quantize_rows(rows, call, tensor, value_of(source), own, only=only)
    return quantize_operand(call, tensor, source, own, column_sums=column_sums, only=only)


def _multiply(
    call: Call, rows: Rows | None, matmul: Matmul, lhs: Operand, rhs: Operand,
    out_dtype: DType, out_sharding: Any,
) -> Array:  # fmt: skip
    """One of the three matmuls, or that of each group."""
    if rows is not None:
        result = call.multiply_groups(matmul, lhs, rhs, rows.groups, out_dtype)
        return rows.returned(matmul, result)
    return call.multiply(matmul, lhs, rhs, out_dtype, out_sharding)


def _sum_stats(
    call: Call, rows: Rows | None, matmul: Matmul, lhs: Operand, rhs: Operand
) -> tuple[Stats, ...]:
    """What is watched of the sums of `_multiply`; () for groups."""
    return () if rows is not None else call.sum_stats(matmul, lhs, rhs)


def _source(call: Call, arrays: Arrays) -> Source:
    if call.prologue is None or arrays.parts is None:
        return arrays.x
    return Produced(arrays.x, arrays.parts, call.prologue)


def _in_pass(call: Call, x: Any, w: Any, rows: Rows | None, g: Array | None = None) -> Call:
    """The call, with the axes over which its operands vary. x and w are types."""
    if not call.amax_axes.manual:
        return call
    of_x = varying_axes_of_type(x)
    if rows is not None:
        # The same rows may belong to other groups elsewhere.
        of_x |= varying_axes(rows.groups.tiles)
    # A matmul reads whole operands, so axes that they are gathered over do not count.
    varying = Varying(
        of_x - call.places.x.manual_axes,
        varying_axes_of_type(w) - call.places.w.manual_axes,
        frozenset() if g is None else varying_axes(g) - call.places.g.manual_axes,
    )
    return dataclasses.replace(call, varying=varying)


def _check_differentiated(call: Call, primals: Any) -> None:
    """FP8StateError for FP8 values of a weight, and for a matmul with state without its state."""
    own = primals.quantizers
    if any(leaf.perturbed for leaf in jax.tree.leaves(primals.held, is_leaf=_is_primal)):
        raise FP8StateError(
            "an FP8 weight is being differentiated, but its values have no gradient. Use "
            "fp8.value_and_grad(loss)(params, state, ...) in place of jax.value_and_grad, with "
            "state=() for recipes without state (nnx: fp8.nnx.value_and_grad). It gives the "
            "gradient of the weight in high precision."
        )
    # The gradient of a bias alone reads no FP8 tensor, so it needs no state.
    matmul = [primals.x, primals.w, *([] if own.known is None else [own.known])]
    differentiated = any(each.perturbed for each in matmul)
    if call.collected and differentiated and (own.ledger is None or not own.ledger.perturbed):
        if call.in_gradient_channel:
            raise UncollectedStateError(
                'a matmul with state_channel="gradient" is being differentiated, but not with '
                "respect to its state, so the next state would be lost. Differentiate all "
                "variables, also those of the state: jax.value_and_grad(loss)(variables), and "
                "without stop_gradient. In nnx write argnums=nnx.DiffState(0, nnx.Any(nnx.Param, "
                "fp8.nnx.FP8State)). If this loss does not train the network, use "
                "jax.lax.stop_gradient(fp8.freeze(state))."
            )
        raise UncollectedStateError(
            "a matmul with quantizer state is being differentiated, but its state is not "
            "collected. Use fp8.value_and_grad in place of jax.value_and_grad (nnx: "
            "fp8.nnx.value_and_grad). Pass the state that it gives to the loss on to the layers, "
            "without stop_gradient. If this loss does not train the network, use "
            "fp8.freeze(state) or fp8.nnx.freeze(model)."
        )


def _is_primal(node: object) -> bool:
    return isinstance(node, jax.custom_derivatives.CustomVJPPrimal)


def _forward_rule(call: Call, primals: Any) -> tuple[Array, Any]:
    # `primals` are Arrays. Each leaf has a `value`, and `perturbed`: whether it is differentiated.
    _check_differentiated(call, primals)
    given = jax.tree.map(lambda leaf: leaf.value, primals)
    x, w = _once((given.x, given.w))
    call = dataclasses.replace(call, differentiated=True)
    y, x_saved, w_saved, *scalars = _fprop(call, given._replace(x=x, w=w))
    if isinstance(x_saved, KnownAmaxes):
        x_saved = _Original((x,) if given.parts is None else given.parts, x_saved)
    if isinstance(w_saved, KnownAmaxes):
        w_saved = _Original((w,), w_saved)
    scalars = jax.tree.map(name_amax, scalars)
    # The sums for a bias that is not differentiated would be computed for nothing.
    learned = primals.bias is not None and primals.bias.perturbed
    of_bias = jax.typeof(given.bias) if learned else None
    types = _Types(jax.typeof(x), jax.typeof(w), of_bias, primals.w.perturbed)
    bias = None if given.bias is None else _once(given.bias)
    residuals = x_saved, w_saved, scalars, given.quantizers, types, given.rows
    return add_bias(y, bias, call.geometry), residuals


def _backward_rule(call: Call, residuals: Any, gradient: Any) -> tuple[Arrays]:
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):  # y has no cotangent
        aval: Any = gradient.aval
        gradient = jnp.zeros(aval.shape, aval.dtype)
    return (_gradients(call, residuals, gradient),)


@functools.partial(jax.jit, static_argnums=0)  # as above
def _gradients(call: Call, residuals: Any, gradient: Array) -> Arrays:
    x, w, (seen, watched), own, types, rows = residuals
    gradient = _once(gradient)
    call = _in_pass(call, types.x, types.w, rows, gradient)
    g = _quantize(
        call, "g", gradient, own, rows,
        column_sums=types.bias is not None and _sums_columns(call.geometry),
    )  # fmt: skip
    x, of_x = _read(call, "x", x, own, gradient, rows)
    w, of_w = _read(call, "w", w, own, gradient, rows)
    dgrad, wgrad = _gathered_once(call.places.g, g.now["dgrad"], g.now["wgrad"])
    of_sums = (
        *_sum_stats(call, rows, "dgrad", dgrad, w),
        *(_sum_stats(call, rows, "wgrad", x, wgrad) if types.learns_w else ()),
    )
    send_stats(call.watched, (*watched, *g.watched, *of_x, *of_w, *of_sums))
    axes = call.geometry.fprop.lhs, call.geometry.dgrad.lhs, call.geometry.dgrad.lhs
    x, dgrad, wgrad = map(row_major_copy, _in_turn(rows, x, dgrad, wgrad), axes)
    if types.learns_w and rows is None:  # XLA would copy the rows of experts for the barrier
        w, wgrad = weight_first(w, wgrad)
    dx_axes, dw_axes = call.geometry.dx_axes, call.geometry.dw_axes
    if rows is not None:
        dw_axes = (0, *(1 + axis for axis in dw_axes))  # the groups come first
    dx = _multiply(call, rows, "dgrad", dgrad, w, types.x.dtype, _sharding_of(types.x, dx_axes))
    dw = _multiply(call, rows, "wgrad", x, wgrad, types.w.dtype, _sharding_of(types.w, dw_axes))
    dx = call.places.x.scatter(_cotangent(dx, dx_axes, types.x))
    # XLA for TPUs may compute a transposed gradient. It then transposes the weight and its moments
    # for the optimizer, and once more after it, in unrolled blocks.
    dw = row_major(call.places.w.scatter(_cotangent(dw, dw_axes, types.w)))
    db = None
    if types.bias is not None:
        db = _bias_gradient(gradient, g.column_sums, types.bias, call.geometry)
    of_g = _rows(call, g.seen, own.ledger)
    ledger = None if seen is None or of_g is None else encode(jnp.maximum(seen, of_g))
    return Arrays(dx, dw, db, None, QuantizerArrays(ledger=ledger))


def _read(
    call: Call, tensor: Tensor, saved: Copy | _Original, own: QuantizerArrays, gradient: Array,
    rows: Rows | None,
) -> tuple[Operand, tuple[CastStats, ...]]:  # fmt: skip
    """The whole operand x of wgrad or w of dgrad from its residual, and statistics of its cast."""
    place: Place = getattr(call.places, tensor)
    if isinstance(saved, Copy):
        whole = saved.with_scale(own.known)
        if not saved.is_whole:  # a shard saves memory, but is gathered again for this pass
            whole = place.gather_operand(whole)
        if rows is not None and rows.routed == tensor:
            whole = wgrad_operand(rows, call, tensor, whole, own, after=gradient)
        return whole, ()
    arrays = _readable(saved.arrays, gradient)
    source: Source = arrays[0]
    if tensor == "w":
        source = place.stored(arrays[0])
    elif call.prologue is not None:
        source = produce_again(call.prologue, arrays)
    matmul: Matmul = "wgrad" if tensor == "x" else "dgrad"
    known = own._replace(ledger=None, amaxes=saved.amaxes)
    cast = _quantize(call, tensor, source, known, rows, only=matmul)
    return place.gather_operand(cast.now[matmul]), cast.watched


def _gathered_once(place: Place, first: Operand, second: Operand) -> tuple[Operand, Operand]:
    """The whole operands of two matmuls. If both read one copy, it is gathered once."""
    whole = place.gather_operand(first)
    return whole, whole if second is first else place.gather_operand(second)


def _in_turn(
    rows: Rows | None, x: Operand, dgrad: Operand, wgrad: Operand
) -> tuple[Operand, Operand, Operand]:
    """The operand x of wgrad, and g for dgrad and for wgrad: all are made before dgrad runs."""
    # XLA overlaps the exchange of dx with what follows dgrad. The second cast of rows that arrived
    # in FP8 must not follow it. Rows in bfloat16 would be live beside both buffers of the exchange.
    again = x if rows is None or rows.routed == "x" else wgrad
    if rows is None or rows.route is None or not isinstance(again, QuantizedTensor):
        return x, dgrad, wgrad
    if again.granularity.in_one:  # nothing is cast again
        return x, dgrad, wgrad
    return lax.optimization_barrier((x, dgrad, wgrad))


def _readable(x: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
    """Arrays as the backward pass reads them: after `gradient`, and not before.

    Without the barrier XLA would find that both passes cast the same arrays. It would keep the FP8
    copies from one to the other, beside the arrays.
    """
    if manual_axes():  # after a barrier of both, each would vary over the mesh axes of both
        return lax.optimization_barrier(x)
    return lax.optimization_barrier((x, gradient))[0]


def _rows(call: Call, seen: Seen, like: Array | None) -> Array | None:
    """The amaxes of a pass in one array f32[R]; None if nothing collects them."""
    # For instance if only the bias is differentiated.
    if not call.collected or like is None:
        return None

    # A row that another pass sees has 0.
    def unseen(slot: Array) -> Array:
        # The select keeps the mesh axes and mapped axes of the ledger, and XLA removes it.
        return jnp.where(slot > 0, jnp.zeros_like(slot), 0.0)

    keys = [(row.tensor, r) for r, row in enumerate(call.recipe.rows)]
    amaxes = [seen[key] if key in seen else unseen(like[..., 0, key[1]]) for key in keys]
    if call.amax_axes.manual:
        # `jnp.stack` needs one type, and a cotangent must vary as its probe does.
        amaxes = [vary_as(amax, like) for amax in amaxes]
    return jnp.stack(amaxes, axis=-1)  # a state of each group has an axis in front


three_matmuls.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


# Gradients as their tensors are: with their axes in order, their sharding and their mesh axes.


def _sharding_of(aval: Any, axes: Axes) -> Any:
    """The sharding of a result whose axes are those of `aval`, permuted by `axes`."""
    mesh = aval.sharding.mesh
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None  # the compiler decides
    return jax.sharding.NamedSharding(mesh, jax.P(*(aval.sharding.spec[axis] for axis in axes)))


def _cotangent(result: Array, axes: Axes, aval: Any) -> Array:
    """The cotangent of a tensor of type `aval`, from a result with its axes permuted by `axes`."""
    missing = varying_axes(result) - varying_axes_of_type(aval)
    if missing:
        result = lax.psum(result, tuple(sorted(missing)))
    return result.transpose(inverse_permutation(axes))


# The gradient of the bias.
#
# The kernel that casts the gradient of the result reads all of it, so it can also sum its columns
# for the bias. The result is [B, M, N], as in `add_bias`.


def _bias_gradient(
    gradient: Array, column_sums: Array | None, bias: Any, geometry: TrainingGeometry
) -> Array:
    """The gradient [B, N] of a bias with the type `bias`: sums over M of [B, M, N]."""
    axes = geometry.fprop.added_axes[1]
    summed = gradient if column_sums is None else column_sums
    total = jnp.sum(summed, axes, sum_dtype(summed.dtype))
    # Devices that share the bias must share its gradient.
    missing = varying_axes(total) - varying_axes_of_type(bias)
    if missing:
        total = lax.psum(total, tuple(sorted(missing)))
    total = total.astype(bias.dtype)
    if jax.sharding.AxisType.Explicit in bias.sharding.mesh.axis_types:
        total = jax.sharding.reshard(total, bias.sharding)
    return total


def _sums_columns(geometry: TrainingGeometry) -> bool:
    """Whether sums of g over its last axis but one help to sum the gradient of the bias."""
    summed, ndim = geometry.fprop.added_axes[1], len(geometry.wgrad.rhs.order)
    return ndim - 2 in summed and ndim - 1 not in summed
