"""`ragged_dot`: the rows of each group times that group's own matrix, as in mixtures of experts."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, ArrayLike, DType
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.matmul._arrays import Arrays, QuantizerArrays, Rows
from jaxfp8.matmul._given import add_bias_of_rows, check_bias, prepare_groups
from jaxfp8.matmul._options import (
    as_array,
    check_high_precision,
    check_operands,
    read_options,
)
from jaxfp8.matmul._three_matmuls import three_matmuls
from jaxfp8.numerics._per_block import is_explicit
from jaxfp8.ops._dispatch_matmul import DispatchOptions
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import vary_as
from jaxfp8.sharding._specs import mesh_axes
from jaxfp8.state._state import MatmulState


class RaggedDotOptions(DispatchOptions, total=False):
    """The options of `fp8.ragged_dot`; see there."""

    out_sharding: Any


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: ArrayLike,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    **options: Unpack[RaggedDotOptions],
) -> Array:
    """`jax.lax.ragged_dot` in FP8, forward and backward: each group of rows times its own matrix.

    The rows of lhs are sorted by group. The first `group_sizes[0]` rows are multiplied by `rhs[0]`,
    the next `group_sizes[1]` rows by `rhs[1]`, and so on. In a mixture of experts rows are tokens,
    and groups are experts. Sizes are read on the device, so a program is compiled once for all of
    them. A group may be empty. Its matrix then gets a gradient of exactly 0.

    The sizes may add up to less than T. The rows that are left, the tail, belong to no group. They
    are ignored, whatever they hold, NaN too. Their results and their gradients are 0.

    Each group is quantized as if it stood alone, and no tile of values mixes two groups. So with
    `current()` each group, and each matrix, has a scale of its own. With `delayed()` the state says
    whether groups share scales.

    With `identity()` every sum is computed in float32, and rounded once. The bits of
    `jax.lax.ragged_dot` may differ, because JAX says neither in which order it adds nor how it
    rounds. Its gradients in bfloat16 do differ on a CPU.

    Of the arguments of `jax.lax.ragged_dot`, `group_offset` is missing, and those after
    `group_sizes` are keywords.

    Args:
      lhs: rows x [T, K], in bfloat16, float16 or float32; float64 is computed in float32, except by
        the recipe `identity()`.
      rhs: a matrix for each group, w [E, K, N].
      group_sizes: [E] integers, the number of rows of each group. Wrong sizes raise an error if
        they can be read while the function is traced: a size below 0, or a sum above T. If only the
        device knows them, a size below 0 counts as 0, and the last groups get the rows that are
        left.
      recipe: the quantizer of each operand, for instance `fp8.recipes.blockwise()`.
      state: the quantizer state, for recipes with state. One state for all groups, from
        `fp8.init_state(recipe)`, records the largest amax of all groups. Or one for each group,
        stacked along axis 0: [E, ...]. The state of a group without rows does not change.
      precision: see `fp8.dot_general`.
      preferred_element_type: dtype of the result; default: see `fp8.dot_general`.
      **options: any of the options below, by name. The default of each is None.

    Options:
      bias: [E, N], a bias for each group. Its gradient is summed in float32.
      kernels, state_channel, save_original, key, name: see `fp8.dot_general`. Stochastic rounding
        draws other bits for another T or E.
      reduce_axes: inside `jax.shard_map`, names of the mesh axes that an amax is reduced over. A
        mesh axis over which w varies, and x or the sizes, splits experts by default. Each device
        then has its own amaxes. Name it if it splits K instead (tensor parallelism).
      out_sharding: the sharding of the result, in Explicit meshes. By default rows are split as
        those of lhs, and columns as those of rhs.

    Returns:
      [T, N].

    Raises:
      TypeError: for an operand that is no float array, sizes that are no integers, or an unknown
        option.
      ValueError: for shapes that do not fit, and for wrong sizes that can be read.
      FP8StateError: see `fp8.dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, w = jnp.ones((4, 2)), jnp.stack([jnp.full((2, 1), 1.0), jnp.full((2, 1), 3.0)])
      >>> fp8.ragged_dot(x, w, jnp.array([1, 2]), recipe=fp8.recipes.blockwise())
      Array([[2.],
             [6.],
             [6.],
             [0.]], dtype=float32)

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3; DeepGEMM, m-grouped and k-grouped matmuls.
    """
    how = read_options(
        "fp8.ragged_dot", RaggedDotOptions, options, precision, preferred_element_type
    )
    check_high_precision("fp8.ragged_dot", rhs=rhs)
    (x,), w = check_operands(lhs, rhs, recipe)
    sizes = _check_group_sizes(x, w, group_sizes)
    is_empty = not x.shape[0]
    if is_empty:  # one row that belongs to no group, so that state leaves as ever
        x = vary_as(jnp.zeros((1, x.shape[1]), x.dtype), x)
    call, quantizers, tile = prepare_groups(how, recipe, state, x, w, tokens=x.shape[0])
    bias = check_bias(how.bias, (w.shape[0], w.shape[2]))

    def multiply(
        x: Array, w: Array, sizes: Array, quantizers: QuantizerArrays, bias: Array | None
    ) -> Array:
        rows = Rows(Groups.of(sizes, tokens=x.shape[0], tile=tile))
        y = three_matmuls(call, Arrays(x, w, quantizers=quantizers, rows=rows))
        return add_bias_of_rows(y, bias, sizes)

    if any(map(is_explicit, (x, w, sizes))):
        # Rows of a group lie on any devices, and no type can say on which.
        sharding = how.out_sharding or _sharding(x, w, sizes)
        explicit = jax.sharding.get_abstract_mesh().explicit_axes
        multiply = jax.sharding.auto_axes(multiply, axes=explicit or None, out_sharding=sharding)
    elif how.out_sharding is not None:
        raise ValueError(
            f"out_sharding={how.out_sharding} needs operands in an Explicit mesh. Leave it out."
        )
    y = multiply(x, w, sizes, quantizers, bias)
    return y[:0] if is_empty else y


def _sharding(x: Array, w: Array, sizes: Array) -> jax.NamedSharding:
    """The sharding of the result: rows as those of x, columns as those of w."""
    of_x, of_w, of_sizes = (jax.typeof(each).sharding for each in (x, w, sizes))
    mesh = next(each.mesh for each in (of_x, of_w, of_sizes) if not each.mesh.empty)
    rows, columns = (*of_x.spec, None)[0], (*of_w.spec, None, None, None)[2]
    if {*mesh_axes(rows)} & {*mesh_axes(columns)}:
        raise ValueError(
            f"rows of lhs are split over {rows!r}, and columns of rhs over {columns!r}. The result "
            "cannot be split so. Say how it is split, for instance out_sharding=jax.P(...)."
        )
    return jax.NamedSharding(mesh, jax.P(rows, columns))


# The shapes of a grouped matmul and the sizes of its groups, checked where they can be read.


def _check_group_sizes(x: Array, w: Array, given: ArrayLike) -> Array:
    """The sizes of the groups as i32[E], if they fit rows x [T, K] and matrices w [E, K, N]."""
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
    # A size is limited to T before it becomes int32, so that no large one wraps around.
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
