"""What a quantizer is: the policy that chooses the scale of one matmul operand."""

import abc
from collections.abc import Callable
from typing import TypeAlias

from jaxfp8._typing import Array, Implementation
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source
from jaxfp8.numerics._formats import VALUE_FORMATS, Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

Operand: TypeAlias = QuantizedTensor | Array
"""What a matmul reads: a tensor in FP8, or an array that its quantizer left alone."""


class AbstractQuantizer(abc.ABC):
    """Chooses the scale of one operand and casts it. Subclasses are frozen dataclasses of hashable values.

    Example:
      >>> import jaxfp8 as fp8
      >>> isinstance(fp8.recipes.delayed().fprop.lhs, fp8.quantizers.AbstractQuantizer)
      True
    """

    granularity: AbstractGranularity

    @property
    @abc.abstractmethod
    def value_format(self) -> Format | None:
        """The format of the result; None if it stays in high precision."""

    @property
    @abc.abstractmethod
    def stateful(self) -> bool:
        """Whether the scale comes from a row of quantizer state."""

    @abc.abstractmethod
    def quantize(
        self,
        x: Source,
        granularities: tuple[AbstractGranularity, ...],
        *,
        amax: Callable[[AbstractGranularity], Array],
        scale: Array | None,
        all_set: bool,
        transposed: tuple[bool, ...] = (),
        column_sums: bool = False,
        implementation: Implementation,
    ) -> tuple[tuple[Operand, ...], Met]:
        """Choose the scale and cast, in one call for all the directions in which matmuls read x.

        Args:
          x: [...] floating point, or what a prologue makes of arrays.
          granularities: this quantizer's own, resolved for the array, once for each direction.
          amax: gives the amax of the whole logical tensor, of shape `granularity.scale_shape(x.shape)`. Called only
            by those who need it, because it costs a read of x.
          scale: [] float32, the stored scale of a stateful quantizer, 0 where unset; None for the others.
          all_set: the caller knows that the scale is set.
          transposed: of each direction, whether its copy shall lie in memory transposed (`kernels.cast._api.cast_copies`).
          column_sums: whether to sum the columns of x, too, if that takes no read of its own.
          implementation: of the cast.

        Returns:
          x in each granularity, and what the cast met of x on the way.
        """


def check_value_format(format: Format) -> None:
    """Raise ValueError unless the format can hold values.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_value_format(fp8.E4M3)
    """
    if format not in VALUE_FORMATS:
        raise ValueError(f"format={format!r} cannot hold values; use one of {list(VALUE_FORMATS)}.")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless the value is a bool.

    Example:
      >>> check_bool("power_of_two", True)
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False.")
