"""Where arrays lie, what has to be combined across devices, and what a compiled program sends between them."""

from jaxfp8.sharding._transfer import Transfer as Transfer
from jaxfp8.sharding._wire_dtype import assert_wire_dtype as assert_wire_dtype
from jaxfp8.sharding._wire_report import WireReport as WireReport
from jaxfp8.sharding._wire_report import wire_report as wire_report
