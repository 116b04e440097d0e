"""The input of a layer: one array, or the arrays of a prologue."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from jaxfp8._typing import Array, ArrayLike
from jaxfp8.ops._arguments import as_array, check_float, check_tuple, one_array
from jaxfp8.ops._promotion import KeepsFP8
from jaxfp8.prologues._prologue import AbstractPrologue


@dataclasses.dataclass(frozen=True)
class LayerInput:
    """The left operand of a layer's matmul.

    Attributes:
      arrays: one array, or the arrays of the prologue.
      prologue: computes the left operand from the arrays; None if the array is the operand.
    """

    arrays: tuple[Array, ...]
    prologue: AbstractPrologue | None

    @classmethod
    def read(cls, inputs: Any, prologue: AbstractPrologue | None) -> Self:
        """Check the argument `inputs` of a layer.

        Activations may have any dtype here, because layers promote them. Parameters of a prologue
        are not promoted, so they must be floating point.

        Raises:
          TypeError: the message names the argument, what was given and the cure.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxfp8 as fp8
          >>> pair = jnp.ones((2, 4)), jnp.ones((2, 4))
          >>> LayerInput.read(pair, fp8.prologues.SwiGLU()).value.shape
          (2, 4)
        """
        if prologue is None:
            return cls((one_array("inputs", inputs),), None)

        def one(name: str, given: ArrayLike) -> Array:
            check = check_float if name in prologue.parameters else as_array
            return check(f"inputs, {name}", given)

        given = check_tuple("inputs", inputs, prologue)
        return cls(tuple(map(one, prologue.names, given)), prologue)

    def promoted(
        self, promote: Callable[..., Sequence[Any]], kernel: Array, bias: Array | None
    ) -> tuple[Self, Array, Array | None]:
        """The input, the kernel and the bias in one dtype.

        Parameters of a prologue keep their dtype.

        Args:
          promote: flax's `promote_dtype`, called with activations, kernel and bias.
          kernel: of the layer.
          bias: of the layer, or None.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxfp8 as fp8
          >>> from flax.linen.dtypes import promote_dtype
          >>> pair = jnp.ones((2, 4), jnp.bfloat16), jnp.ones(4)
          >>> given = LayerInput.read(pair, fp8.prologues.RMSNorm())
          >>> given, kernel, _ = given.promoted(promote_dtype, jnp.ones((4, 3), jnp.bfloat16), None)
          >>> [each.dtype.name for each in (*given.arrays, kernel)]
          ['bfloat16', 'float32', 'bfloat16']
        """
        names = (None,) if self.prologue is None else self.prologue.names
        kept = () if self.prologue is None else self.prologue.parameters
        pairs = list(zip(names, self.arrays, strict=True))
        promote = KeepsFP8.of(promote)
        *activations, w, b = promote(*(x for name, x in pairs if name not in kept), kernel, bias)
        rest = iter(activations)
        arrays = tuple(x if name in kept else next(rest) for name, x in pairs)
        return dataclasses.replace(self, arrays=arrays), w, b

    @property
    def like(self) -> Array:
        """An array with the shape and dtype of the left operand."""
        return self.arrays[0]

    @property
    def lhs(self) -> Array | tuple[Array, ...]:
        """The left operand, for a function that takes `prologue=`."""
        return self.arrays[0] if self.prologue is None else self.arrays

    @property
    def value(self) -> Array:
        """The left operand itself, computed here if there is a prologue."""
        return self.arrays[0] if self.prologue is None else self.prologue(*self.arrays)
