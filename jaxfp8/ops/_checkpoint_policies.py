"""The name of the residuals of a matmul, and the remat policy that saves them."""

from collections.abc import Callable
from typing import Any

import jax

RESIDUAL = "jaxfp8_residual"
"""`checkpoint_name` of every FP8 residual: values, scales and amaxes."""


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
