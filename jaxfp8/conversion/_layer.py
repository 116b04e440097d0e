"""`Layer`: what rules and the coverage table see of a layer."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

LOOKUP = "an embedding, a lookup"
TIED = "an embedding, multiplied by other code"
CONVOLUTION = "a convolution, which has no FP8 kernel"
UNKNOWN = "a layer that fp8.convert does not know"
UNSEEN = "fp8.convert does not know it; inputs= shows whether it multiplies"
UNCALLED = "not called with inputs="
FP8 = "an FP8 layer already"
APPLIED = "run by an .apply of its own: call it as a submodule, or convert it alone"
"""Obstacles: why layers cannot run in FP8, or need not be converted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a model, as rules and the coverage table see it.

    Letters: M tokens, K features in, N features out, B batch axes of the kernel.

    Attributes:
      path: names of modules from the model to the layer, joined by "/".
      type: class of the layer.
      shape: (M, K, N) of its matmul, () if it has none.
      repeated: whether one call runs it for several layers of a stack, as in `nn.scan`.
      counted: whether example inputs gave M and `calls`. Otherwise both are 1.
      batch: B, the product of the axes that kernel and input share.
      calls: how often one pass calls the layer.
      obstacle: why the layer cannot run in FP8. "" if it can.

    Example:
      >>> import flax.linen as nn
      >>> Layer(path="block_0/mlp", type=nn.Dense, shape=(8, 4, 16)).flops
      1024
    """

    path: str
    type: type
    shape: tuple[int, ...] = ()
    batch: int = 1
    calls: int = 1
    repeated: bool = False
    counted: bool = True
    obstacle: str = ""

    @property
    def can_be_fp8(self) -> bool:
        """Whether the matmul of the layer can run in FP8."""
        return not self.obstacle

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def flops(self) -> int:
        """Operations of the layer in one forward pass, 2 B M K N for each call."""
        return 2 * self.batch * math.prod(self.shape) * self.calls if self.shape else 0


def own_matmul(layer: Any, attributes: Iterable[str], default: Any) -> str:
    """The obstacle of a layer to which a user gave a matmul. "" if it has none.

    Args:
      layer: a layer of flax.
      attributes: where flax keeps such a matmul.
      default: what flax multiplies with, and what it may name there itself.

    Example:
      >>> import flax.linen as nn, jax
      >>> own_matmul(nn.Dense(4), ["dot_general"], jax.lax.dot_general)
      ''
    """
    for name in attributes:
        given = getattr(layer, name, None)
        if given is not None and given is not default:
            called = getattr(given, "__name__", type(given).__name__)
            return f"has a matmul of its own, {name}={called}"
    return ""
