"""The shapes of a grouped matmul and the sizes of its groups, checked where they can be read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, ArrayLike
from jaxfp8.ops._arguments import as_array


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
