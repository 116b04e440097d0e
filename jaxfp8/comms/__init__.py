"""Collectives of QuantizedTensors, inside `jax.shard_map`. They send FP8 values."""

from jaxfp8.comms._collectives import all_gather as all_gather
from jaxfp8.comms._collectives import all_to_all as all_to_all
from jaxfp8.comms._collectives import ppermute as ppermute
