"""Collectives of QuantizedTensors, and sums of gradients, inside `jax.shard_map`."""

from jaxfp8.comms._auto_scaled import GradientSumState as GradientSumState
from jaxfp8.comms._auto_scaled import init_gradient_sums as init_gradient_sums
from jaxfp8.comms._collectives import all_gather as all_gather
from jaxfp8.comms._collectives import all_to_all as all_to_all
from jaxfp8.comms._collectives import ppermute as ppermute
from jaxfp8.comms._gradients import all_reduce_gradients as all_reduce_gradients
from jaxfp8.comms._gradients import reduce_scatter_gradients as reduce_scatter_gradients
from jaxfp8.comms._sum_methods import AutoScaledFP8 as AutoScaledFP8
from jaxfp8.comms._sum_methods import BFloat16Sum as BFloat16Sum
from jaxfp8.comms._sum_methods import TwoPhaseFP8 as TwoPhaseFP8
