"""`Layer`: what rules and the coverage table see of a layer."""

import dataclasses
import math


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
