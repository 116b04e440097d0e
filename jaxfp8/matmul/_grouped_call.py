"""`GroupedCall`: a `Call` for rows of several experts, and the sizes of their groups.

Letters: T rows, E groups; K N the axes of a matrix.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Array, ArrayLike, DType
from jaxfp8.kernels.grouped_matmul._groups import group_ends
from jaxfp8.matmul._arrays import QuantizerArrays
from jaxfp8.matmul._call import AmaxAxes, Call, Places, amax_axes
from jaxfp8.matmul._options import Options, as_array, fp8_precision
from jaxfp8.matmul._stats import name_of_call
from jaxfp8.numerics._formats import check_out_dtype, product_dtype, sum_dtype
from jaxfp8.plan._backends import grouped_backends, tile_rows
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._place import Whole
from jaxfp8.state._gradient_channel import in_gradient_channel
from jaxfp8.state._identity import known_scales, matched
from jaxfp8.state._state import MatmulState
from jaxfp8.state._value_and_grad import as_traced

# The call of a grouped matmul: everything about it except its operands and its rows.

_GEOMETRY = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)  # of the matmul of one group


@dataclasses.dataclass(frozen=True)
class GroupedCall:
    """A grouped matmul without its operands and its rows.

    Attributes:
      call: the static part.
      quantizers: the arrays of the state, and the key.
      tile: P, how many rows a tile of rows has.
    """

    call: Call
    quantizers: QuantizerArrays
    tile: int

    @classmethod
    def of(
        cls, x: Array, w: Array, how: Options, *, recipe: Recipe,
        state: MatmulState | tuple[()] | None, tokens: int, precision: Any,
        preferred_element_type: DType | None,
    ) -> "GroupedCall":  # fmt: skip
        """The call for operands x [..., K] and w [E, K, N] of these types.

        Args:
          x: rows, or the tokens that become rows.
          w: matrices.
          how: the options of the call.
          recipe: the quantizer of each operand.
          state: the quantizer state, one for all groups or one for each.
          tokens: how many rows all groups have together, or about as many.
          precision: see `fp8.dot_general`.
          preferred_element_type: the dtype of the result; None: see `dot_general`.
        """
        recipe, state = as_traced(recipe, state)
        if how.state_channel == "gradient" and isinstance(state, MatmulState):
            state = in_gradient_channel(state, reduce_axes=how.reduce_axes)
        own = matched(state, recipe, stacked=w.shape[0])
        kernels = check_kernels(how.kernels)
        probe = own.probe if own else None
        experts, k, n = w.shape
        if preferred_element_type is None:
            preferred_element_type = product_dtype(x.dtype, w.dtype)
        backends = grouped_backends(
            kernels.chip, kernels.casts, kernels.matmuls, recipe, (tokens, k, n), experts
        )
        call = Call(
            recipe=recipe,
            geometry=_GEOMETRY,
            out_dtype=check_out_dtype(preferred_element_type),
            precision=precision,
            fast_accumulation=fp8_precision(precision),
            out_sharding=None,
            collected=own is not None and not own.frozen,
            in_gradient_channel=probe is not None and probe.channel == "gradient",
            settled=own is not None and own.settled,
            amax_axes=_amax_axes(recipe, how.reduce_axes, probe.reduce_axes if probe else None),
            places=Places(Whole(), Whole(), Whole()),
            kernels=kernels,
            backends=backends,
            prologue=None,
            save_original=how.save_original or (),
            watched=name_of_call(how.name),
        )
        quantizers = QuantizerArrays(
            known=(probe.known if probe else known_scales(own)) if own else None,
            ledger=probe.ledger if probe else None,
            key=how.key if recipe.needs_key else None,
        )
        return cls(call, quantizers, tile_rows(tokens, experts, recipe.whole_tiles, backends))


def bias_of_rows(bias: Array, sizes: Array, y: Array) -> Array:
    """For each row of y [T, N] the bias of its group, of [E, N]; 0 for rows of the tail."""
    ends = group_ends(sizes, y.shape[0])
    group = jnp.sum(ends[None] <= jnp.arange(y.shape[0])[:, None], axis=1, dtype=jnp.int32)
    # Rows are taken in float32, so that the gradient is summed in float32.
    wide = bias.astype(sum_dtype(bias.dtype))
    return wide.at[group].get(mode="fill", fill_value=0.0).astype(y.dtype)


def _amax_axes(
    recipe: Recipe, given: tuple[str, ...] | None, probed: tuple[str, ...] | None
) -> AmaxAxes:
    """The axes over which amaxes are reduced. Axes that split experts are not among them."""
    axes = amax_axes(recipe, given, probed)
    if axes.named is None:
        axes = dataclasses.replace(axes, named=frozenset())
    return axes


# The shapes of a grouped matmul and the sizes of its groups, checked where they can be read.


def check_group_sizes(x: Array, w: Array, given: ArrayLike) -> Array:
    """The sizes of the groups as i32[E], if they fit the operands.

    Values that can be read are checked exactly, in integers of any size. Those of wider dtypes are
    limited to T before they become int32, so that no large size wraps around.

    Args:
      x: rows [T, K].
      w: matrices [E, K, N].
      given: integers [E] of any dtype.

    Raises:
      TypeError, ValueError: naming the argument, its shape, dtype or values, and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((300, 2)), jnp.ones((2, 2, 1))
      >>> check_group_sizes(x, w, jnp.array([200, 100], jnp.uint8)).dtype
      dtype('int32')
    """
    _check_shapes(x, w)
    readable = _readable(given)
    if readable is not None and readable.shape == w.shape[:1]:
        # Before the conversion to an array of JAX, which cuts integers to 32 bits.
        _check_values(readable.tolist(), x.shape[0])
    sizes = as_array("group_sizes", given)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes has dtype {sizes.dtype.name}; pass integers, the number of rows of each "
            "group."
        )
    if sizes.shape != w.shape[:1]:
        raise ValueError(
            f"group_sizes has shape {list(sizes.shape)}, but rhs {list(w.shape)} has "
            f"{w.shape[0]} groups. Pass one size for each."
        )
    wide = jnp.iinfo(sizes.dtype).max > jnp.iinfo(jnp.int32).max
    return (jnp.clip(sizes, 0, x.shape[0]) if wide else sizes).astype(jnp.int32)


def _check_shapes(x: Array, w: Array) -> None:
    if x.ndim != 2 or w.ndim != 3:
        raise ValueError(
            f"lhs has shape {list(x.shape)}, rhs has shape {list(w.shape)}. fp8.ragged_dot takes "
            "lhs [T, K] and rhs [E, K, N]. Reshape them."
        )
    if x.shape[1] != w.shape[1]:
        raise ValueError(
            f"lhs has shape {list(x.shape)}, so K is {x.shape[1]}, but rhs {list(w.shape)} has K "
            f"{w.shape[1]}. fp8.ragged_dot takes lhs [T, K] and rhs [E, K, N] with one K. If a "
            "mesh axis splits K, split it in both of them."
        )
    if not all(isinstance(size, int) for size in (*x.shape, *w.shape)):
        raise ValueError(
            f"lhs {list(x.shape)} and rhs {list(w.shape)} have a symbolic size. The number of "
            "blocks of rows depends on T and E, so fp8.ragged_dot needs numbers. Export the "
            "program once for each size."
        )
    if not w.shape[0]:
        raise ValueError(f"rhs {list(w.shape)} has no groups. Pass one matrix at least.")


def _readable(given: Any) -> np.ndarray | None:
    """The sizes in NumPy; None if only the device knows them, or if they are no integers."""
    if isinstance(given, jax.core.Tracer):
        return None
    if isinstance(given, jax.Array):
        if not given.is_fully_addressable or not jnp.issubdtype(given.dtype, jnp.integer):
            return None
        return np.asarray(given)
    try:
        read = np.asarray(given)
    except (TypeError, ValueError, jax.errors.JAXTypeError):  # `as_array` says what it is
        return None
    integers = np.issubdtype(read.dtype, np.integer) or (
        read.dtype == object and all(isinstance(each, int) for each in read.flat)
    )
    return read if integers else None


def _check_values(sizes: list[int], tokens: int) -> None:
    if min(sizes) < 0 or sum(sizes) > tokens:
        raise ValueError(
            f"group_sizes={sizes} must be at least 0, and add up to at most the {tokens} rows of "
            f"lhs. They add up to {sum(sizes)}."
        )
