"""`dot_general` in FP8, with its gradient: the door."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfp8._dimension_numbers import check
from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, DotDimensionNumbers, DType, Implementation
from jaxfp8.kernels._dispatch import Implementations, check_backend_name
from jaxfp8.kernels._prologue import AbstractPrologue, produce
from jaxfp8.numerics._dtypes import check_out_dtype
from jaxfp8.numerics._granularity import PerAxis, PerRow, PerTensor
from jaxfp8.ops._arguments import check_operands, fp8_precision
from jaxfp8.ops._bias import add_bias, check_bias
from jaxfp8.ops._dimension_numbers import geometry
from jaxfp8.ops._identity import STACKING, check_layout, known
from jaxfp8.ops._ledger import BINS
from jaxfp8.ops._operands import Call
from jaxfp8.ops._state import RESTORED, MatmulState, shown
from jaxfp8.ops._three_matmuls import three_matmuls
from jaxfp8.ops._tile_view import tile_view
from jaxfp8.quantizers._current import Current
from jaxfp8.quantizers._delayed import Delayed
from jaxfp8.recipes._recipe import Recipe, Tensor
from jaxfp8.sharding._amax import check_axes, manual_axes, types_tell
from jaxfp8.sharding._shard import Shard, place

_TENSORS: tuple[Tensor, ...] = ("x", "w", "g")


def dot_general(
    lhs: Array | tuple[Array, ...],
    rhs: Array,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    out_sharding: Any = None,
    reduce_axes: tuple[str, ...] | None = None,
    lhs_shard: Shard | None = None,
    rhs_shard: Shard | None = None,
    implementation: Implementation | Implementations = None,
    prologue: AbstractPrologue | None = None,
    bias: Array | None = None,
) -> Array:
    """`jax.lax.dot_general` with FP8 operands, forward and backward, as the recipe says.

    Args:
      lhs: activations x, [..., M, K] or as `dimension_numbers` say; bfloat16, float16, float32 (or float64, computed in
        float32). With `prologue=` the tuple of its arrays.
      rhs: weights w, [K, N] or as `dimension_numbers` say.
      dimension_numbers: `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`.
      precision: of fprop: None or DEFAULT lets Hopper accumulate fast, HIGH and HIGHEST do not; dgrad and wgrad never do.
        Operands that stay in high precision get it as it is.
      preferred_element_type: dtype of the result; default: what the operands promote to.
      recipe: which quantizer for which operand.
      state: of this matmul, for recipes that have any (`fp8.init_state`).
      out_sharding: as in `jax.lax.dot_general`, for Explicit meshes.
      reduce_axes: inside `jax.shard_map`, the mesh axes that an amax is combined over: all but pipeline.
        With `check_vma=True` JAX's types give nearly all of them. Types do not decide an axis over
        which x and w both vary. Name it if it splits the contraction of this matmul. Leave it out if it
        splits stages, experts or anything else that has its own amaxes. By default a per-tensor amax is
        combined over such an axis, and a per-row amax is not. An amax that a state records follows the
        type of the state.
        With `check_vma=False` types give nothing. Recipes with per-tensor amaxes need the axes: here, or
        in `fp8.value_and_grad(reduce_axes=)` for recipes with state. Recipes with per-row amaxes raise
        an error for them, because a per-row amax stays on its device. Recipes with both need
        `check_vma=True`. Tiles ignore the axes, because no device cuts a tile.
      lhs_shard: `Shard(axis, mesh axis)` says that lhs is split so (inside `jax.shard_map`: is this device's part) and that
        the matmul needs the whole: it is quantized where it lies, with the scales of the whole, gathered in FP8, and its
        gradient is reduce-scattered (sequence parallelism). In Auto and Explicit meshes it needs `jax.set_mesh`.
      rhs_shard: the same of w (fully sharded data parallelism).
      implementation: a kernel backend by name, for casts and matmuls; `Implementations(casts=, matmuls=)` names one for each;
        None takes the first that can. A cast by "mosaic" lays each copy as its matmul reads it on Hopper.
      prologue: `fp8.SwiGLU()` of lhs (gate, up), or `fp8.RMSNorm()` of lhs (x, gain): the matmul of `prologue(*lhs)`, to the
        bit, gradients too. A cast by "mosaic" makes it tile by tile, so that it is neither written nor saved in high precision.
      bias: [batch, rhs kept], added in the result's dtype. Its gradient is summed in float32 (of `identity()` it is JAX's); a
        cast by "mosaic" sums on its way, where the gradient's last axis is all that rhs keeps: it is not read once more.

    Returns:
      [batch, lhs kept, rhs kept].

    Raises:
      TypeError, ValueError: for operands that are no float arrays, or do not fit.
      FP8StateError: if the state is missing, of another recipe, or would be lost. Also if `reduce_axes`
        is missing, or if per-row amaxes would ignore it.

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
    arrays, rhs = check_operands(lhs, rhs, recipe, prologue)
    made = None if prologue is None else produce(prologue, *arrays)
    lhs = arrays[0] if made is None else made.value
    x_shard = None if lhs_shard is None else place("lhs", lhs, lhs_shard)
    w_shard = None if rhs_shard is None else place("rhs", rhs, rhs_shard)
    if (
        prologue is not None
        and x_shard is not None
        and x_shard.axis - lhs.ndim in prologue.whole
        and x_shard.manual_axes
    ):
        raise ValueError(
            f"prologue={prologue!r} needs all of axis {x_shard.axis - lhs.ndim} of lhs, {lhs_shard=} has a part; split another."
        )
    shapes = (
        lhs.shape if x_shard is None else x_shard.whole_shape(lhs.shape),
        rhs.shape if w_shard is None else w_shard.whole_shape(rhs.shape),
    )
    try:
        dimension_numbers = check(*shapes, dimension_numbers)
    except ValueError as error:
        if lhs_shard is None and rhs_shard is None:
            raise
        raise ValueError(f"{error} (Shapes are of whole operands: {lhs_shard=}, {rhs_shard=}.)") from None
    plain = geometry(dimension_numbers, lhs.ndim, rhs.ndim)
    if bias is not None:
        bias = check_bias(bias, tuple(shapes[1][axis] for axis in (*dimension_numbers[1][1], *plain.rhs_kept)))
    state = _check_state(state, recipe)

    def high_precision() -> Array:
        x, w = (t if shard is None else shard.gather(t) for t, shard in ((lhs, x_shard), (rhs, w_shard)))
        return lax.dot_general(x, w, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)

    if recipe.is_identity:
        check_unused(recipe, state, implementation, preferred_element_type)
        return add_bias(high_precision(), bias, plain)
    out_dtype = jnp.promote_types(lhs.dtype, rhs.dtype) if preferred_element_type is None else preferred_element_type
    probe = state.probe if state else None
    view = None if recipe.tile is None else tile_view(*shapes, dimension_numbers, recipe.tile)
    x, w = (lhs, rhs) if view is None else (view.lhs(lhs), view.rhs(rhs))
    x_placed, w_placed = x_shard, w_shard
    if view is not None:
        x_placed = x_shard and dataclasses.replace(x_shard, axis=view.lhs_axis(x_shard.axis))
        w_placed = w_shard and dataclasses.replace(w_shard, axis=view.rhs_axis(w_shard.axis))
    call = Call(
        recipe=recipe,
        geometry=plain if view is None else geometry(view.dimension_numbers, x.ndim, w.ndim),
        out_dtype=check_out_dtype(out_dtype),
        precision=precision,
        fast_accumulation=fp8_precision(precision),
        out_sharding=out_sharding if view is None else view.out_sharding(out_sharding),
        collected=state is not None and not state.frozen,
        all_set=probe.all_set if probe else False,
        reduce_axes=_reduce_axes(recipe, reduce_axes, probe.reduce_axes if probe else None),
        types_tell=types_tell(),
        shards=(("x", x_placed), ("w", w_placed), ("g", None)),
        implementations=_implementations(implementation),
        prologue=prologue,
    )
    operands = None if made is None else lax.stop_gradient(made.operands)
    if view is not None and operands is not None:
        operands = tuple(view.operand(each, lhs.shape) for each in operands)
    if view is not None and bias is not None:
        bias = view.bias(bias)
    y = three_matmuls(call, x, w, bias, state.scale if state else None, probe.ledger if probe else None, operands)
    return y if view is None else view.result(y, out_sharding, high_precision)


def check_unused(recipe: Recipe, state: Any, implementation: Any, preferred_element_type: DType | None) -> None:
    """Checks arguments that a recipe without quantizers does not use, and the dtype of its result."""
    _check_state(state, recipe)
    if preferred_element_type is not None:
        try:
            jnp.dtype(preferred_element_type)
        except TypeError:
            check_out_dtype(preferred_element_type)
    if implementation is not None:
        raise ValueError(f"implementation={implementation!r} is not used by recipe {recipe.name!r}; leave it out.")


def _check_state(state: MatmulState | tuple[()] | None, recipe: Recipe) -> MatmulState | None:
    if not recipe.rows:
        if state is None or (isinstance(state, tuple) and not state):
            return None
        raise FP8StateError(f"recipe {recipe.name!r} has no state, got {type(state).__name__}; pass state=None.")
    if not isinstance(state, MatmulState):
        raise FP8StateError(
            f"recipe {recipe.name!r} needs the state of this matmul, got state={shown(state)}; make it with "
            f"fp8.init_state(recipe). {RESTORED}"
        )
    if state.rows != recipe.rows:
        raise FP8StateError(
            f"state belongs to another recipe: it has rows {state.rows}, recipe {recipe.name!r} has {recipe.rows}. "
            "Start from fp8.init_state(recipe)."
        )
    check_layout(state)
    if state.scale.ndim != 1:
        raise FP8StateError(
            f"state.scale has shape {list(state.scale.shape)}, but one matmul has [{len(recipe.rows)}]: index stacked states "
            "(scan, vmap, or state of one layer) before the call."
        )
    if state.probe is None:
        return known(state)  # `value_and_grad` already checked a state that has a probe
    if state.probe.ledger is not None and state.probe.ledger.shape != (BINS, len(recipe.rows)):
        raise FP8StateError(
            f"state.probe.ledger has shape {list(state.probe.ledger.shape)} in this call, not [{BINS}, {len(recipe.rows)}]: "
            f"the states were mapped over another axis than that of their layers. {STACKING}"
        )
    return state


def _reduce_axes(
    recipe: Recipe, given: tuple[str, ...] | None, probed: tuple[str, ...] | None
) -> frozenset[str] | None:
    """The manual mesh axes that are named for amaxes; None where it is left to types.

    Raises:
      FP8StateError: if the axes are unknown, instead of using a local amax. Also for axes that per-row
        amaxes would ignore.
    """
    if isinstance(given, str):
        raise TypeError(f"reduce_axes={given!r} must be a tuple of mesh axis names; write ({given!r},).")
    named = given if given is not None else probed
    if named is None and types_tell():
        return None
    quantizers = [(tensor, q) for tensor in _TENSORS for _, q in recipe.uses(tensor)]
    rows = list(dict.fromkeys(tensor for tensor, q in quantizers if isinstance(q.granularity, PerRow | PerAxis)))
    per_tensor = any(isinstance(q, Current | Delayed) and isinstance(q.granularity, PerTensor) for _, q in quantizers)
    if named is None:
        if not per_tensor:
            return None
        where = "fp8.value_and_grad, this call or this layer" if recipe.rows else "this call or this layer"
        cure = f"Name the axes that an amax is combined over with reduce_axes= of {where}."
        if rows:  # per-row amaxes do not accept reduce_axes=
            cure = f"Recipe {recipe.name!r} has amaxes of tensors and of rows, which needs check_vma=True."
        raise FP8StateError(
            f"inside shard_map(check_vma=False) over {manual_axes()} types do not tell which mesh axes a tensor is split over. "
            f"{cure}"
        )
    check_axes(named)
    if not manual_axes():
        return None  # arrays are whole: a layer made for shard_map, as flax initializes it
    manual = frozenset(named) & set(manual_axes())
    if manual and rows and not types_tell():
        without = "" if per_tensor else " If no mesh axis splits what a matmul contracts, leave reduce_axes= out."
        raise FP8StateError(
            f"reduce_axes={tuple(named)} is given to recipe {recipe.name!r}, which has a scale for each "
            f"row of {', '.join(rows)}, inside shard_map(check_vma=False) over {manual_axes()}. Only types "
            f"tell which matmul contracts a row across devices. Use check_vma=True.{without}"
        )
    return manual


def _implementations(chosen: Implementation | Implementations) -> Implementations:
    if isinstance(chosen, Implementations):
        return chosen
    check_backend_name("implementation", chosen)
    return Implementations(casts=chosen, matmuls=chosen)
