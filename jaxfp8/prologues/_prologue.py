"""Prologues: what is done to an activation between reading and quantizing it.

XLA fuses such a function into its own casts. It cannot fuse it into a kernel: the result h would be
written to memory and read again. So kernels in Pallas read the arrays that h is made of. They
compute a tile of h and quantize it at once.

Letters: h the result of a prologue; M, K its last two axes.
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

STATISTIC = "jaxfp8.statistic"
"""The name under which a statistic of rows is saved for the backward pass."""


class AbstractPrologue(abc.ABC):
    """`h = prologue(*arrays)`: an operation that a cast kernel can compute as it reads arrays.

    It is computed in float32 and rounded once, to the dtype of the first array. Differentiating it
    saves the arrays (and statistics of rows), nothing else of their size.
    Subclasses are frozen dataclasses of hashable values.

    Attributes:
      names: of the arrays.
      parameters: the names among them that are parameters. Layers do not cast these to their dtype:
        they are read in float32, whatever dtype they have.
      whole: axes of h that a device needs whole, because a statistic spans them.
    """

    names: ClassVar[tuple[str, ...]]
    parameters: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[Axes] = ()

    def __call__(self, *arrays: ArrayLike) -> Array:
        """h, of the shape and dtype of the first array; any differentiable part of JAX can use it.

        Raises:
          TypeError, ValueError: see `operands`.
        """
        return _apply(self, *arrays)

    def operands(self, *arrays: ArrayLike) -> tuple[Array, ...]:
        """What `elementwise` takes. The first has the shape of h; the others broadcast to it.

        Raises:
          TypeError, ValueError: naming the array, what it is and the cure.
        """
        given = tuple(each if isinstance(each, jax.Array) else jnp.asarray(each) for each in arrays)
        if len(given) != len(self.names):
            raise ValueError(
                f"{self!r} makes one array of {len(self.names)}, {self.names}; got {len(given)}."
            )
        for name, each in zip(self.names, given, strict=True):
            if each.dtype.name not in FLOAT_DTYPES:
                raise TypeError(
                    f"{name} has dtype {each.dtype.name}; cast it to one of {list(FLOAT_DTYPES)}."
                )
        return self._operands(*given)

    @abc.abstractmethod
    def _operands(self, *arrays: Array) -> tuple[Array, ...]:
        """`operands`, of the right number of floating-point arrays."""

    @abc.abstractmethod
    def elementwise(self, *operands: Array) -> Array:
        """h before it is rounded, from float32 operands that broadcast to one shape.

        It must be zero if all operands are zero. Use only operations that kernel languages have
        too.
        """


@functools.partial(
    jax.checkpoint, static_argnums=0, prevent_cse=False,
    policy=jax.checkpoint_policies.save_only_these_names(STATISTIC),
)  # fmt: skip
def _apply(prologue: AbstractPrologue, *arrays: ArrayLike) -> Array:
    operands = prologue.operands(*arrays)
    h = prologue.elementwise(*(each.astype(jnp.float32) for each in operands))
    return _rounded(h, operands[0].dtype)


def _rounded(x: Array, dtype: DType) -> Array:
    """x in a dtype.

    XLA drops a conversion to bfloat16 and back where it fuses both. `reduce_precision` keeps the
    rounding. It is applied after the conversion, where it changes nothing, so that XLA writes h to
    memory as bfloat16 and not as float32.
    """
    x = x.astype(dtype)
    return lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "operands"], meta_fields=["prologue"]
)
@dataclasses.dataclass(frozen=True)
class Produced:
    """An array, and the arrays that a prologue makes it from: `value == prologue(*arrays)`.

    Attributes:
      value: [..., M, K]; where nothing reads it, XLA does not compute it.
      operands: `prologue.operands(*arrays)`.
      prologue: what makes value of them.
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


Source: TypeAlias = Array | Produced
"""What a quantizer reads: an array, or what a prologue makes."""


def produce(prologue: AbstractPrologue, *arrays: ArrayLike) -> Produced:
    """What the prologue makes of the arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> produce(fp8.prologues.SwiGLU(), jnp.ones((2, 4)), jnp.ones((2, 4))).shape
      (2, 4)
    """
    return Produced(prologue(*arrays), prologue.operands(*arrays), prologue)


def value_of(x: Source) -> Array:
    """The array itself.

    Example:
      >>> import jax.numpy as jnp
      >>> value_of(jnp.ones(3)).shape
      (3,)
    """
    return x.value if isinstance(x, Produced) else x


def prologue_of(x: Source) -> AbstractPrologue | None:
    """The prologue that makes x; None if x is an array.

    Example:
      >>> import jax.numpy as jnp
      >>> prologue_of(jnp.ones(3)) is None
      True
    """
    return x.prologue if isinstance(x, Produced) else None


def wide_operands(x: Source) -> int:
    """How many arrays of the size of x a kernel reads to make x.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> wide_operands(produce(fp8.prologues.SwiGLU(), jnp.ones((2, 3)), jnp.ones((2, 3))))
      2
    """
    if not isinstance(x, Produced):
        return 1
    return sum(math.prod(each.shape) == math.prod(x.shape) for each in x.operands)
