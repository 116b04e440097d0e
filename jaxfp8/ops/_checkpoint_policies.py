"""The name of the residuals of a matmul, and the remat policy that saves them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._typing import Array

RESIDUAL = "jaxfp8_residual"
"""`checkpoint_name` of every FP8 residual: values, scales and amaxes."""

ALIAS = "quantization"
"""A second name of every FP8 residual.

It is the name in the remat policies of MaxText, so that they save the residuals unchanged. A policy
may list either name.
"""


def save_fp8_residuals() -> Callable[..., Any]:
    """A policy for `jax.checkpoint(policy=)`, `nn.remat` and `nnx.remat`.

    It saves the FP8 residuals and recomputes the rest. The backward pass then casts no operand
    again. Each operand costs 1 byte per value, and its scales and amax.

    Returns:
      The policy.

    Example:
      >>> import jax, jaxfp8 as fp8
      >>> block = jax.checkpoint(lambda x: x, policy=fp8.save_fp8_residuals())
    """
    return jax.checkpoint_policies.save_only_these_names(RESIDUAL)


def named_residual(x: Array) -> Array:
    """x under both names. The outer name saves it, or the inner one saves what the outer one reads.

    Example:
      >>> import jax.numpy as jnp
      >>> named_residual(jnp.float32(1.0))
      Array(1., dtype=float32)
    """
    return checkpoint_name(checkpoint_name(x, RESIDUAL), ALIAS)
