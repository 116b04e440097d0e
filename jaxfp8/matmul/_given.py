"""What a matmul was given, checked, and the `Call` made of it. What flax gives to a plug."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Array, ArrayLike, Axes, DType
from jaxfp8.kernels.grouped_matmul._groups import group_ends
from jaxfp8.matmul._arrays import Arrays, QuantizerArrays
from jaxfp8.matmul._call import WHOLE, Call, Places, amax_axes
from jaxfp8.matmul._options import LayerInput, Options, check_float, fp8_precision
from jaxfp8.matmul._stats import watched_call
from jaxfp8.numerics._formats import FLOAT_DTYPES, check_out_dtype, product_dtype, sum_dtype
from jaxfp8.plan._backends import Backends, grouped_backends, tile_rows
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._place import Place
from jaxfp8.sharding._specs import mesh_axes
from jaxfp8.state._gradient_channel import in_gradient_channel
from jaxfp8.state._identity import known_scales, match_state
from jaxfp8.state._state import MatmulState
from jaxfp8.state._value_and_grad import recipe_in_context

# The operands of a matmul, checked: the arrays, their places in the mesh, and their axes.


@dataclasses.dataclass(frozen=True)
class Given:
    """The operands of one call."""

    arrays: Arrays
    places: Places
    shapes: tuple[Axes, Axes]  # of x and w before a mesh splits them
    geometry: TrainingGeometry

    @property
    def size(self) -> tuple[int, int, int]:
        """The size (M, K, N) of [M, K] @ [K, N] on one device. Batch axes count as rows.

        In an Auto mesh it is the size on all devices: types do not say how an array is split.
        """
        lhs, rhs = self.geometry.fprop.sides
        x, w = (
            tuple(size // parts for size, parts in zip(shape, _shard_counts(array), strict=True))
            for shape, array in zip(self.shapes, self.arrays[:2], strict=True)
        )
        batch, m, _ = lhs.matrix_shape(x)
        # If only one operand is split along K, it is resharded before the matmul.
        k = max(lhs.matrix_shape(x)[2], rhs.matrix_shape(w)[2])
        return batch * m, k, rhs.matrix_shape(w)[1]

    def high_precision(self, how: Options) -> Array:
        """`jax.lax.dot_general` of the whole operands, in high precision."""
        y = lax.dot_general(
            self.places.x.gather(self.arrays.x), self.places.w.gather(self.arrays.w),
            self.geometry.fprop.dimension_numbers, how.precision, how.preferred_element_type,
            out_sharding=how.out_sharding,
        )  # fmt: skip
        return self.places.g.scatter(y)


def _shard_counts(x: jax.Array) -> tuple[int, ...]:
    """The number of shards along each axis of an array in an Explicit mesh; 1 elsewhere."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty:
        return (1,) * x.ndim
    spec = (*sharding.spec, *[None] * x.ndim)[: x.ndim]
    return tuple(
        math.prod(sharding.mesh.shape[name] for name in mesh_axes(entry)) for entry in spec
    )


def check_whole_axis(x: Array, x_place: Place, how: Options) -> None:
    """Raise ValueError if a prologue needs a whole axis of x that is split over devices."""
    if how.prologue is None or how.x_shard is None or not x_place.manual_axes:
        return
    axis = how.x_shard.axis % x.ndim - x.ndim
    if axis in how.prologue.whole:
        raise ValueError(
            f"prologue={how.prologue!r} needs all of axis {axis} of lhs, but "
            f"x_shard={how.x_shard!r} splits it; split another axis."
        )


# The call of a matmul, and the arrays of its quantizers.
#
# Letters: T rows, E groups; K N the axes of a matrix.

_OF_ONE_GROUP = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)


def prepare(
    how: Options, recipe: Recipe, state: MatmulState | tuple[()] | None,
    dtypes: tuple[DType, DType], geometry: TrainingGeometry, backends: Backends, *,
    places: Places = WHOLE, out_sharding: Any = None, groups: int | None = None,
) -> tuple[Call, QuantizerArrays]:  # fmt: skip
    """The call of operands with these dtypes. `groups` says how many a grouped matmul has."""
    if how.state_channel == "gradient" and isinstance(state, MatmulState):
        state = in_gradient_channel(state, reduce_axes=how.reduce_axes)
    own = match_state(state, recipe, stacked=groups)
    probe = None if own is None else own.probe
    out_dtype = how.preferred_element_type
    call = Call(
        recipe=recipe,
        geometry=geometry,
        out_dtype=check_out_dtype(product_dtype(*dtypes) if out_dtype is None else out_dtype),
        precision=how.precision,
        fast_accumulation=fp8_precision(how.precision),
        out_sharding=out_sharding,
        collected=own is not None and not own.frozen,
        in_gradient_channel=probe is not None and probe.channel == "gradient",
        settled=own is not None and own.settled,
        amax_axes=amax_axes(recipe, how.reduce_axes, probe.reduce_axes if probe else None),
        places=places,
        kernels=check_kernels(how.kernels),
        backends=backends,
        prologue=how.prologue,
        save_original=how.save_original or (),
        watched=watched_call(how.name),
    )
    quantizers = QuantizerArrays(
        known=(probe.known if probe else known_scales(own)) if own else None,
        ledger=probe.ledger if probe else None,
        key=how.key if recipe.needs_key else None,
    )
    return call, quantizers


def prepare_groups(
    how: Options, recipe: Recipe, state: MatmulState | tuple[()] | None, x: Array, w: Array, *,
    tokens: int,
) -> tuple[Call, QuantizerArrays, int]:  # fmt: skip
    """The same for x [..., K] and w [E, K, N], and P, how many rows a tile of rows has.

    x are rows, or the tokens that become rows. `tokens` says how many rows all groups have
    together, or about as many.
    """
    recipe, state = recipe_in_context(recipe, state)
    kernels, (experts, k, n) = check_kernels(how.kernels), w.shape
    backends = grouped_backends(
        kernels.chip, kernels.casts, kernels.matmuls, recipe, (tokens, k, n), experts
    )
    call, quantizers = prepare(
        how, recipe, state, (x.dtype, w.dtype), _OF_ONE_GROUP, backends, groups=experts
    )
    if call.amax_axes.named is None:
        # Without names, an axis over which x and w both vary splits experts: see `Call.apart`.
        axes = dataclasses.replace(call.amax_axes, named=frozenset())
        call = dataclasses.replace(call, amax_axes=axes)
    return call, quantizers, tile_rows(tokens, experts, recipe.whole_tiles, backends)


# The bias of a matmul.
#
# The result is [B, M, N]. B are the batch axes, M the axes that lhs keeps, and N the axes that rhs
# keeps. `product` is the result before the bias is added. The custom gradient of the matmul
# includes the bias (`_three_matmuls.py`).


def check_bias(bias: ArrayLike | None, shape: Axes) -> Array | None:
    """The bias as an array of `shape`, [B, N]; None if there is none."""
    if bias is None:
        return None
    bias = check_float("bias", bias)
    if bias.shape != shape:
        raise ValueError(
            f"bias has shape {list(bias.shape)}. It must have {list(shape)}, the axes of the "
            "result that come from rhs. Reshape it."
        )
    return bias


def add_bias(product: Array, bias: Array | None, geometry: TrainingGeometry) -> Array:
    """`product` [B, M, N] plus `bias` [B, N], in the dtype of `product`."""
    if bias is None:
        return product
    bias, summed = bias.astype(product.dtype), geometry.fprop.added_axes[1]
    sharding = jax.typeof(product).sharding
    if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
        # Without this, the sum would take the sharding of the bias. The gradient of the result,
        # which is cast later, would have it, too.
        spec = jax.P(*(entry for axis, entry in enumerate(sharding.spec) if axis not in summed))
        bias = jax.sharding.reshard(bias, jax.NamedSharding(sharding.mesh, spec))
    return product + jnp.expand_dims(bias, summed)


def add_bias_of_rows(y: Array, bias: Array | None, sizes: Array) -> Array:
    """y [T, N] plus for each row the bias of its group, of [E, N]; 0 for rows of the tail."""
    if bias is None:
        return y
    ends = group_ends(sizes, y.shape[0])
    group = jnp.sum(ends[None] <= jnp.arange(y.shape[0])[:, None], axis=1, dtype=jnp.int32)
    # Rows are taken in float32, so that the gradient is summed in float32.
    wide = bias.astype(sum_dtype(bias.dtype))
    return y + wide.at[group].get(mode="fill", fill_value=0.0).astype(y.dtype)


def multiply_with_bias(
    matmul: Callable[..., Array], given: LayerInput, w: Array, bias: Array | None,
    preferred_element_type: DType | None = None,
) -> Array:  # fmt: skip
    """What a dense layer computes: x [..., K] @ w [K, N] + bias [N]."""
    dimension_numbers = (((given.like.ndim - 1,), (0,)), ((), ()))
    multiply = functools.partial(matmul, given.lhs, w, dimension_numbers, prologue=given.prologue)
    if bias is None or (
        bias.shape == w.shape[-1:]
        and bias.dtype == (preferred_element_type or product_dtype(given.like.dtype, w.dtype))
        and bias.dtype.name in FLOAT_DTYPES
    ):
        return multiply(bias=bias)
    # flax broadcasts the bias, and promotes the sum. A matmul does neither.
    y = multiply()
    return y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


# Checks of plugs: the objects of jaxfp8 that flax calls in place of a matmul.
#
# flax may be given a class where an instance is needed, or the reverse. It may also be given a plug
# for `dot_general` where a plug for `einsum` is needed, or the reverse.

# What an einsum or a dot_general was given, what it needs, and the plug that takes what was given.
_OF_EINSUM = "an array", "an equation", "dot_general=FP8DotGeneral(recipe)"
_OF_DOT_GENERAL = "an equation", "an array", "einsum_op=FP8EinsumOp(recipe)"
P = ParamSpec("P")
R = TypeVar("R")


def refuse_class(plug: type, arguments: tuple[Any, ...], cure: str) -> None:
    """Raise TypeError if a plug is constructed with the operands of a matmul."""
    # flax calls the plug as a function. If flax was given a class, the call constructs it, and the
    # operands become its fields.
    called_as_matmul = len(arguments) > 2 and (
        isinstance(arguments[0], str) or isinstance(arguments[2], tuple)
    )
    if called_as_matmul and hasattr(arguments[1], "shape"):
        raise TypeError(
            f"{plug.__name__} was called with the operands of a matmul. So flax was given the "
            f"class {plug.__name__} where an instance is needed; write {cure}."
        )


def needs_operands(
    cure: str, *, equation: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for `__call__` of a plug: TypeError if flax calls it as another kind of plug.

    `equation` says whether its first argument is the equation of an einsum.
    """

    def decorated(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            name = type(arguments[0]).__name__
            if len(arguments) == 1 and not options:
                raise TypeError(
                    f"an instance of {name} was called without operands. So flax was given an "
                    f"instance, but this argument needs a class; write {cure}."
                )
            if len(arguments) > 1 and isinstance(arguments[1], str) != equation:
                given, needed, other = _OF_EINSUM if equation else _OF_DOT_GENERAL
                raise TypeError(
                    f"the first argument of {name} is {given}, but {needed} is needed; write "
                    f"{other} if flax calls it."
                )
            return call(*arguments, **options)

        return checked

    return decorated
