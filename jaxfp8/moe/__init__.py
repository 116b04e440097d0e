"""Mixtures of experts: routers, the way of tokens to experts over a mesh, and their matmuls."""

from jaxfp8.moe._experts import ExpertParallel as ExpertParallel
from jaxfp8.moe._experts import ExpertsOutput as ExpertsOutput
from jaxfp8.moe._experts import swiglu_experts as swiglu_experts
from jaxfp8.moe._mixture import MoEStats as MoEStats
from jaxfp8.moe._router import Choices as Choices
from jaxfp8.moe._router import load as load
from jaxfp8.moe._router import load_balancing_loss as load_balancing_loss
from jaxfp8.moe._router import top_k as top_k
from jaxfp8.moe._router import z_loss as z_loss
from jaxfp8.ops._dispatch_matmul import dispatch_matmul as dispatch_matmul
from jaxfp8.ops._dispatch_matmul import matmul_combine as matmul_combine
from jaxfp8.ops._dispatch_matmul import route as route
from jaxfp8.sharding._route import Route as Route
from jaxfp8.sharding._route import combine as combine
from jaxfp8.sharding._route import dispatch as dispatch
