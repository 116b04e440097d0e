"""SwiGLU, which comes before the second matmul of a gated MLP."""

import dataclasses
from typing import ClassVar

import jax

from jaxfp8._typing import Array
from jaxfp8.prologues._prologue import AbstractPrologue


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU(AbstractPrologue):
    """`h = silu(gate) * up`, `silu(v) = v / (1 + exp(-v))`.

    It takes gate [..., M, K] and up [..., M, K], and returns h [..., M, K].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.prologues.SwiGLU()(jnp.array([0.0, 20.0]), jnp.array([3.0, 0.5]))
      Array([ 0., 10.], dtype=float32)

    References:
      Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, section 2.
    """

    names: ClassVar[tuple[str, ...]] = ("gate", "up")

    def _operands(self, *arrays: Array) -> tuple[Array, ...]:
        gate, up = arrays
        if (gate.shape, gate.dtype) != (up.shape, up.dtype):
            raise ValueError(
                f"gate {gate.dtype.name}{list(gate.shape)} and up {up.dtype.name}{list(up.shape)} "
                "differ; give both one shape and dtype."
            )
        return gate, up

    def elementwise(self, *operands: Array) -> Array:
        gate, up = operands
        return gate * jax.nn.sigmoid(gate) * up
