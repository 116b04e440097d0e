"""The arithmetic of FP8 (formats, scales, casts) as pure functions of arrays."""

from jaxfp8.numerics._amax import amax as amax
from jaxfp8.numerics._formats import E4M3 as E4M3
from jaxfp8.numerics._formats import E5M2 as E5M2
from jaxfp8.numerics._formats import E8M0 as E8M0
from jaxfp8.numerics._formats import Format as Format
from jaxfp8.numerics._granularity import PerAxis as PerAxis
from jaxfp8.numerics._granularity import PerRow as PerRow
from jaxfp8.numerics._granularity import PerTensor as PerTensor
from jaxfp8.numerics._per_block import PerBlock as PerBlock
from jaxfp8.numerics._rounding import saturating_cast as saturating_cast
from jaxfp8.numerics._scale import encoding_multiplier as encoding_multiplier
