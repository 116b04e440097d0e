"""The FP8 formats, and the dtypes of what is cast to them.

References:
  Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433 (E4M3, E5M2).
  OCP Microscaling Formats (MX) v1.0, section 5.4 (E8M0).
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxfp8._pytrees import register_value
from jaxfp8._typing import Array, DType

# The 8-bit formats and the values that they can hold.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """An 8-bit floating-point format.

    Attributes:
      name: its usual name, for instance `E4M3`.
      dtype: the jax dtype that stores it.
      max: the largest finite value.
      mantissa_bits: the stored bits of the significand.
      min_exponent: the exponent of the smallest normal value. Subnormals share its spacing.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.E4M3.max, fp8.E5M2.max
      (448.0, 57344.0)
    """

    name: str
    dtype: DType
    max: float
    mantissa_bits: int
    min_exponent: int

    @functools.cached_property
    def max_exponent(self) -> int:
        """The exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @functools.cached_property
    def nan_byte(self) -> int:
        """The byte that a cast stores for NaN. E4M3 has one positive NaN, E5M2 has several."""
        return int(np.array(np.nan, self.dtype).view(np.uint8))

    def __repr__(self) -> str:
        return self.name


def _format(name: str, dtype: DType) -> Format:
    info = ml_dtypes.finfo(dtype)
    return Format(
        name=name,
        dtype=jnp.dtype(dtype),
        max=float(info.max),
        mantissa_bits=info.nmant,
        min_exponent=info.minexp,
    )


E4M3 = _format("E4M3", jnp.float8_e4m3fn)
"""4 exponent and 3 mantissa bits, no infinity, largest value 448: weights and activations."""
E5M2 = _format("E5M2", jnp.float8_e5m2)
"""5 exponent and 2 mantissa bits, largest value 57344: gradients, which need range."""
E8M0 = _format("E8M0", jnp.float8_e8m0fnu)
"""Powers of two only, 2^-127 to 2^127: the scales of the MX formats, never values."""

VALUE_FORMATS = (E4M3, E5M2)

register_value(
    Format, fields=("name",), make=lambda name: {f.name: f for f in (E4M3, E5M2, E8M0)}[name]
)


def format_of(dtype: DType) -> Format:
    """The format that a dtype stores. ValueError if the dtype is no FP8 format."""
    for candidate in (*VALUE_FORMATS, E8M0):
        if candidate.dtype == jnp.dtype(dtype):
            return candidate
    raise ValueError(
        f"dtype {jnp.dtype(dtype).name} is no FP8 format; use one of "
        f"{[f.dtype.name for f in VALUE_FORMATS]}."
    )


def check_value_format(format: object) -> None:
    """Raise ValueError unless values can be stored in the format."""
    if not isinstance(format, Format) or format not in VALUE_FORMATS:
        raise ValueError(f"format={format!r} cannot hold values; use one of {list(VALUE_FORMATS)}.")


# The dtypes that go into a cast and come out of a matmul.

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_float_dtype(name: str, x: Array) -> None:
    """Raise TypeError unless an array has a dtype of `FLOAT_DTYPES`."""
    if x.dtype.name not in FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype.name}. Cast it to one of {list(FLOAT_DTYPES)}.")


def sum_dtype(dtype: DType) -> DType:
    """The dtype in which values of a dtype are summed: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def product_dtype(lhs: DType, rhs: DType) -> DType:
    """The dtype that `jax.lax.dot_general` gives to the product of two float dtypes.

    It is the one with the larger range, and of two with the same range the more precise one.
    (`jnp.dot` promotes, which makes float32 of bfloat16 and float16.)
    """
    infos = jnp.finfo(lhs), jnp.finfo(rhs)
    return jnp.dtype(max(infos, key=lambda info: (info.maxexp, info.nmant)).dtype)


def check_out_dtype(preferred_element_type: DType) -> DType:
    """The dtype of a matmul's result. TypeError if no matmul can return it."""
    try:
        dtype = jnp.dtype(preferred_element_type)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in FLOAT_DTYPES:
        given = repr(preferred_element_type) if dtype is None else dtype.name
        raise TypeError(
            f"preferred_element_type={given} is no dtype that a matmul can return; use one of "
            f"{list(FLOAT_DTYPES)}."
        )
    return dtype
