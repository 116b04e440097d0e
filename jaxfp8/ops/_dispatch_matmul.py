"""`dispatch_matmul` and `matmul_combine`: the two matmuls of experts, with the way of tokens."""

from typing import Any, Unpack

from jaxfp8._typing import Array, ArrayLike, DType, FP8StateError
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.numerics._per_block import is_explicit
from jaxfp8.ops._arguments import check_high_precision, check_key, check_operands
from jaxfp8.ops._arrays import Arrays
from jaxfp8.ops._bias import check_bias
from jaxfp8.ops._grouped_call import GroupedCall, bias_of_rows
from jaxfp8.ops._options import Options, UnshardedOptions, read_options
from jaxfp8.ops._routed_operands import check_sent_in_fp8
from jaxfp8.ops._rows import Rows
from jaxfp8.ops._three_matmuls import three_matmuls
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._route import Route, combine, dispatch
from jaxfp8.state._state import MatmulState


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
    how = read_options("fp8.moe.dispatch_matmul", DispatchOptions, options)
    x, w = _operands("fp8.moe.dispatch_matmul", x, w, route, "tokens", recipe, how)
    if sent_in_fp8:
        cure = "Pass sent_in_fp8=False."
        check_sent_in_fp8(recipe, "x", cure)
        if "x" in (how.save_original or ()):
            raise ValueError(
                f"save_original={how.save_original!r} keeps x in high precision, but it arrives in "
                f"FP8. {cure}"
            )
    grouped = _grouped(x, w, route, recipe, state, how, precision, preferred_element_type)
    groups = Groups.of(route.sizes, tokens=route.rows, tile=grouped.tile)
    rows = Rows(groups, route, "x") if sent_in_fp8 else Rows(groups)
    if not sent_in_fp8:
        x = dispatch(route, x)
    bias = None if how.bias is None else check_bias(how.bias, (w.shape[0], w.shape[2]))
    y = three_matmuls(grouped.call, Arrays(x, w, None, None, grouped.quantizers, rows=rows))
    return y if bias is None else y + bias_of_rows(bias, route.sizes, y)


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
    how = read_options("fp8.moe.matmul_combine", CombineOptions, options)
    x, w = _operands("fp8.moe.matmul_combine", x, w, route, "rows", recipe, how)
    if gradient_sent_in_fp8:
        check_sent_in_fp8(recipe, "g", "Pass gradient_sent_in_fp8=False.")
    grouped = _grouped(x, w, route, recipe, state, how, precision, preferred_element_type)
    groups = Groups.of(route.sizes, tokens=route.rows, tile=grouped.tile)
    rows = Rows(groups, route, "g") if gradient_sent_in_fp8 else Rows(groups)
    y = three_matmuls(grouped.call, Arrays(x, w, None, None, grouped.quantizers, rows=rows))
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
    if not isinstance(route, Route):
        raise TypeError(f"route={route!r} is no Route. Make it with fp8.moe.route(chosen, ...).")
    rows: int = getattr(route, count)
    check_high_precision(function, w=w)
    if how.key is not None:
        check_key(how.key)
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


def _grouped(
    x: Array, w: Array, route: Route, recipe: Recipe, state: MatmulState | tuple[()] | None,
    how: Options, precision: Any, preferred_element_type: DType | None,
) -> GroupedCall:  # fmt: skip
    # On average the experts of a device get as many rows as its tokens have choices.
    tokens = min(route.rows, route.tokens * route.choices)
    grouped = GroupedCall.of(
        x, w, how, recipe=recipe, state=state, tokens=tokens, precision=precision,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip
    _check_untyped_axes(grouped, route, recipe)
    return grouped


def _check_untyped_axes(grouped: GroupedCall, route: Route, recipe: Recipe) -> None:
    """Raise FP8StateError if types are off, and the named axes would mix experts."""
    axes, known = grouped.call.amax_axes, grouped.quantizers.known
    if route.axis is None or not axes.manual or axes.typed or not recipe.combines_amaxes:
        return
    named = axes.named or frozenset()
    if known is not None and known.ndim == 2:
        raise FP8StateError(
            f"one state for all experts needs types inside shard_map over {route.axis!r}. Use "
            "check_vma=True, or a state for each expert."
        )
    if route.axis in named:
        raise FP8StateError(
            f"reduce_axes={tuple(sorted(named))} names {route.axis!r}, which would mix the amaxes "
            "of different experts. With check_vma=False name the other axes that split tokens."
        )
