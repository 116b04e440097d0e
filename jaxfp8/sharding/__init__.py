"""Where arrays lie, what has to be combined across devices, and what a compiled program sends between them."""

from jaxfp8.sharding._mesh import MeshRoles as MeshRoles
from jaxfp8.sharding._shard import Shard as Shard
from jaxfp8.sharding._specs import quantized_specs as quantized_specs
from jaxfp8.sharding._transfer import Transfer as Transfer
from jaxfp8.sharding._wire_dtype import assert_wire_dtype as assert_wire_dtype
from jaxfp8.sharding._wire_report import WireReport as WireReport
from jaxfp8.sharding._wire_report import wire_report as wire_report
