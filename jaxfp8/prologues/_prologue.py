"""Prologues: operations on an activation between reading and quantizing it.

The result of a prologue is called h. XLA fuses a prologue into its own casts, but not into a
kernel: h would be written to memory and read again. So kernels in Pallas read the input arrays of
the prologue. They compute a tile of h and quantize it at once.

Letters: M, K are the last two axes of h.
"""

import abc
import dataclasses
import functools
import math
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, ArrayLike, Axes, DType
from jaxfp8.numerics._dtypes import FLOAT_DTYPES
from jaxfp8.prologues._gathered import Gathered

STATISTIC = "jaxfp8.statistic"
"""The name under which a statistic of rows is saved for the backward pass."""


class AbstractPrologue(abc.ABC):
    """`h = prologue(*arrays)`: an operation that a cast kernel can compute as it reads arrays.

    h is computed in float32 and rounded once, to the dtype of the first array. For the backward
    pass only the arrays and statistics of rows are saved. Subclasses are frozen dataclasses of
    hashable values.

    Attributes:
      names: the names of the arrays, in the order in which they are passed.
      parameters: those of the names that are parameters, as a gain is. A layer does not cast a
        parameter to its own dtype. The prologue reads it in float32.
      whole: axes of h that no device may hold a part of, because a statistic spans them.
    """

    names: ClassVar[tuple[str, ...]]
    parameters: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[Axes] = ()

    def __call__(self, *arrays: ArrayLike) -> Array:
        """h, with the shape and dtype of the first array. It is differentiable.

        Raises:
          TypeError, ValueError: see `operands`.
        """
        return _apply(self, *arrays)

    def operands(self, *arrays: ArrayLike) -> tuple[Array, ...]:
        """The operands of `elementwise`. The first has the shape of h, the others broadcast to it.

        Raises:
          TypeError: if an array is not floating point.
          ValueError: if there are too many or too few arrays, or if their shapes do not fit.
        """
        given = tuple(each if isinstance(each, jax.Array) else jnp.asarray(each) for each in arrays)
        if len(given) != len(self.names):
            raise ValueError(
                f"{self!r} takes {len(self.names)} arrays, {self.names}, but got {len(given)}; "
                "pass one array for each name."
            )
        for name, each in zip(self.names, given, strict=True):
            if each.dtype.name not in FLOAT_DTYPES:
                raise TypeError(
                    f"{name} has dtype {each.dtype.name}; cast it to one of {list(FLOAT_DTYPES)}."
                )
        return self._operands(*given)

    @abc.abstractmethod
    def _operands(self, *arrays: Array) -> tuple[Array, ...]:
        """The operands. `operands` has checked the number and dtypes of the arrays."""

    @abc.abstractmethod
    def elementwise(self, *operands: Array) -> Array:
        """h before it is rounded, from float32 operands that broadcast to one shape.

        The result must be zero if all operands are zero. Use only operations that kernel languages
        have.
        """


# The backward pass computes h again from the arrays, so h is not a residual. Statistics of rows are
# small and are saved. To sum the rows again would take another read.
@functools.partial(
    jax.checkpoint, static_argnums=0, prevent_cse=False,
    policy=jax.checkpoint_policies.save_only_these_names(STATISTIC),
)  # fmt: skip
def _apply(prologue: AbstractPrologue, *arrays: ArrayLike) -> Array:
    return _of_operands(prologue, prologue.operands(*arrays))


def _of_operands(prologue: AbstractPrologue, operands: tuple[Array, ...]) -> Array:
    h = prologue.elementwise(*(each.astype(jnp.float32) for each in operands))
    return _rounded(h, operands[0].dtype)


def _rounded(x: Array, dtype: DType) -> Array:
    """x in another dtype, rounded even if XLA fuses the conversion with its inverse.

    XLA drops a conversion to bfloat16 and back if it fuses both. `reduce_precision` keeps the
    rounding. It comes after the conversion and changes no value there. If it came before, XLA would
    write h to memory as float32.
    """
    x = x.astype(dtype)
    return lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "operands"], meta_fields=["prologue"]
)
@dataclasses.dataclass(frozen=True)
class Produced:
    """The result of a prologue, and its operands: `value == prologue(*arrays)`.

    Attributes:
      value: [..., M, K]. If nothing reads it, XLA does not compute it.
      operands: `prologue.operands(*arrays)`.
      prologue: the prologue.
    """

    value: Array
    operands: tuple[Array, ...]
    prologue: AbstractPrologue

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> DType:
        return self.value.dtype


Source: TypeAlias = Array | Produced | Gathered
"""What a quantizer reads: an array, the result of a prologue, or gathered rows."""


def produce(prologue: AbstractPrologue, *arrays: ArrayLike) -> Produced:
    """The result of a prologue for these arrays, with its operands.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> produce(fp8.prologues.SwiGLU(), jnp.ones((2, 4)), jnp.ones((2, 4))).shape
      (2, 4)
    """
    return Produced(prologue(*arrays), prologue.operands(*arrays), prologue)


def produce_again(prologue: AbstractPrologue, operands: tuple[Array, ...]) -> Produced:
    """The result of a prologue for operands that `produce` returned.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> gate, up = jnp.ones((2, 4)), jnp.ones((2, 4))
      >>> operands = produce(fp8.prologues.SwiGLU(), gate, up).operands
      >>> produce_again(fp8.prologues.SwiGLU(), operands).shape
      (2, 4)
    """
    return Produced(_of_operands(prologue, operands), operands, prologue)


def value_of(x: Source) -> Array:
    """x as an array. For the result of a prologue, and for gathered rows, it is `x.value`.

    Example:
      >>> import jax.numpy as jnp
      >>> value_of(jnp.ones(3)).shape
      (3,)
    """
    return x.value if isinstance(x, Produced | Gathered) else x


def prologue_of(x: Source) -> AbstractPrologue | None:
    """The prologue whose result x is; None if x is an array.

    Example:
      >>> import jax.numpy as jnp
      >>> prologue_of(jnp.ones(3)) is None
      True
    """
    return x.prologue if isinstance(x, Produced) else None


def wide_operands(x: Source) -> int:
    """How many arrays of the size of x a kernel reads to compute x.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> wide_operands(produce(fp8.prologues.SwiGLU(), jnp.ones((2, 3)), jnp.ones((2, 3))))
      2
    """
    if not isinstance(x, Produced):
        return 1
    return sum(math.prod(each.shape) == math.prod(x.shape) for each in x.operands)
