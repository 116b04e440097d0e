"""Prologues: what is done to an activation between reading and quantizing it.

XLA fuses such a function into its own casts. Into a kernel it cannot: h would be written to memory
and read again. So kernels in Pallas read what h is made of, and make a tile of h where they
quantize it.

Letters: M, K the last two axes of h.
"""

import abc
import dataclasses
import functools
import math
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._typing import Array, ArrayLike, Axes, DType
from jaxfp8.numerics._dtypes import FLOAT_DTYPES

_STATISTIC = "jaxfp8.statistic"


class AbstractPrologue(abc.ABC):
    """`h = prologue(*arrays)`: an operation that a cast kernel can compute as it reads arrays.

    It is computed in float32 and rounded once, to the dtype of the first array. Differentiating it
    saves the arrays (and statistics of rows), nothing else of their size.
    Subclasses are frozen dataclasses of hashable values.

    Attributes:
      names: of the arrays.
      whole: axes of h that a device needs whole, because a statistic spans them.
    """

    names: ClassVar[tuple[str, ...]]
    whole: ClassVar[Axes] = ()

    def __call__(self, *arrays: ArrayLike) -> Array:
        """h, of the shape and dtype of the first array; any differentiable part of JAX can use it.

        Raises:
          TypeError, ValueError: see `operands`.
        """
        return _apply(self, *arrays)

    def operands(self, *arrays: ArrayLike) -> tuple[Array, ...]:
        """What `elementwise` takes: the first with the shape of h, the others with its axes or 1.

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
        """`operands`, of arrays that are as many as they must be, and floating point."""

    @abc.abstractmethod
    def elementwise(self, *operands: Array) -> Array:
        """h before it is rounded, of operands in float32, of one shape or broadcastable.

        Of zeros it is zero.

        In operations that XLA and kernel languages have.
        """


@functools.partial(
    jax.checkpoint, static_argnums=0, prevent_cse=False,
    policy=jax.checkpoint_policies.save_only_these_names(_STATISTIC),
)  # fmt: skip
def _apply(prologue: AbstractPrologue, *arrays: ArrayLike) -> Array:
    operands = prologue.operands(*arrays)
    h = prologue.elementwise(*(each.astype(jnp.float32) for each in operands))
    return _rounded(h, operands[0].dtype)


def _rounded(x: Array, dtype: DType) -> Array:
    """x in a dtype.

    XLA drops a conversion to bfloat16 and back where it fuses both, but not around this rounding.

    Of the converted array, which it does not change: what XLA writes to memory, because it will not
    compute h twice, is then bfloat16 and not float32.
    """
    x = x.astype(dtype)
    return lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwiGLU(AbstractPrologue):
    """`h = silu(gate) * up`, `silu(v) = v / (1 + exp(-v))`.

    [..., M, K] of gate [..., M, K] and up [..., M, K].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.SwiGLU()(jnp.array([0.0, 20.0]), jnp.array([3.0, 0.5]))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSNorm(AbstractPrologue):
    """`h = x * (rstd * gain)`, `rstd = 1 / sqrt(mean(x^2, axis=-1) + epsilon)`.

    [..., M, K] of x [..., M, K] and gain [K].

    The order of `flax.linen.RMSNorm`. rstd, [..., M, 1], is a reduction that XLA fuses into
    whatever wrote x. Inside `jax.shard_map` a device must have all of the last axis.

    Attributes:
      epsilon: positive, finite and no less than float32's smallest normal number.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.RMSNorm(epsilon=1e-6)(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0])).round()
      Array([[ 1., -2.]], dtype=float32)

    References:
      Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, section 3.
    """

    names: ClassVar[tuple[str, ...]] = ("x", "gain")
    whole: ClassVar[Axes] = (-1,)
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        given: object = self.epsilon
        real = isinstance(given, int | float | np.floating) and not isinstance(given, bool)
        if not real or not np.finfo(np.float32).tiny <= self.epsilon < math.inf:
            raise ValueError(
                f"epsilon={given!r} must be a positive number of float32, for instance 1e-6."
            )
        object.__setattr__(self, "epsilon", float(self.epsilon))

    def _operands(self, *arrays: Array) -> tuple[Array, ...]:
        x, gain = arrays
        if not x.ndim or gain.shape != x.shape[-1:]:
            raise ValueError(
                f"gain has shape {list(gain.shape)}, x {list(x.shape)}; a gain has the last axis "
                "of x."
            )
        mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        rstd = checkpoint_name(lax.rsqrt(mean_square + self.epsilon), _STATISTIC)
        return x, rstd, gain.astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), x.shape[-1])

    def elementwise(self, *operands: Array) -> Array:
        x, rstd, gain = operands
        return x * (rstd * gain)


@dataclasses.dataclass(frozen=True)
class Produced:
    """An array of which a kernel can read what it is made of: `value == prologue(*arrays)`.

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
"""What a quantizer reads."""


def produce(prologue: AbstractPrologue, *arrays: ArrayLike) -> Produced:
    """What the prologue makes of the arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> produce(SwiGLU(), jnp.ones((2, 4)), jnp.ones((2, 4))).shape
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
    """What makes x of the arrays that a kernel reads; None if x is an array.

    Example:
      >>> import jax.numpy as jnp
      >>> prologue_of(jnp.ones(3)) is None
      True
    """
    return x.prologue if isinstance(x, Produced) else None


def wide_operands(x: Source) -> int:
    """How many arrays of the size of x a kernel reads for it.

    Example:
      >>> import jax.numpy as jnp
      >>> wide_operands(produce(SwiGLU(), jnp.ones((2, 3)), jnp.ones((2, 3))))
      2
    """
    if not isinstance(x, Produced):
        return 1
    return sum(math.prod(each.shape) == math.prod(x.shape) for each in x.operands)
