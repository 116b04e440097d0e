"""`QuantizedTensor`: FP8 values with their scale. `Cast`: how they are made."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._typing import Array, Axes, DType, Rounding
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._exact import LARGEST, factors_of, times
from jaxfp8.numerics._formats import E8M0, VALUE_FORMATS, Format, format_of
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale import ScaleRule

# QuantizedTensor: FP8 values together with their scale.


@register_node
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """An array in FP8: `x ~ values * scale`.

    Invariants:

    - `values.dtype` is float8_e4m3fn or float8_e5m2.
    - `scale.dtype` is float32 or float8_e8m0fnu.
    - `scale.shape` is `granularity.scale_shape(values.shape)`.
    - A scale is positive, or NaN.
    - With `power_of_two` every scale is a power of two, or NaN. E8M0 scales need `power_of_two`.

    Operations check the invariants, and the values of scales that are not traced. The constructor
    does not, so that its fields can be partition specs or types. `jax.tree.map` sees the values and
    the scale: it may copy, move, stack or index them, and must not compute with them.

    Attributes:
      values: [...] FP8 payload.
      scale: multiplies stored values back to real ones.
      granularity: which values share a scale (static).
      dtype: the dtype of the array before the cast (static).
      power_of_two: whether every scale is known to be a power of two (static). Then a matmul may
        multiply the values by it exactly.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x = jnp.array([[1.0, -2.0], [0.5, 0.25]])
      >>> q = fp8.quantize(x, fp8.E4M3, fp8.PerAxis(0), power_of_two=True)
      >>> q.shape, q.scale.shape
      ((2, 2), (2, 1))
      >>> q.dequantize()
      Array([[ 1.  , -2.  ],
             [ 0.5 ,  0.25]], dtype=float32)
    """

    values: Array
    scale: Array
    granularity: AbstractGranularity = dataclasses.field(metadata=STATIC)
    dtype: DType = dataclasses.field(metadata=STATIC)
    power_of_two: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def format(self) -> Format:
        return format_of(self.values.dtype)

    def dequantize(self, dtype: DType | None = None) -> Array:
        """`values * scale`, computed in float32.

        Finite values stay finite. Quantization can round a value above the largest value of its
        dtype: in float16, 65504 becomes 65536. So finite results are clipped to the range of
        `dtype`.

        Args:
          dtype: the dtype of the result; default: the dtype of the array before the cast.

        Raises:
          ValueError: if a scale that is not traced cannot be that of a cast.
        """
        check_scale(self, "this QuantizedTensor", "fp8.quantize(x, ...)")
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        # An E8M0 scale has two factors, because its smallest value is subnormal in float32.
        factors = [self.granularity.expand(each, self.shape) for each in factors_of(self.scale)]
        return dequantized(self.values, factors, dtype)

    def transpose(self, *permutation: int) -> "QuantizedTensor":
        """The tensor with its axes permuted. It is exact: scales move with their values.

        Args:
          *permutation: for each new axis, the old axis; default: the axes reversed.

        Raises:
          ValueError: if the tiles are along one axis. A matmul that reads the transposed tensor
            needs tiles along another axis. Quantize the original array in both directions.
        """
        order: Axes = permutation or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(
                f"permutation {order} does not permute the {self.ndim} axes of a tensor of shape "
                f"{self.shape}. Name each axis once."
            )
        scale = self.scale.transpose(order) if self.scale.ndim else self.scale
        granularity = self.granularity.transpose(order)
        values = self.values.transpose(order)
        return dataclasses.replace(self, values=values, scale=scale, granularity=granularity)

    @property
    def T(self) -> "QuantizedTensor":
        return self.transpose()


def dequantized(values: Array, factors: Sequence[Array], dtype: DType) -> Array:
    """`values * scale`, clipped to `dtype`, for the factors of a scale that broadcast to values."""
    largest = min(float(jnp.finfo(dtype).max), LARGEST)
    wide = values.astype(jnp.float32)
    product = jnp.clip(times(wide, list(factors)), -largest, largest)
    return jnp.where(jnp.isfinite(wide), product, wide * factors[0]).astype(dtype)


def validate(tensor: QuantizedTensor, name: str = "tensor") -> None:
    """Check the invariants of `QuantizedTensor`."""
    validate_types(tensor, name)
    check_scale(tensor, name, "fp8.quantize(x, ...)")


def validate_types(tensor: QuantizedTensor, name: str) -> None:
    """Checks what types, dtypes and shapes tell; see `validate`."""
    if not isinstance(tensor, QuantizedTensor):
        raise TypeError(
            f"{name} is of type {type(tensor).__name__}, not a QuantizedTensor; make one with "
            "fp8.quantize."
        )
    if tensor.values.dtype not in [format.dtype for format in VALUE_FORMATS]:
        raise ValueError(
            f"{name} has values of dtype {tensor.values.dtype.name}. The dtype must be one of "
            f"{[f.dtype.name for f in VALUE_FORMATS]}; make it with fp8.quantize."
        )
    wanted = tensor.granularity.scale_shape(tensor.shape)
    if tensor.scale.dtype not in (jnp.float32, E8M0.dtype) or tensor.scale.shape != wanted:
        raise ValueError(
            f"{name} has a scale {tensor.scale.dtype.name}{list(tensor.scale.shape)}, but values "
            f"of shape {list(tensor.shape)} with {tensor.granularity!r} need float32{list(wanted)} "
            "or E8M0; make it with fp8.quantize."
        )
    if tensor.scale.dtype == E8M0.dtype and not tensor.power_of_two:
        raise ValueError(
            f"{name} has E8M0 scales and power_of_two=False. E8M0 scales are powers of two; pass "
            "power_of_two=True."
        )


def check_scale(tensor: QuantizedTensor, name: str, cure: str) -> None:
    """Raise ValueError if a scale cannot be that of a cast. `cure` is the call that makes it."""
    for scale in _known(tensor.scale):
        mantissa = np.frexp(scale)[0]  # 0.5 for powers of two; that of inf is inf
        fits = np.isnan(scale) | (mantissa == 0.5 if tensor.power_of_two else mantissa > 0)
        if not np.all(fits):
            kind = "a power of two" if tensor.power_of_two else "positive"
            raise ValueError(
                f"{name} has the scale {scale[~fits].flat[0]}, which must be {kind}. Arithmetic on "
                "a tree, such as jax.tree.map(lambda x: -x, tree), has changed values and scales. "
                f"Change the array before the cast, and quantize the result: {cure}."
            )


def _known(scale: Any) -> list[np.ndarray]:
    """The float32 scales that this process holds. Reading waits until they are computed."""
    is_array = isinstance(scale, np.ndarray | jax.Array) and not isinstance(scale, jax.core.Tracer)
    if not is_array or scale.dtype == E8M0.dtype:  # E8M0 has powers of two and NaN only
        return []
    if isinstance(scale, jax.Array) and not scale.is_fully_addressable:
        return [np.asarray(shard.data) for shard in scale.addressable_shards]
    return [np.asarray(scale)]


# Cast: everything that decides how an array becomes FP8, except its scales.


@dataclasses.dataclass(frozen=True)
class Direction:
    """One FP8 copy of an array, for the matmuls that contract the same axes of it."""

    granularity: AbstractGranularity
    # Hopper's matmuls contract the last axis in memory. So the last two are transposed there, and
    # the shape of the copy stays. XLA's backend keeps the transposition behind the cast at most.
    transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """How an array becomes FP8, in one or more copies. Hashable.

    One `Cast` describes all copies, so that a kernel can make them in one read of the array. A new
    option of casts is a new field here.

    Attributes:
      directions: one for each copy. With "stochastic" rounding all copies use the same bits.
      rule: how an amax becomes a scale. Two-level scales (NVFP4 has an E4M3 scale for each tile and
        a float32 scale for the tensor) would be a field of the rule and one of `QuantizedTensor`.
      column_sums: whether to sum the columns, too. A backend leaves the sums out if it would have
        to read the array again for them (`CastExtras`).
      separate: whether matmuls read the matrices [M, K] of an array [..., M, K] one by one, as
        those of experts. A kernel then transposes each by itself.
      backends: the first one that supports the case makes the copies.
    """

    format: Format
    directions: tuple[Direction, ...]
    rule: ScaleRule = ScaleRule()
    rounding: Rounding = "nearest"
    column_sums: bool = False
    separate: bool = False
    backends: tuple[str, ...] = ("xla",)

    @functools.cached_property
    def granularities(self) -> tuple[AbstractGranularity, ...]:
        """The granularity of each copy."""
        return tuple(direction.granularity for direction in self.directions)

    def copies(
        self, values: tuple[Array, ...], scales: tuple[Array, ...], dtype: DType
    ) -> tuple[QuantizedTensor, ...]:
        """A `QuantizedTensor` [...] for each direction, of an array that had this dtype."""
        return tuple(
            QuantizedTensor(*each, dtype, self.rule.exact)
            for each in zip(values, scales, self.granularities, strict=True)
        )


# CastExtras: what a cast kernel returns besides the copies, because it reads the array anyway.

_SIDE = 128  # of the square tiles for which kernels return one amax: T of `_mosaic_tiles.py`


class CastExtras(NamedTuple):
    """Extra results of a cast kernel. A field is None if the kernel did not compute it.

    Attributes:
      largest: an array [...] that has the same amax as x.
      column_sums: float32 [..., C, K] of x [..., M, K]. Their sum along C is that of x along M.
    """

    largest: Array | None = None
    column_sums: Array | None = None

    def or_else(self, other: "CastExtras") -> "CastExtras":
        """These results, and those of another kernel for the fields that are None."""
        return CastExtras(
            *(mine if mine is not None else its for mine, its in zip(self, other, strict=True))
        )

    @classmethod
    def of(cls, x: Array, like: "CastExtras") -> "CastExtras":
        """The results of the types `like` for x [..., M, K], as XLA computes them."""
        largest = sums = None
        if like.largest is not None:
            cells = PerBlock((_SIDE, _SIDE))
            largest = amax(x, cells).astype(like.largest.dtype)
        if like.column_sums is not None:
            sums = jnp.sum(x, -2, jnp.float32, keepdims=True)
            # A kernel sums some rows into each of C entries. Here the first entry is the whole
            # sum, and the others are zero.
            unused = like.column_sums.shape[-2] - 1
            sums = jnp.pad(sums, [(0, 0)] * (x.ndim - 2) + [(0, unused), (0, 0)])
        return cls(largest, sums)
