"""Quantizers: they choose the scale of a matmul's operand and cast it."""

from jaxfp8.kernels.cast._api import KnownScale as KnownScale
from jaxfp8.numerics._formats import Format as Format
from jaxfp8.numerics._granularity import PerRow as PerRow
from jaxfp8.quantizers._base import AbstractQuantizer as AbstractQuantizer
from jaxfp8.quantizers._base import RowState as RowState
from jaxfp8.quantizers._base import ScaleInputs as ScaleInputs
from jaxfp8.quantizers._base import (
    register_quantizer_serialization as register_quantizer_serialization,
)
from jaxfp8.quantizers._kinds import Current as Current
from jaxfp8.quantizers._kinds import Delayed as Delayed
from jaxfp8.quantizers._kinds import Identity as Identity
from jaxfp8.quantizers._kinds import Static as Static
