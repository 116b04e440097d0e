"""The roles of mesh axes, and how arrays are split over them."""

from jaxfp8.sharding._mesh import MeshRoles as MeshRoles
from jaxfp8.sharding._shard import Shard as Shard
from jaxfp8.sharding._specs import quantized_specs as quantized_specs
