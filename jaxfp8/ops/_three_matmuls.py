"""The custom gradient of `dot_general`: three matmuls, each operand cast once.

The forward rule casts x and w for every matmul that will read them, multiplies, and saves the copy of x that wgrad reads
and the copy of w that dgrad reads. The backward rule casts g, sums it for the bias, multiplies twice, and hands the amaxes of
x, w and g to the state's probe as a ledger.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._errors import UncollectedStateError
from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels._prologue import Produced, Source, value_of
from jaxfp8.kernels.scaled_matmul._api import scaled_matmul
from jaxfp8.ops._bias import add_bias, bias_gradient, sums_columns
from jaxfp8.ops._dimension_numbers import inverse_permutation
from jaxfp8.ops._ledger import encode
from jaxfp8.ops._once import once
from jaxfp8.ops._operands import Call, Seen, quantize_operand, whole
from jaxfp8.quantizers._base import Operand
from jaxfp8.recipes._recipe import Matmul
from jaxfp8.sharding._amax import vary_as, varying
from jaxfp8.sharding._shard import PlacedShard
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Primals:
    """The types that cotangents must have; static, to ride among the residuals. None for a bias that wants none."""

    lhs: Any
    rhs: Any
    bias: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def three_matmuls(
    call: Call,
    lhs: Array,
    rhs: Array,
    bias: Array | None,
    scale: Array | None,
    ledger: Array | None,
    operands: tuple[Array, ...] | None,
) -> Array:
    """The product and the bias; `operands` are those of the prologue that makes lhs, which gets the gradient."""
    del ledger
    return add_bias(_fprop(call, _source(call, lhs, operands), rhs, scale, None)[0], bias, call.geometry)


def _source(call: Call, lhs: Array, operands: tuple[Array, ...] | None) -> Source:
    return lhs if call.prologue is None or operands is None else Produced(lhs, operands, call.prologue)


def _fprop(
    call: Call, lhs: Source, rhs: Array, scale: Array | None, ledger: Array | None
) -> tuple[Array, Operand, Operand, Seen]:
    """y, the copy of x for wgrad, the copy of w for dgrad, and the amaxes of x and w."""
    x_varies, w_varies = varying(value_of(lhs)) - call.over("x"), varying(rhs) - call.over("w")
    split, apart = call.split_or_apart(x_varies & w_varies)
    x, x_saved, x_seen, _ = quantize_operand(
        call, "x", lhs, scale, ledger, apart, fprop=split, wgrad=x_varies - w_varies
    )
    w, w_saved, w_seen, _ = quantize_operand(
        call, "w", rhs, scale, ledger, apart, fprop=split, dgrad=w_varies - x_varies
    )
    x_whole, w_whole = whole(call, "x", x["fprop"]), whole(call, "w", w["fprop"])
    y = _matmul(call, "fprop", x_whole, w_whole, call.out_dtype, call.out_sharding)
    return y, x_saved["wgrad"], w_saved["dgrad"], {**x_seen, **w_seen}


def _forward_rule(
    call: Call, lhs: Any, rhs: Any, bias: Any, scale: Any, ledger: Any, operands: Any
) -> tuple[Array, Any]:
    matmul = [lhs, rhs] if scale is None else [lhs, rhs, scale]  # and not only the bias
    if call.collected and any(each.perturbed for each in matmul) and (ledger is None or not ledger.perturbed):
        raise UncollectedStateError(
            "a matmul with quantizer state is being differentiated, but its state is not collected. Use fp8.value_and_grad "
            "(nnx: fp8.nnx.value_and_grad) in place of jax's. Pass the state that it gives to the loss to the layers, without "
            "stop_gradient. If this loss does not train the network, use fp8.freeze(state) or fp8.nnx.freeze(model)."
        )
    lhs, rhs = once((lhs.value, rhs.value))
    scale, ledger = (None if leaf is None else leaf.value for leaf in (scale, ledger))
    source = _source(call, lhs, operands and tuple(leaf.value for leaf in operands))
    y, x, w, seen = _fprop(call, source, rhs, scale, ledger)
    learned = None if bias is None or not bias.perturbed else jax.typeof(bias.value)
    y = add_bias(y, None if bias is None else once(bias.value), call.geometry)
    return y, (x, w, seen, scale, ledger, _Primals(jax.typeof(lhs), jax.typeof(rhs), learned))


def _backward_rule(
    call: Call, residuals: Any, gradient: Any
) -> tuple[Array, Array, Array | None, None, Array | None, None]:
    x, w, seen, scale, ledger, primals = residuals
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        aval: Any = gradient.aval
        gradient = jnp.zeros(aval.shape, aval.dtype)
    gradient = once(gradient)
    x_varies = frozenset(primals.lhs.manual_axis_type.varying) - call.over("x")
    w_varies = frozenset(primals.rhs.manual_axis_type.varying) - call.over("w")
    g, _, g_seen, sums = quantize_operand(
        call, "g", gradient, scale, ledger, call.split_or_apart(x_varies & w_varies)[1],
        column_sums=primals.bias is not None and sums_columns(call.geometry, gradient.ndim),
        dgrad=(varying(gradient) | w_varies) - x_varies, wgrad=(varying(gradient) | x_varies) - w_varies,
    )  # fmt: skip
    dx_axes, dw_axes = call.geometry.product_axes
    x, w = whole(call, "x", x), whole(call, "w", w)
    dx = _matmul(call, "dgrad", g["dgrad"], w, primals.lhs.dtype, _product_sharding(primals.lhs, dx_axes))
    dw = _matmul(call, "wgrad", x, g["wgrad"], primals.rhs.dtype, _product_sharding(primals.rhs, dw_axes))
    dx = _cotangent(dx, dx_axes, primals.lhs, call.shard("x"))
    dw = _cotangent(dw, dw_axes, primals.rhs, call.shard("w"))
    db = None if primals.bias is None else bias_gradient(gradient, sums, primals.bias, call.geometry)
    if not call.collected or ledger is None:  # of a bias alone nobody collects
        return dx, dw, db, None, None, None
    seen = {**seen, **g_seen}
    rows = [vary_as(seen[row.tensor, r], ledger) for r, row in enumerate(call.recipe.rows)]
    return dx, dw, db, None, encode(jnp.stack(rows)), None


three_matmuls.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _matmul(call: Call, matmul: Matmul, lhs: Operand, rhs: Operand, out_dtype: DType, out_sharding: Any) -> Array:
    """One of the three products; in FP8 if both operands are."""
    dimension_numbers = call.geometry.dimension_numbers[("fprop", "dgrad", "wgrad").index(matmul)]
    # `assert_fp8_gemms` reads these names in compiled programs.
    if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        with jax.named_scope(f"jaxfp8.{matmul}"):
            return scaled_matmul(
                lhs, rhs, dimension_numbers=dimension_numbers, preferred_element_type=out_dtype,
                fast_accumulation=call.fast_accumulation and matmul == "fprop", out_sharding=out_sharding,
                chip=call.recipe.chip, implementation=call.implementations.matmuls,
            )  # fmt: skip
    with jax.named_scope(f"jaxfp8.{matmul}.high_precision"):
        lhs, rhs = (t.dequantize() if isinstance(t, QuantizedTensor) else t for t in (lhs, rhs))
        # g has y's dtype, which the caller may have chosen unlike that of x. Strict promotion would
        # raise here, where no caller can write a cast.
        with jax.numpy_dtype_promotion("standard"):
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


def _cotangent(product: Array, product_axes: Axes, aval: Any, shard: PlacedShard | None) -> Array:
    """A product with its axes in the order of its tensor, summed over the mesh axes that the tensor does not vary over.

    Of a tensor that was gathered each device keeps its part of the sum.
    """
    missing = varying(product) - frozenset(aval.manual_axis_type.varying)
    if missing:
        product = lax.psum(product, tuple(sorted(missing)))
    product = product.transpose(inverse_permutation(product_axes))
    return product if shard is None else shard.scatter(product)
