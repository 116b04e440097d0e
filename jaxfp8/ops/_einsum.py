"""`einsum` of two operands, on top of `dot_general`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, Axes, DType, Implementation
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.ops._arguments import check_operands
from jaxfp8.ops._dot_general import check_unused, dot_general
from jaxfp8.ops._equation import parse
from jaxfp8.ops._state import MatmulState
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard, place


def einsum(
    equation: str,
    lhs: Array,
    rhs: Array,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    out_sharding: Any = None,
    reduce_axes: tuple[str, ...] | None = None,
    lhs_shard: Shard | None = None,
    rhs_shard: Shard | None = None,
    implementation: Implementation | Implementations = None,
) -> Array:
    """`jnp.einsum(equation, lhs, rhs)` in FP8. lhs is the activation and rhs the weight, whatever the equation's order.

    Args:
      equation: two operands, with or without `->`, as `jnp.einsum` takes them. If an index occurs in one operand
        only and not in the output, it is summed in float32 before the cast. An index twice in one operand takes its diagonal,
        of axes of one size.
      lhs: activations.
      rhs: weights.
      recipe: which quantizer for which operand.
      state: of this matmul, for recipes that have any.
      precision: see `dot_general`.
      preferred_element_type: see `dot_general`.
      out_sharding: of the result, see `dot_general`.
      reduce_axes: see `dot_general`.
      lhs_shard: see `dot_general`.
      rhs_shard: see `dot_general`.
      implementation: see `dot_general`.

    Returns:
      The axes that the equation names.

    Raises:
      TypeError, ValueError: for an equation that does not fit the operands. The message names its indices.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.einsum("bd,dhk->bhk", jnp.ones((2, 4)), jnp.ones((4, 3, 5)), recipe=fp8.recipes.current()).shape
      (2, 3, 5)
    """
    (lhs,), rhs = check_operands(lhs, rhs, recipe)
    x_shard = None if lhs_shard is None else place("lhs", lhs, lhs_shard)
    w_shard = None if rhs_shard is None else place("rhs", rhs, rhs_shard)
    if recipe.is_identity:
        check_unused(recipe, state, implementation, preferred_element_type)
        x, w = (t if shard is None else shard.gather(t) for t, shard in ((lhs, x_shard), (rhs, w_shard)))
        return jnp.einsum(
            equation,
            x,
            w,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    parsed = parse(
        equation,
        lhs.shape if x_shard is None else x_shard.whole_shape(lhs.shape),
        rhs.shape if w_shard is None else w_shard.whole_shape(rhs.shape),
    )
    dimension_numbers, order = parsed.matmul()
    lhs_shard = _shard_of_kept("lhs", lhs_shard, lhs.ndim, parsed.lhs, parsed.lhs_kept, equation)
    rhs_shard = _shard_of_kept("rhs", rhs_shard, rhs.ndim, parsed.rhs, parsed.rhs_kept, equation)
    y = dot_general(
        _alone(lhs, parsed.lhs, parsed.lhs_kept), _alone(rhs, parsed.rhs, parsed.rhs_kept), dimension_numbers, precision,
        preferred_element_type,
        recipe=recipe, state=state, out_sharding=_before_transpose(out_sharding, order), reduce_axes=reduce_axes,
        lhs_shard=lhs_shard, rhs_shard=rhs_shard, implementation=implementation,
    )  # fmt: skip
    return y.transpose(order)


def _alone(x: Array, names: str, kept: str) -> Array:
    """What an operand does before the matmul: diagonals, and sums over axes that it has alone.

    A sum is computed in float32, then rounded once to the dtype of x. An axis of size 1 is summed, too.
    """
    if names == kept:
        return x
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    return jnp.einsum(f"{names}->{kept}", wide).astype(x.dtype)


def _shard_of_kept(name: str, shard: Shard | None, ndim: int, names: str, kept: str, equation: str) -> Shard | None:
    """The shard of an operand after `_alone`."""
    if shard is None or names == kept:
        return shard
    letter = names[shard.axis % ndim]
    if letter not in kept or names.count(letter) > 1:
        raise ValueError(
            f"{name}_shard={shard!r}: equation {equation!r} reduces axis {shard.axis} of {name} before the matmul, so it "
            f"cannot be split. Reduce it yourself (in shard_map also over mesh axis {shard.axis_name!r}), and pass the result."
        )
    return dataclasses.replace(shard, axis=kept.index(letter))


def _before_transpose(sharding: Any, order: Axes) -> Any:
    """The sharding of an array whose transpose by `order` has this sharding."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    if len(spec) > len(order):
        raise ValueError(
            f"out_sharding={sharding} names {len(spec)} axes, the result has {len(order)}; drop the surplus."
        )
    padded = tuple(spec) + (None,) * (len(order) - len(spec))
    permuted = jax.P(*(padded[order.index(axis)] for axis in range(len(order))))
    return (
        jax.sharding.NamedSharding(sharding.mesh, permuted)
        if isinstance(sharding, jax.sharding.NamedSharding)
        else permuted
    )
