"""`swiglu_experts`: the experts of a mixture, from the choices of a router to the result."""

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfp8._typing import Array, ArrayLike, PyTree
from jaxfp8.moe._expert_parallel import ExpertParallel, check_parallel
from jaxfp8.ops._arguments import as_array, check_float, check_high_precision, check_key
from jaxfp8.ops._dispatch_matmul import CombineOptions, dispatch_matmul, matmul_combine
from jaxfp8.ops._options import read_options
from jaxfp8.ops._route_tokens import check_experts, is_positive, route
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import manual_axes, types_tell, varying
from jaxfp8.sharding._route import dispatch
from jaxfp8.state._state import MatmulState


class ExpertsOutput(NamedTuple):
    """The result of experts.

    Attributes:
      y: [T, N], the sum of the results of each token's experts.
      dropped: i32[], how many choices were dropped, on all devices that split tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> ExpertsOutput(jnp.zeros((1, 2)), jnp.int32(0)).y.shape
      (1, 2)
    """

    y: Array
    dropped: Array


class _Given(NamedTuple):
    x: Array
    gates: Array
    chosen: Array
    w_in: Array
    w_out: Array
    states: PyTree
    key: Array | None


def swiglu_experts(
    x: ArrayLike,
    gates: ArrayLike,
    chosen: ArrayLike,
    w_in: ArrayLike,
    w_out: ArrayLike,
    *,
    recipe: Recipe,
    states: tuple[MatmulState | tuple[()] | None, MatmulState | tuple[()] | None] = (None, None),
    parallel: ExpertParallel | None = None,
    clamp: tuple[float, float] | None = None,
    **options: Unpack[CombineOptions],
) -> ExpertsOutput:
    """`sum_j gate_j * (silu(a) * b) @ w_out[e_j]`, with `[a, b] = x @ w_in[e_j]`, in FP8.

    The sum is over the experts e_j that a token chose. x is cast once and sent to the experts in
    FP8. The gated result of SwiGLU is cast once for the second matmul. The results come back in
    the dtype of x. So there are two casts of activations in the forward pass.

    Inside `jax.shard_map` over `parallel.axis` all arrays are those of this device. In an Auto or
    Explicit mesh that is set, arrays are global, and this function enters `jax.shard_map`: x is
    split over `parallel.tokens`, and w_in and w_out over `parallel.axis`.

    Letters: T tokens, K and N features, F hidden features of an expert, E experts, k choices.

    Args:
      x: tokens [T, K].
      gates: f32[T, k], the weight of each choice (`fp8.moe.top_k`).
      chosen: i32[T, k], the experts of each token.
      w_in: [E, K, 2 F], the matrices of the gate, and behind them those of the linear part.
      w_out: [E, F, N].
      recipe: the quantizer of each operand of both matmuls.
      states: the quantizer states of the two matmuls, for recipes with state. Each is one state for
        all experts, or one for each expert, [E, ...].
      parallel: how tokens go to experts over a mesh; None if every device has all experts.
      clamp: (c, d) limits a to at most c, and b to -d to d, before they are multiplied; None does
        not.
      **options: reduce_axes, kernels, state_channel, save_original, key, name: see
        `fp8.ragged_dot`. They are those of both matmuls. Their names are `name` with "/w_in" and
        "/w_out" behind it. `save_original=("x",)` saves the input of the second matmul alone, and
        that of the first with `sent_in_fp8=False`.

    Raises:
      TypeError, ValueError, FP8StateError: see `fp8.moe.route` and `fp8.moe.dispatch_matmul`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> x, router = jnp.ones((6, 16)), jax.random.normal(keys[0], (16, 4))
      >>> w_in, w_out = (jax.random.normal(key, shape) for key, shape in
      ...                zip(keys[1:], [(4, 16, 16), (4, 8, 16)]))
      >>> gates, chosen = fp8.moe.top_k(x @ router, 2)
      >>> recipe = fp8.recipes.blockwise()
      >>> fp8.moe.swiglu_experts(x, gates, chosen, w_in, w_out, recipe=recipe).y.shape
      (6, 16)

    References:
      Shazeer, arXiv:2002.05202 (SwiGLU); DeepSeek-V3, arXiv:2412.19437, sections 2.1.2 and 3.3;
      gpt-oss, arXiv:2508.10925 (the clamp; its activation and its biases differ).
    """
    how = read_options("fp8.moe.swiglu_experts", CombineOptions, options)
    shared: Any = {name: value for name, value in options.items() if name not in ("key", "name")}
    check_high_precision("fp8.moe.swiglu_experts", w_in=w_in, w_out=w_out)
    x, w_in, w_out = (
        check_float(name, given) for name, given in (("x", x), ("w_in", w_in), ("w_out", w_out))
    )
    gates, chosen = check_float("gates", gates), as_array("chosen", chosen)
    _check(x, gates, chosen, w_in, w_out, clamp)
    check_parallel(parallel)
    parallel = parallel or ExpertParallel()
    if how.key is not None:
        check_key(how.key)
    if not isinstance(states, tuple | list) or len(states) != 2 or isinstance(states, MatmulState):
        raise TypeError(
            f"states={type(states).__name__} must be a pair: the state of the matmul with w_in, "
            "and that of the matmul with w_out. For a recipe without state leave it out."
        )
    given = _Given(x, gates, chosen, w_in, w_out, tuple(states), how.key)
    names: tuple[str | None, ...] = (None, None)
    if how.name is not None:
        names = tuple(f"{how.name}/{each}".removeprefix("/") for each in ("w_in", "w_out"))
    local = functools.partial(_local, recipe, parallel, clamp, shared, names)
    tokens = parallel.axes_to_enter(x)
    if tokens is None:
        y, dropped = local(given)
        return ExpertsOutput(y, _summed(dropped, w_in, parallel))
    return _entered(local, given, parallel, tokens)


def _local(
    recipe: Recipe, parallel: ExpertParallel, clamp: tuple[float, float] | None, shared: Any,
    names: tuple[str | None, ...], given: _Given,
) -> tuple[Array, Array]:  # fmt: skip
    """The result of the tokens of this device."""
    experts = given.w_in.shape[0]
    devices = 1 if parallel.axis is None else lax.axis_size(parallel.axis)
    way = route(
        given.chosen, experts=experts * devices, axis=parallel.axis,
        capacity_factor=parallel.capacity_factor,
    )  # fmt: skip
    keys: tuple[Array | None, ...] = (None, None)
    if given.key is not None:
        keys = tuple(jax.random.split(given.key))
    first = dict(shared)
    if parallel.sent_in_fp8 and first.get("save_original"):
        first["save_original"] = tuple(name for name in first["save_original"] if name != "x")
    h = dispatch_matmul(
        given.x, given.w_in, way, recipe=recipe, state=given.states[0], key=keys[0],
        sent_in_fp8=parallel.sent_in_fp8, preferred_element_type=given.x.dtype, name=names[0],
        **first,
    )  # fmt: skip
    weight = dispatch(way.of_choices, given.gates.reshape(-1).astype(jnp.float32))
    h = _gated(h, weight, clamp)
    y = matmul_combine(
        h, given.w_out, way, recipe=recipe, state=given.states[1], key=keys[1],
        gradient_sent_in_fp8=parallel.gradient_sent_in_fp8, preferred_element_type=given.x.dtype,
        name=names[1], **shared,
    )  # fmt: skip
    return y, way.dropped


# The backward pass reads h. Without the checkpoint it would keep both parts in float32.
@functools.partial(jax.checkpoint, static_argnums=2)
def _gated(h: Array, weight: Array, clamp: tuple[float, float] | None) -> Array:
    """SwiGLU of rows h [S, 2 F], times the weight of each row [S]: [S, F] in the dtype of h."""
    gate, linear = (part.astype(jnp.float32) for part in jnp.split(h, 2, axis=1))
    gate, linear = clamped(gate, linear, clamp)
    return (jax.nn.silu(gate) * linear * weight[:, None]).astype(h.dtype)


def clamped(gate: Array, linear: Array, clamp: tuple[float, float] | None) -> tuple[Array, Array]:
    """The two parts of SwiGLU, limited as `swiglu_experts` says.

    Example:
      >>> clamped(jnp.float32(9.0), jnp.float32(-9.0), (2.0, 3.0))
      (Array(2., dtype=float32), Array(-3., dtype=float32))
    """
    if clamp is None:
        return gate, linear
    return jnp.minimum(gate, clamp[0]), jnp.clip(linear, -clamp[1], clamp[1])


def _entered(
    local: Any, given: _Given, parallel: ExpertParallel, tokens: tuple[str, ...]
) -> ExpertsOutput:
    """The result of global arrays, inside `jax.shard_map` over all axes of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, matrices = jax.P(tokens or None), jax.P(parallel.axis)
    if parallel.axis is not None:
        check_experts(given.w_in.shape[0], mesh.shape[parallel.axis], parallel.axis)

    def of_state(state: Any) -> Any:
        stacked = isinstance(state, MatmulState) and state.scale.ndim == 2
        return matrices if stacked else jax.P()

    of_states = tuple(map(of_state, given.states))
    specs: Any = (rows, rows, rows, matrices, matrices, of_states, jax.P())
    specs = _Given(*specs)
    if AxisType.Explicit in mesh.axis_types:
        given = _resharded(given, specs)

    def entered(given: _Given) -> tuple[Array, Array]:
        y, dropped = local(given)
        return y, _summed(dropped, given.w_in, parallel)

    # Outside of jax.jit, shard_map cannot run the gradient rules of the matmuls.
    y, dropped = jax.jit(
        jax.shard_map(
            entered, in_specs=(specs,), out_specs=(rows, jax.P()), axis_names=set(mesh.axis_names)
        )
    )(given)
    return ExpertsOutput(y, dropped)


def _summed(dropped: Array, w_in: Array, parallel: ExpertParallel) -> Array:
    """The sum over all devices that have tokens of their own for the same experts.

    Stages of a pipeline have experts of their own. They keep their own numbers.
    """
    experts = set() if parallel.axis is None else {parallel.axis}
    if types_tell():
        axes = varying(dropped) - (varying(w_in) - experts)
    else:
        axes = frozenset((set(parallel.tokens or ()) | experts) & set(manual_axes()))
    return lax.psum(dropped, tuple(sorted(axes))) if axes else dropped


def _resharded(given: _Given, specs: Any) -> _Given:
    """Arrays of an Explicit mesh as the specs say. XLA moves what is not split so."""
    return jax.tree.map(
        lambda spec, tree: jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, spec), tree),
        specs, given, is_leaf=lambda node: isinstance(node, jax.P),
    )  # fmt: skip


def _check(
    x: Array, gates: Array, chosen: Array, w_in: Array, w_out: Array,
    clamp: tuple[float, float] | None,
) -> None:  # fmt: skip
    shapes = [jnp.shape(each) for each in (x, gates, chosen, w_in, w_out)]
    fit = [len(shape) for shape in shapes] == [2, 2, 2, 3, 3]
    if fit:
        (t, k), of_gates, of_chosen, (e, k_in, wide), (e_out, f, _) = shapes
        fit = of_gates == of_chosen and of_gates[0] == t
        fit &= (k_in, e_out, wide) == (k, e, 2 * f)
    if not fit:
        names = ("x", "gates", "chosen", "w_in", "w_out")
        given = ", ".join(f"{n} {list(s)}" for n, s in zip(names, shapes, strict=True))
        raise ValueError(
            f"shapes do not fit: {given}. fp8.moe.swiglu_experts takes x [T, K], gates and chosen "
            "[T, k], w_in [E, K, 2 F] and w_out [E, F, N]."
        )
    check_clamp(clamp)


def check_clamp(clamp: object) -> None:
    """Raise ValueError unless the argument is None or two limits.

    Example:
      >>> check_clamp((10.0, 10.0))
    """
    if clamp is not None and not (
        isinstance(clamp, tuple) and len(clamp) == 2 and all(map(is_positive, clamp))
    ):
        raise ValueError(
            f"clamp={clamp!r} must be two numbers above 0, the limits of the gate and of the "
            "linear part, for instance (10.0, 10.0)."
        )
