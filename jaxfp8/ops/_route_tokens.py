"""`route`: the way of tokens to the experts that a router chose for them, and back."""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, ArrayLike
from jaxfp8.numerics._per_block import is_explicit
from jaxfp8.ops._arguments import as_array
from jaxfp8.sharding._amax import manual_axes, types_tell, varying
from jaxfp8.sharding._route import Route


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
    check_capacity_factor(capacity_factor)
    return Route.of(chosen, experts=experts, axis=axis, capacity_factor=capacity_factor)


def is_positive(number: object) -> bool:
    """Whether this is a finite number above 0.

    Example:
      >>> is_positive(1.25), is_positive(True), is_positive(float("inf"))
      (True, False, False)
    """
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        return False
    return 0 < float(number) < math.inf


def check_capacity_factor(factor: object) -> None:
    """Raise ValueError unless this is a number above 0, or None.

    Example:
      >>> check_capacity_factor(1.25)
    """
    if factor is not None and not is_positive(factor):
        raise ValueError(
            f"capacity_factor={factor!r} must be a number above 0, for instance 1.25; None has as "
            "many slots as may be needed."
        )


def check_experts(experts: int, devices: int, axis: str) -> None:
    """Raise ValueError unless the devices of a mesh axis divide the number of experts.

    Example:
      >>> check_experts(8, 4, "expert")
    """
    if experts % devices:
        raise ValueError(
            f"experts={experts} cannot be split over the {devices} devices of axis={axis!r}. Use a "
            f"multiple of {devices}."
        )


def choices(given: ArrayLike) -> Array:
    """The choices as integers [T, k].

    Raises:
      TypeError, ValueError: if they are something else.

    Example:
      >>> choices([[0, 2], [2, 1]]).shape
      (2, 2)
    """
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


def in_int32(chosen: Array, experts: int) -> Array:
    """Choices in int32. A wide number that is no expert stays one: it does not wrap around.

    Example:
      >>> in_int32(jnp.array([[3_000_000_000]], jnp.uint32), 4)
      Array([[4]], dtype=int32)
    """
    if jnp.iinfo(chosen.dtype).max > jnp.iinfo(jnp.int32).max:
        chosen = jnp.clip(chosen, max(-1, int(jnp.iinfo(chosen.dtype).min)), experts)
    return chosen.astype(jnp.int32)


def _checked(given: ArrayLike, experts: int) -> Array:
    """The choices as i32[T, k]."""
    if type(experts) is not int or experts < 1:
        raise ValueError(f"experts={experts!r} must be the number of experts, 1 or more.")
    chosen = choices(given)
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
    return in_int32(chosen, experts)


def _check_axis(axis: str, experts: int, chosen: Array) -> None:
    if axis not in manual_axes():
        raise ValueError(
            f"axis={axis!r} is no manual mesh axis here. The manual axes are "
            f"{list(manual_axes())}. Call this inside jax.shard_map, over one of its axes, or "
            "leave axis= out if this device has all experts."
        )
    check_experts(experts, jax.lax.axis_size(axis), axis)
    if types_tell() and axis not in varying(chosen):
        raise ValueError(
            f"chosen is the same on all devices of axis={axis!r}, by its type {jax.typeof(chosen)}."
            " Each expert would get each token once from every device. Split tokens over the axis, "
            f"for instance in_specs=jax.P({axis!r})."
        )
