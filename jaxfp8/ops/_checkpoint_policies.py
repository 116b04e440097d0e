"""Names of what a matmul saves for its backward pass, and the remat policy that keeps it."""

from collections.abc import Callable
from typing import Any

import jax

RESIDUAL = "jaxfp8_residual"
"""`checkpoint_name` of every FP8 residual: values, scales and amaxes."""


def save_fp8_residuals() -> Callable[..., Any]:
    """A policy for `jax.checkpoint(policy=)`, `nn.remat` and `nnx.remat`.

    Keep the FP8 residuals, recompute the rest.

    The backward pass then casts nothing again: 1 byte a value is kept of each operand, and its
    amax.

    Example:
      >>> import jax, jaxfp8 as fp8
      >>> block = jax.checkpoint(lambda x: x, policy=fp8.save_fp8_residuals())
    """
    return jax.checkpoint_policies.save_only_these_names(RESIDUAL)
