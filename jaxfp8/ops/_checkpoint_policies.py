"""The names of what a matmul saves for its backward pass, and the remat policies that save it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._typing import Array, Tensor

RESIDUAL = "jaxfp8_residual"
"""`checkpoint_name` of the FP8 copies of x: values and scales."""

ALIAS = "quantization"
"""A second name of the FP8 copies of x, and of amaxes.

It is the name in the remat policies of MaxText, so that they save the residuals unchanged. A policy
may list either name.
"""

WEIGHT = "jaxfp8_weight"
"""`checkpoint_name` of the FP8 copies of w. The weight itself is there in every pass."""

AMAX = "jaxfp8_amax"
"""`checkpoint_name` of amaxes of tensors and rows. A second cast then reads its tensor once."""


def save_fp8_residuals(*, inputs: bool = True, weights: bool = False) -> Callable[..., Any]:
    """A policy for `jax.checkpoint(policy=)`, `nn.remat` and `nnx.remat`.

    It saves FP8 copies of the inputs of matmuls, and recomputes the rest. It also saves amaxes of
    tensors and rows, so that a second cast neither reads a tensor twice nor asks other devices. To
    save more, join it with a policy of your own by
    `jax.checkpoint_policies.save_from_both_policies`.

    Args:
      inputs: whether to save the FP8 copy of x, the input of a matmul, from which the gradient of w
        is computed. It has 1 byte a value. Without it, x is computed and cast again. If the result
        of the matmul is computed again, it may read another copy, for instance with scales of rows
        or tiles. That copy is not saved, and x is cast again for it.
      weights: whether to save the FP8 copy of the weight w, too. The weight itself is in memory in
        any case, so the copy costs 1 byte a weight in every layer. It spares the backward pass one
        cast of w. It spares no gather, because only a shard is saved.

    Returns:
      The policy.

    Raises:
      TypeError: if an argument is no bool.

    Example:
      >>> import jax, jaxfp8 as fp8
      >>> block = jax.checkpoint(lambda x: x, policy=fp8.save_fp8_residuals())
    """
    for name, given in (("inputs", inputs), ("weights", weights)):
        if not isinstance(given, bool):
            raise TypeError(f"{name}={given!r} must be True or False.")
    names = [AMAX, *([RESIDUAL] if inputs else []), *([WEIGHT] if weights else [])]
    return jax.checkpoint_policies.save_only_these_names(*names)


def named_copy(x: Array, tensor: Tensor) -> Array:
    """An array of an FP8 copy of x or w, under its names.

    Example:
      >>> import jax.numpy as jnp
      >>> named_copy(jnp.float32(1.0), "w")
      Array(1., dtype=float32)
    """
    if tensor == "w":
        return checkpoint_name(x, WEIGHT)
    # The outer name saves it, or the inner one saves what the outer one reads.
    return checkpoint_name(checkpoint_name(x, RESIDUAL), ALIAS)


def named_amax(x: Array) -> Array:
    """An amax, or another small result of the forward pass, under both of its names.

    Example:
      >>> import jax.numpy as jnp
      >>> named_amax(jnp.float32(1.0))
      Array(1., dtype=float32)
    """
    return checkpoint_name(checkpoint_name(x, AMAX), ALIAS)
