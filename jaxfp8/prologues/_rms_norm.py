"""RMSNorm, which comes before the first matmul of a transformer block.

Letters: M, K are the last two axes of x.
"""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._typing import Array, Axes
from jaxfp8.prologues._prologue import STATISTIC, AbstractPrologue


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm(AbstractPrologue):
    """`h = x * (rstd * gain)`, `rstd = 1 / sqrt(mean(x^2, axis=-1) + epsilon)`.

    It takes x [..., M, K] and gain [K], and returns h [..., M, K].

    The order of the multiplications is that of `flax.linen.RMSNorm`. XLA computes rstd, [..., M,
    1], and fuses it into the operation that wrote x. Inside `jax.shard_map` each device must have
    all of the last axis.

    Attributes:
      epsilon: positive, finite and at least 2^-126, the smallest normal float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> norm = fp8.prologues.RMSNorm(epsilon=1e-6)
      >>> norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0])).round()
      Array([[ 1., -2.]], dtype=float32)

    References:
      Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, section 3.
    """

    names: ClassVar[tuple[str, ...]] = ("x", "gain")
    parameters: ClassVar[tuple[str, ...]] = ("gain",)
    whole: ClassVar[Axes] = (-1,)
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        given: object = self.epsilon
        real = isinstance(given, int | float | np.floating) and not isinstance(given, bool)
        if not real or not np.finfo(np.float32).tiny <= self.epsilon < math.inf:
            raise ValueError(
                f"epsilon={given!r} must be a positive number, finite and normal in float32, for "
                "instance 1e-6."
            )
        object.__setattr__(self, "epsilon", float(self.epsilon))

    def _operands(self, *arrays: Array) -> tuple[Array, ...]:
        x, gain = arrays
        if not x.ndim or gain.shape != x.shape[-1:]:
            raise ValueError(
                f"gain has shape {list(gain.shape)}, x {list(x.shape)}. The gain must have one "
                "axis, as long as the last axis of x."
            )
        mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        rstd = checkpoint_name(lax.rsqrt(mean_square + self.epsilon), STATISTIC)
        return x, rstd, gain.astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), x.shape[-1])

    def elementwise(self, *operands: Array) -> Array:
        x, rstd, gain = operands
        return x * (rstd * gain)
