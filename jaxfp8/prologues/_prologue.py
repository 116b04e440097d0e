"""Prologues: operations on an activation between reading and quantizing it.

The result of a prologue is called h. XLA fuses a prologue into its own casts, but not into a
kernel: h would be written to memory and read again. So kernels in Pallas read the input arrays of
the prologue. They compute a tile of h and quantize it at once.

A quantizer can also read rows that are gathered into tiles.

Letters: M, K are the last two axes of h.
"""

import abc
import dataclasses
import functools
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._check import check_number
from jaxfp8._pytrees import STATIC, register_node, register_value
from jaxfp8._typing import Array, ArrayLike, Axes, DType
from jaxfp8.numerics._formats import check_float_dtype


class _FromArrays:
    """A value [..., M, K], and the arrays that a kernel can compute it from as it reads them.

    If nothing reads the value, XLA does not compute it.
    """

    value: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> DType:
        return self.value.dtype


# Rows of an array, gathered into tiles: what a quantizer of grouped matmuls reads.
#
# XLA fuses the gather into its own casts, but not into a kernel: the tiles would be written to
# memory and read again. So kernels in Pallas read the rows where they are.
#
# Letters: T rows, R tiles of P rows, K values of a row.


@register_node
@dataclasses.dataclass(frozen=True)
class Gathered(_FromArrays):
    """Tiles of adjacent rows, and the array that has the rows.

    Attributes:
      value: [R, P, K], the tiles.
      rows: [T, K], the array.
      first_row: i32[R], the first row of each tile.
      count: i32[R], how many rows a tile has. Its other rows are 0.
    """

    value: Array
    rows: Array
    first_row: Array
    count: Array


# The base class, and the result of a prologue with its operands.

_STATISTIC = "jaxfp8.statistic"  # the name under which the backward pass finds one


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
        """h, with the shape and dtype of the first array. It is differentiable; see `operands`."""
        return _apply(self, *arrays)

    def operands(self, *arrays: ArrayLike) -> tuple[Array, ...]:
        """The operands of `elementwise`. The first has the shape of h, the others broadcast to it.

        TypeError for an array that is not floating point, ValueError for their number or shapes.
        """
        given = tuple(each if isinstance(each, jax.Array) else jnp.asarray(each) for each in arrays)
        if len(given) != len(self.names):
            raise ValueError(
                f"{self!r} takes {len(self.names)} arrays, {self.names}, but got {len(given)}; "
                "pass one array for each name."
            )
        for name, each in zip(self.names, given, strict=True):
            check_float_dtype(name, each)
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
    policy=jax.checkpoint_policies.save_only_these_names(_STATISTIC),
)  # fmt: skip
def _apply(prologue: AbstractPrologue, *arrays: ArrayLike) -> Array:
    return _of_operands(prologue, prologue.operands(*arrays))


def _of_operands(prologue: AbstractPrologue, operands: tuple[Array, ...]) -> Array:
    h = prologue.elementwise(*(each.astype(jnp.float32) for each in operands))
    return _rounded(h, operands[0].dtype)


def _rounded(x: Array, dtype: DType) -> Array:
    """x in another dtype, rounded even if XLA fuses the conversion with its inverse."""
    x = x.astype(dtype)
    # XLA drops a conversion to bfloat16 and back if it fuses both. This keeps the rounding. It
    # changes no value here. Before the conversion, XLA would write h to memory as float32.
    return lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


@register_node
@dataclasses.dataclass(frozen=True)
class Produced(_FromArrays):
    """The result of a prologue, and its operands: `value == prologue(*arrays)`."""

    value: Array
    operands: tuple[Array, ...]
    prologue: AbstractPrologue = dataclasses.field(metadata=STATIC)


Source: TypeAlias = Array | Produced | Gathered
"""What a quantizer reads: an array, the result of a prologue, or gathered rows."""


def produce(prologue: AbstractPrologue, *arrays: ArrayLike) -> Produced:
    return Produced(prologue(*arrays), prologue.operands(*arrays), prologue)


def produce_again(prologue: AbstractPrologue, operands: tuple[Array, ...]) -> Produced:
    """The same, from operands that `produce` returned."""
    return Produced(_of_operands(prologue, operands), operands, prologue)


def value_of(x: Source) -> Array:
    """x as an array."""
    return x.value if isinstance(x, _FromArrays) else x


def prologue_of(x: Source) -> AbstractPrologue | None:
    """The prologue whose result x is, if any."""
    return x.prologue if isinstance(x, Produced) else None


# RMSNorm, which comes before the first matmul of a transformer block.
#
# Letters: M, K are the last two axes of x.


@register_value
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
        needed = "a positive number, finite and normal in float32, for instance 1e-6"
        epsilon = check_number("epsilon", self.epsilon, needed, least=2.0**-126, most=2.0**127)
        object.__setattr__(self, "epsilon", epsilon)

    def _operands(self, *arrays: Array) -> tuple[Array, ...]:
        x, gain = arrays
        if not x.ndim or gain.shape != x.shape[-1:]:
            raise ValueError(
                f"gain has shape {list(gain.shape)}, x {list(x.shape)}. The gain must have one "
                "axis, as long as the last axis of x."
            )
        mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        rstd = checkpoint_name(lax.rsqrt(mean_square + self.epsilon), _STATISTIC)
        return x, rstd, gain.astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), x.shape[-1])

    def elementwise(self, *operands: Array) -> Array:
        x, rstd, gain = operands
        return x * (rstd * gain)


# SwiGLU, which comes before the second matmul of a gated MLP.


@register_value
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
