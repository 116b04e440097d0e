"""A look inside: what the casts and sums of one step lose, and what quantizer state holds."""

from jaxfp8.diagnostics._collect import CastRow as CastRow
from jaxfp8.diagnostics._collect import Records as Records
from jaxfp8.diagnostics._collect import SumRow as SumRow
from jaxfp8.diagnostics._collect import collect as collect
from jaxfp8.diagnostics._summary import StateRow as StateRow
from jaxfp8.diagnostics._summary import Summary as Summary
from jaxfp8.diagnostics._summary import summary as summary
