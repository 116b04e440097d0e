"""`einsum` of two operands, on top of `dot_general`."""

from typing import Any

import jax
import opt_einsum

from jaxfp8._typing import Array, Axes, DType, Implementation
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.ops._arguments import check_operands
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._state import MatmulState
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard


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
      equation: two operands, with or without `->`, ellipses allowed. No index twice in one operand, and none in a single
        operand that is missing from the output (sum it before).
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
      ValueError: for an equation that is not one `dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.einsum("bd,dhk->bhk", jnp.ones((2, 4)), jnp.ones((4, 3, 5)), recipe=fp8.recipes.current()).shape
      (2, 3, 5)
    """
    (lhs,), rhs = check_operands(lhs, rhs, recipe)
    if not isinstance(equation, str):
        raise TypeError(f"equation={equation!r} must be a string, for instance 'bd,dk->bk'.")
    if equation.count(",") != 1:
        raise ValueError(f"equation {equation!r} must have exactly two operands; split it into einsums of two.")
    inputs, output, _ = opt_einsum.parser.parse_einsum_input((equation, lhs.shape, rhs.shape), shapes=True)
    x, w = inputs.split(",")
    for name, letters in (("lhs", x), ("rhs", w), ("the output", output)):
        if len(set(letters)) != len(letters):
            raise ValueError(f"equation {equation!r} names an index of {name} twice; take the diagonal before.")
    for name, letters, other in (("lhs", x, w), ("rhs", w, x)):
        if alone := set(letters) - set(other) - set(output):
            raise ValueError(f"equation {equation!r} sums index {sorted(alone)} of {name} alone; sum it before.")
    batch = [c for c in output if c in x and c in w]
    contracted = [c for c in x if c in w and c not in output]
    product = "".join(batch) + "".join(c for c in x + w if c in output and c not in batch)
    order: Axes = tuple(product.index(c) for c in output)
    dimension_numbers = (
        (tuple(map(x.index, contracted)), tuple(map(w.index, contracted))),
        (tuple(map(x.index, batch)), tuple(map(w.index, batch))),
    )
    y = dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type,
        recipe=recipe, state=state, out_sharding=_before_transpose(out_sharding, order), reduce_axes=reduce_axes,
        lhs_shard=lhs_shard, rhs_shard=rhs_shard, implementation=implementation,
    )  # fmt: skip
    return y.transpose(order)


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
