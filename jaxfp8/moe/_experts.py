"""`swiglu_experts`: the experts of a mixture, on one device or over a mesh axis."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfp8._check import check_bool, check_type, is_number
from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array, ArrayLike, PyTree
from jaxfp8.matmul._options import as_array, check_float, check_high_precision, read_options
from jaxfp8.numerics._per_block import is_explicit
from jaxfp8.ops._dispatch_matmul import (
    CombineOptions,
    check_capacity_factor,
    check_experts,
    dispatch_matmul,
    matmul_combine,
    route,
)
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import manual_axes, types_show_varying, varying_axes
from jaxfp8.sharding._route import dispatch
from jaxfp8.sharding._specs import mesh_axes
from jaxfp8.state._state import MatmulState

# ExpertParallel: how tokens go to experts that are split over a mesh.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """How tokens go to experts that are split over a mesh. Hashable.

    In an Auto or Explicit mesh that is set, the arrays of a layer are global. There leading axes of
    its input but the first may not be split. Inside `jax.shard_map` over the axis, a device has E /
    D experts: its kernels and states are parts along axis 0. The router is the same on all devices.

    Attributes:
      axis: the mesh axis that splits experts. None: every device has all experts.
      tokens: the mesh axes that split tokens, `axis` among them. Default: None. In an Auto mesh
        that is `axis` alone. In an Explicit mesh it is the axes in the type of x. Inside
        `jax.shard_map` with `check_vma=False` counts are summed over it.
      capacity_factor: see `fp8.moe.route`. Default: None, no choice is dropped.
      sent_in_fp8: see `fp8.moe.dispatch_matmul`. Default: True.
      gradient_sent_in_fp8: see `fp8.moe.matmul_combine`. Default: False.

    Raises:
      TypeError, ValueError: for a field of another type, and for `tokens` without `axis`.

    Example:
      >>> ExpertParallel(axis="expert", tokens=("data", "expert")).sent_in_fp8
      True
    """

    axis: str | None = None
    tokens: tuple[str, ...] | None = None
    capacity_factor: float | None = None
    sent_in_fp8: bool = True
    gradient_sent_in_fp8: bool = False

    def __post_init__(self) -> None:
        if self.axis is not None and not (isinstance(self.axis, str) and self.axis):
            raise TypeError(f"axis={self.axis!r} must be the name of a mesh axis, or None.")
        tokens = self.tokens
        if tokens is not None and not (
            isinstance(tokens, tuple) and all(isinstance(name, str) for name in tokens)
        ):
            raise TypeError(f"tokens={tokens!r} must be a tuple of names of mesh axes.")
        if tokens is not None and len(set(tokens)) != len(tokens):
            raise ValueError(f"tokens={tokens!r} has a mesh axis twice.")
        if self.axis is not None and tokens is not None and self.axis not in tokens:
            raise ValueError(
                f"tokens={tokens!r} lacks axis={self.axis!r}. Experts would get each token once "
                "from every device of the axis. Split tokens over it, too."
            )
        check_capacity_factor(self.capacity_factor)
        for name in ("sent_in_fp8", "gradient_sent_in_fp8"):
            check_bool(name, getattr(self, name))

    def axes_to_enter(self, x: Array) -> tuple[str, ...] | None:
        """The mesh axes that split tokens x [T, ...], to enter `jax.shard_map`. None: stay outside.

        Raises:
          ValueError: if the mesh has no such axis, if no mesh is set, or if the devices do not
            divide the tokens.
        """
        mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        tokens = self.tokens
        if tokens is None and is_explicit(x):
            split: Any = (*jax.typeof(x).sharding.spec, None)[0]
            tokens = mesh_axes(split)
        if tokens is None:
            tokens = () if self.axis is None else (self.axis,)
        wanted = dict.fromkeys((*tokens, *(() if self.axis is None else (self.axis,))))
        if missing := [name for name in wanted if name not in kinds]:
            raise ValueError(
                f"{missing} are no axes of the mesh here, {list(kinds)}. Set a mesh that has them "
                "with jax.set_mesh(mesh), or call this inside jax.shard_map."
            )
        is_free = self.axis is not None and kinds[self.axis] != AxisType.Manual
        if is_free and self.axis not in tokens:
            raise ValueError(
                f"x is split over {tokens}, but not over axis={self.axis!r}. Experts would get "
                "each token once from every device of the axis. Split tokens over it, too."
            )
        if AxisType.Manual in kinds.values():
            # The gradient of a shard_map inside another one does not compile (jax 0.10 to 0.12).
            if is_free:
                manual = [name for name, kind in kinds.items() if kind == AxisType.Manual]
                raise ValueError(
                    f"axis={self.axis!r} is not manual, but {manual} are. Call jax.shard_map over "
                    f"{self.axis!r}, too, or outside of it."
                )
            return None
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"the mesh has Auto and Explicit axes, {kinds}. Make all of them of one kind, or "
                "call this inside jax.shard_map over all axes."
            )
        devices = math.prod(mesh.shape[name] for name in tokens)
        if x.shape[0] % devices:
            raise ValueError(
                f"x has {x.shape[0]} tokens, but {tokens} split them over {devices} devices. Pass "
                f"a multiple of {devices} tokens, for instance by padding."
            )
        return tokens if tokens or AxisType.Explicit in kinds.values() else None


def check_parallel(parallel: object) -> None:
    """Raise TypeError unless the argument is an `ExpertParallel`, or None."""
    needed = "an fp8.moe.ExpertParallel, or None if every device has all experts"
    check_type("parallel", parallel, ExpertParallel | None, needed)


# `swiglu_experts`: the experts of a mixture, from the choices of a router to the result.


@register_node
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
    gate, linear = _clamped(gate, linear, clamp)
    return (jax.nn.silu(gate) * linear * weight[:, None]).astype(h.dtype)


def split_gate(h: Array, clamp: tuple[float, float] | None) -> tuple[Array, Array]:
    """The gate and the linear part of a shared expert, [..., F] each, for `SwiGLU`."""
    gate, linear = jnp.split(h, 2, axis=-1)
    return _clamped(gate, linear, clamp)


def _clamped(gate: Array, linear: Array, clamp: tuple[float, float] | None) -> tuple[Array, Array]:
    """The two parts of SwiGLU, limited as `swiglu_experts` says."""
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
        given = jax.sharding.reshard(given, specs)  # XLA moves what is not split so

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
    if types_show_varying():
        axes = varying_axes(dropped) - (varying_axes(w_in) - experts)
    else:
        axes = frozenset((set(parallel.tokens or ()) | experts) & set(manual_axes()))
    return lax.psum(dropped, tuple(sorted(axes))) if axes else dropped


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
    """Raise ValueError unless the argument is None or two limits."""
    if clamp is not None and not (
        isinstance(clamp, tuple) and len(clamp) == 2 and all(map(is_number, clamp))
    ):
        raise ValueError(
            f"clamp={clamp!r} must be two numbers above 0, the limits of the gate and of the "
            "linear part, for instance (10.0, 10.0)."
        )
