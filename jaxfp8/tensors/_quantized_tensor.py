"""QuantizedTensor: FP8 values together with the scale that makes them numbers again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.numerics._float32 import LARGEST
from jaxfp8.numerics._formats import E8M0, VALUE_FORMATS, Format, format_of
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._powers_of_two import factors_of


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale"],
    meta_fields=["granularity", "dtype", "power_of_two"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """An array in FP8: `x ~ values * scale`.

    Invariants (checked by `validate`, not on construction, so that tree maps over specs work):
      values.dtype in {float8_e4m3fn, float8_e5m2}
      scale.dtype  in {float32, float8_e8m0fnu}
      scale.shape  == granularity.scale_shape(values.shape)
      power_of_two implies that every scale is one (or NaN); E8M0 implies power_of_two

    Attributes:
      values: [...] FP8 payload.
      scale: multiplies stored values back to real ones.
      granularity: which values share a scale (static).
      dtype: the high-precision dtype that it stands for (static).
      power_of_two: every scale is known to be a power of two (static), so a matmul may fold it into
        the values.

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
    granularity: AbstractGranularity
    dtype: DType
    power_of_two: bool = False

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
        """`values * scale` in `dtype`, computed in float32; default: the dtype of the tensor.

        Finite values stay finite: rounded up to 8 bits, 65504 in float16 stands for 65536, which
        float16 cannot hold.
        """
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        largest = min(float(jnp.finfo(dtype).max), LARGEST)
        values = self.values.astype(jnp.float32)
        product = values
        for factor in factors_of(self.scale):
            product = product * self.granularity.expand(factor, self.shape)
        return jnp.where(
            jnp.isfinite(values), jnp.clip(product, -largest, largest), product
        ).astype(dtype)

    def transpose(self, *permutation: int) -> "QuantizedTensor":
        """The tensor with its axes permuted (default: reversed).

        Exact, values and scales move together.

        Raises:
          ValueError: for tiles along one axis, which would run along the wrong axis then.
        """
        order: Axes = permutation or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(
                f"permutation {order} does not permute the {self.ndim} axes of a tensor of shape "
                f"{self.shape}."
            )
        scale = self.scale.transpose(order) if self.scale.ndim else self.scale
        granularity = self.granularity.transpose(order)
        values = self.values.transpose(order)
        return dataclasses.replace(self, values=values, scale=scale, granularity=granularity)

    @property
    def T(self) -> "QuantizedTensor":
        return self.transpose()


def validate(tensor: QuantizedTensor, name: str = "tensor") -> None:
    """Raise ValueError if an invariant of `QuantizedTensor` does not hold; `name` is for the error.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> validate(fp8.quantize(jnp.ones((2, 2)), fp8.E4M3))
    """
    if not isinstance(tensor, QuantizedTensor):
        raise TypeError(
            f"{name} is of type {type(tensor).__name__}, not a QuantizedTensor; make one with "
            "fp8.quantize."
        )
    if tensor.values.dtype not in [format.dtype for format in VALUE_FORMATS]:
        raise ValueError(
            f"{name} has values of dtype {tensor.values.dtype.name}; they must be one of "
            f"{[f.dtype.name for f in VALUE_FORMATS]}: make it with fp8.quantize."
        )
    wanted = tensor.granularity.scale_shape(tensor.shape)
    if tensor.scale.dtype not in (jnp.float32, E8M0.dtype) or tensor.scale.shape != wanted:
        raise ValueError(
            f"{name} has a scale {tensor.scale.dtype.name}{list(tensor.scale.shape)}, but values "
            f"of shape {list(tensor.shape)} with {tensor.granularity!r} need float32{list(wanted)} "
            "(or E8M0): make it with fp8.quantize."
        )
    if tensor.scale.dtype == E8M0.dtype and not tensor.power_of_two:
        raise ValueError(
            f"{name} has E8M0 scales and power_of_two=False; they are powers of two: pass "
            "power_of_two=True."
        )
