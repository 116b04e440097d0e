"""Mixtures of experts: routers, the way of tokens to experts over a mesh, and their matmuls."""

from jaxfp8.ops._dispatch_matmul import dispatch_matmul as dispatch_matmul
from jaxfp8.ops._dispatch_matmul import matmul_combine as matmul_combine
from jaxfp8.ops._route_tokens import route as route
from jaxfp8.sharding._route import Route as Route
from jaxfp8.sharding._route import combine as combine
from jaxfp8.sharding._route import dispatch as dispatch
