"""`route`, `dispatch_matmul` and `matmul_combine`: experts whose tokens come from other devices."""

from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._check import check_int, check_number, check_type
from jaxfp8._typing import Array, ArrayLike, DType, FP8StateError, Tensor
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.matmul._arrays import Arrays, QuantizerArrays, Rows
from jaxfp8.matmul._call import Call
from jaxfp8.matmul._given import add_bias_of_rows, check_bias, prepare_groups
from jaxfp8.matmul._grouped_operands import FIRST_READER
from jaxfp8.matmul._options import (
    Options,
    UnshardedOptions,
    as_array,
    check_high_precision,
    check_operands,
    read_options,
)
from jaxfp8.matmul._three_matmuls import three_matmuls
from jaxfp8.numerics._per_block import is_explicit
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import manual_axes, types_show_varying, varying_axes
from jaxfp8.sharding._route import Route, combine, dispatch
from jaxfp8.state._state import MatmulState

# `dispatch_matmul` and `matmul_combine`: the two matmuls of experts, with the way of tokens.


class CombineOptions(UnshardedOptions, total=False):
    """The options of `fp8.moe.matmul_combine`; see there."""

    key: Array | None
    name: str | None


class DispatchOptions(CombineOptions, total=False):
    """The options of `fp8.moe.dispatch_matmul`; see there."""

    bias: Array | None


def dispatch_matmul(
    x: ArrayLike,
    w: ArrayLike,
    route: Route,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    sent_in_fp8: bool = True,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    **options: Unpack[DispatchOptions],
) -> Array:
    """Sends tokens to their experts in FP8, and multiplies them there: the first layer of experts.

    Each token is cast once, on its own device, and sent with its scales. Nothing is cast between
    the all-to-all and the matmul. So the result has the bits of a dispatch in high precision and
    `fp8.ragged_dot`, and half of the bytes are sent. The gradient of x is sent back in its own
    dtype, and summed over the choices of a token in float32.

    Cast, dispatch and matmul have one gradient. An FP8 array that is differentiated has a gradient
    in FP8, which flushes small values to 0.

    The weight gradient needs x in tiles along rows. It gets them from the FP8 values that arrived.
    With scales that are powers of two, this second cast changes exponents only. It rounds values
    that are subnormal, below 2^-6 of a scale. `docs/moe.md` has a bound, and figures.

    Per-tensor recipes (`delayed`, `current`) have a scale for each expert. Its amax is that of the
    tokens of the expert on all devices, which takes an all-reduce of E numbers. A token is then
    cast once for each expert.

    Letters: T tokens of this device, E experts, D devices of `route.axis`, S rows.

    Args:
      x: tokens [T, K].
      w: the matrices of the experts of this device, [E / D, K, N].
      route: the way of the tokens, from `fp8.moe.route`.
      recipe: the quantizer of each operand, for instance `fp8.recipes.blockwise()`.
      state: see `fp8.ragged_dot`. One state for all experts of all devices, or one for each expert
        of this device, [E / D, ...].
      sent_in_fp8: False sends x in high precision. Then it is cast after it arrived, in both
        directions.
      precision: see `fp8.dot_general`.
      preferred_element_type: dtype of the result; default: see `fp8.dot_general`.
      **options: bias [E / D, N], reduce_axes, kernels, state_channel, save_original, key, name: see
        `fp8.ragged_dot`. `save_original=("x",)` needs `sent_in_fp8=False`.

    Returns:
      [S, N]: rows of the experts of this device, sorted by expert, 0 behind them.

    Raises:
      TypeError, ValueError: for operands that do not fit, and for a recipe whose copy of x cannot
        serve wgrad after a dispatch in FP8.
      FP8StateError: see `fp8.dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> way = fp8.moe.route(jnp.array([[0], [1], [0]]), experts=2)
      >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.full((2, 1), 1.0), jnp.full((2, 1), 3.0)])
      >>> fp8.moe.dispatch_matmul(x, w, way, recipe=fp8.recipes.blockwise())
      Array([[2.],
             [2.],
             [6.]], dtype=float32)

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3; FP8-Flow-MoE, arXiv:2511.02302.
    """
    how = read_options(
        "fp8.moe.dispatch_matmul", DispatchOptions, options, precision, preferred_element_type
    )
    x, w = _operands("fp8.moe.dispatch_matmul", x, w, route, "tokens", recipe, how)
    if sent_in_fp8:
        cure = "Pass sent_in_fp8=False."
        _check_sent_in_fp8(recipe, "x", cure)
        if "x" in (how.save_original or ()):
            raise ValueError(
                f"save_original={how.save_original!r} keeps x in high precision, but it arrives in "
                f"FP8. {cure}"
            )
    else:
        x = dispatch(route, x)
    bias = check_bias(how.bias, (w.shape[0], w.shape[2]))
    y = _multiply(how, recipe, state, x, w, route, "x" if sent_in_fp8 else None)
    return add_bias_of_rows(y, bias, route.sizes)


def matmul_combine(
    x: ArrayLike,
    w: ArrayLike,
    route: Route,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    gradient_sent_in_fp8: bool = False,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    **options: Unpack[CombineOptions],
) -> Array:
    """Multiplies the rows of experts, and sends them back to their tokens: the last layer.

    The result of a token is the sum over its choices, in float32 and in their order. Multiply the
    rows by the gates of the router before, with `route.of_choices`: see the example. Rows are sent
    back in the dtype of the result, for instance bfloat16.

    The gradient of the result is sent to the experts in its own dtype, and cast there. With
    `gradient_sent_in_fp8` it is cast once on its own device and sent in FP8. Then dgrad has the
    same bits, unless rounding is stochastic. wgrad reads the same values in other tiles, as that of
    `fp8.moe.dispatch_matmul`.

    Args:
      x: rows [S, K], sorted by expert.
      w: the matrices of the experts of this device, [E / D, K, N].
      route: the way of the tokens.
      recipe: the quantizer of each operand.
      state: see `fp8.moe.dispatch_matmul`.
      gradient_sent_in_fp8: see above.
      precision: see `fp8.dot_general`.
      preferred_element_type: dtype of the result; default: see `fp8.dot_general`.
      **options: reduce_axes, kernels, state_channel, save_original, key, name: see
        `fp8.ragged_dot`.

    Returns:
      [T, N].

    Raises:
      TypeError, ValueError, FP8StateError: see `fp8.moe.dispatch_matmul`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe, ones = fp8.recipes.blockwise(), jnp.ones((2, 4, 4))
      >>> chosen, gates = jnp.array([[0, 1], [1, 0]]), jnp.array([[0.5, 0.5], [0.75, 0.25]])
      >>> way = fp8.moe.route(chosen, experts=2)
      >>> h = fp8.moe.dispatch_matmul(jnp.ones((2, 4)), ones, way, recipe=recipe)
      >>> h *= fp8.moe.dispatch(way.of_choices, gates.reshape(-1))[:, None]
      >>> fp8.moe.matmul_combine(h, ones, way, recipe=recipe)[:, 0]
      Array([16., 16.], dtype=float32)

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3 (combine in BF16).
    """
    how = read_options(
        "fp8.moe.matmul_combine", CombineOptions, options, precision, preferred_element_type
    )
    x, w = _operands("fp8.moe.matmul_combine", x, w, route, "rows", recipe, how)
    if gradient_sent_in_fp8:
        _check_sent_in_fp8(recipe, "g", "Pass gradient_sent_in_fp8=False.")
    y = _multiply(how, recipe, state, x, w, route, "g" if gradient_sent_in_fp8 else None)
    return y if gradient_sent_in_fp8 else combine(route, y)


def _operands(
    function: str,
    x: ArrayLike,
    w: ArrayLike,
    route: Route,
    count: str,
    recipe: Recipe,
    how: Options,
) -> tuple[Array, Array]:
    """The operands, checked. x has as many rows as the route has tokens or rows."""
    check_type("route", route, Route, "what fp8.moe.route(chosen, ...) returned")
    rows: int = getattr(route, count)
    check_high_precision(function, w=w)
    (x,), w = check_operands(x, w, recipe)
    experts = route.sizes.shape[0]
    if x.ndim != 2 or w.ndim != 3 or x.shape != (rows, w.shape[1]) or w.shape[0] != experts:
        raise ValueError(
            f"x has shape {list(x.shape)}, w has shape {list(w.shape)}. {function} takes x "
            f"[{rows}, K] and w [{experts}, K, N] for this route: of {route.tokens} tokens, and of "
            f"{experts} experts on this device."
        )
    if any(map(is_explicit, (x, w))):
        raise ValueError(
            f"x or w is split over an Explicit mesh. Call {function} inside jax.shard_map. "
            "fp8.moe.swiglu_experts does this for you."
        )
    return x, w


def _multiply(
    how: Options, recipe: Recipe, state: MatmulState | tuple[()] | None, x: Array, w: Array,
    route: Route, routed: Literal["x", "g"] | None,
) -> Array:  # fmt: skip
    """The rows of each expert times its matrix. `routed` is the tensor that is sent in FP8."""
    # On average the experts of a device get as many rows as its tokens have choices.
    tokens = min(route.rows, route.tokens * route.choices)
    call, quantizers, tile = prepare_groups(how, recipe, state, x, w, tokens=tokens)
    _check_untyped_axes(call, quantizers, route)
    groups = Groups.of(route.sizes, tokens=route.rows, tile=tile)
    rows = Rows(groups) if routed is None else Rows(groups, route, routed)
    return three_matmuls(call, Arrays(x, w, quantizers=quantizers, rows=rows))


def _check_sent_in_fp8(recipe: Recipe, tensor: Tensor, cure: str) -> None:
    """Raise ValueError unless wgrad can read the copy of x or g that is sent in FP8."""
    (_, first), (_, second) = sorted(recipe.uses(tensor), key=lambda use: use[0] == "wgrad")
    if first.value_format is None:
        return  # it is sent in high precision, as the recipe says
    if second != first:
        raise ValueError(
            f"recipe {recipe.name!r} quantizes {tensor} in one way for {FIRST_READER[tensor]} and "
            f"in another for wgrad. After a dispatch in FP8 only one copy is there. {cure}"
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


def _check_untyped_axes(call: Call, quantizers: QuantizerArrays, route: Route) -> None:
    """Raise FP8StateError if types are off, and the named axes would mix experts."""
    axes, named = call.amax_axes, call.amax_axes.named or frozenset()
    if route.axis is None or not axes.manual or axes.typed or not call.recipe.combines_amaxes:
        return
    if quantizers.known is not None and quantizers.known.ndim == 1:
        raise FP8StateError(
            f"one state for all experts needs types inside shard_map over {route.axis!r}. Use "
            "check_vma=True, or a state for each expert."
        )
    if route.axis in named:
        raise FP8StateError(
            f"reduce_axes={tuple(sorted(named))} names {route.axis!r}, which would mix the amaxes "
            "of different experts. With check_vma=False name the other axes that split tokens."
        )


# `route`: the way of tokens to the experts that a router chose for them, and back.


def route(
    chosen: ArrayLike,
    *,
    experts: int,
    axis: str | None = None,
    capacity_factor: float | None = None,
) -> Route:
    """The way of tokens to their experts, and back, on one device or over a mesh axis.

    Inside `jax.shard_map` with `axis=` the experts are split over that mesh axis, in order, and so
    are the tokens. Each device sends C slots to each device, one for each choice of an expert
    there, in one all-to-all. A slot without a choice is sent, too, and holds zeros.

    Without `capacity_factor` no choice is ever dropped. C is then `T * min(k, E / D)`. These are D
    or E / k times more slots than choices, whichever is smaller. With it C is
    `capacity_factor * T * k / D`. A factor of 1 has just enough slots if all
    devices get equally many choices. If a device is chosen more often, choices are dropped: last
    choices of a token first, and later tokens before earlier ones. A choice that was dropped adds 0
    to its token.

    Letters: T tokens of this device, k choices of each, E experts, D devices along the axis, S
    slots of a device, D * C.

    Args:
      chosen: integers [T, k], the experts of each token. They should differ in a row. If an expert
        occurs twice in a row, slots may be missing, and choices are dropped. A number that is no
        expert, -1 for instance, is not sent, and is not counted as dropped.
      experts: E, over all devices of the axis.
      axis: the name of the manual mesh axis that splits experts; None if this device has all.
      capacity_factor: see above; None for as many slots as may be needed.

    Returns:
      A `Route`. `sizes` i32[E / D] are the rows of each expert of this device. `dropped` i32[] says
      how many choices of this device were dropped.

    Raises:
      TypeError: for choices that are no integers.
      ValueError: for choices that are not [T, k], and for an expert that does not exist, if it can
        be read. Also for an axis that is not manual here, or over which tokens are not split, for
        experts that its devices do not divide, and for a factor that is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> way = route(jnp.array([[0, 2], [2, 1]]), experts=3)
      >>> way.to_experts(jnp.array([[5.0], [7.0]]))[:, 0]  # of experts 0, 1, 2 and 2
      Array([5., 7., 5., 7.], dtype=float32)

    References:
      Lepikhin et al., GShard, arXiv:2006.16668 (capacity); DeepSeek-V3, arXiv:2412.19437, 3.2.
    """
    chosen = _checked(chosen, experts)
    if axis is not None:
        _check_axis(axis, experts, chosen)
    factor = check_capacity_factor(capacity_factor)
    return Route.of(chosen, experts=experts, axis=axis, capacity_factor=factor)


def check_capacity_factor(factor: object) -> float | None:
    """The factor as a float, or None. ValueError unless it is a number above 0."""
    if factor is None:
        return None
    needed = "a number above 0, for instance 1.25. None has as many slots as may be needed"
    return check_number("capacity_factor", factor, needed)


def check_experts(experts: int, devices: int, axis: str) -> None:
    """Raise ValueError unless the devices of a mesh axis divide the number of experts."""
    if experts % devices:
        raise ValueError(
            f"experts={experts} cannot be split over the {devices} devices of axis={axis!r}. Use a "
            f"multiple of {devices}."
        )


def check_choices(given: ArrayLike) -> Array:
    """The choices as integers [T, k]."""
    chosen = as_array("chosen", given)
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise TypeError(
            f"chosen has dtype {chosen.dtype.name}; pass integers, the experts of each token, for "
            "instance from jax.lax.top_k(...)[1]."
        )
    if chosen.ndim != 2 or not all(chosen.shape):
        raise ValueError(
            f"chosen has shape {list(chosen.shape)}. Pass the experts of each token, [T, k], with "
            "a token and a choice at least."
        )
    return chosen


def to_int32(chosen: Array, experts: int) -> Array:
    """Choices in int32. A wide number that is no expert stays one: it does not wrap around."""
    if jnp.iinfo(chosen.dtype).max > jnp.iinfo(jnp.int32).max:
        chosen = jnp.clip(chosen, max(-1, int(jnp.iinfo(chosen.dtype).min)), experts)
    return chosen.astype(jnp.int32)


def _checked(given: ArrayLike, experts: int) -> Array:
    """The choices as i32[T, k]."""
    check_int("experts", experts, "the number of experts, an integer")
    chosen = check_choices(given)
    if not all(isinstance(size, int) for size in chosen.shape):
        raise ValueError(
            f"chosen has a symbolic size: {list(chosen.shape)}. The number of slots depends on it. "
            "Export the program once for each size."
        )
    if is_explicit(chosen):
        raise ValueError(
            f"chosen is split over an Explicit mesh, {jax.typeof(chosen)}. Call fp8.moe.route "
            "inside jax.shard_map. fp8.moe.swiglu_experts does this for you."
        )
    if not isinstance(chosen, jax.core.Tracer) and chosen.is_fully_addressable:
        largest = int(np.max(np.asarray(chosen)))
        if largest >= experts:
            raise ValueError(
                f"chosen has expert {largest}, but experts={experts} have the numbers 0 to "
                f"{experts - 1}. Use -1 for a choice without an expert."
            )
    return to_int32(chosen, experts)


def _check_axis(axis: str, experts: int, chosen: Array) -> None:
    if axis not in manual_axes():
        raise ValueError(
            f"axis={axis!r} is no manual mesh axis here. The manual axes are "
            f"{list(manual_axes())}. Call this inside jax.shard_map, over one of its axes, or "
            "leave axis= out if this device has all experts."
        )
    check_experts(experts, jax.lax.axis_size(axis), axis)
    if types_show_varying() and axis not in varying_axes(chosen):
        raise ValueError(
            f"chosen is the same on all devices of axis={axis!r}, by its type {jax.typeof(chosen)}."
            " Each expert would get each token once from every device. Split tokens over the axis, "
            f"for instance in_specs=jax.P({axis!r})."
        )
