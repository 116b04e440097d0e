"""One process of two, with two devices each.

It restores, checks, repairs and trains states of four stages.
"""

import argparse
import dataclasses
import os
import warnings

os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8 as fp8

parser = argparse.ArgumentParser()
parser.add_argument("--coordinator")
parser.add_argument("--num-processes", type=int)
parser.add_argument("--process-id", type=int)
given = parser.parse_args()
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(given.coordinator, given.num_processes, given.process_id)

RECIPE = fp8.recipes.delayed(history_length=4)
mesh = jax.make_mesh((4,), ("pipe",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.NamedSharding(mesh, jax.P("pipe"))


def placed(array):
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def loss(ws, states, x):
    dot = lambda w, state: fp8.dot(x, w, recipe=RECIPE, state=state)
    return jnp.sum(jax.vmap(dot)(ws, states))


like = jax.tree.map(lambda leaf: np.stack([leaf] * 4), fp8.init_state(RECIPE))
ws, x = placed(np.ones((4, 8, 8), np.float32)), np.ones((2, 8), np.float32)
state = jax.jit(fp8.value_and_grad(loss))(ws, fp8.check_state(jax.tree.map(placed, like), like), x)[
    2
]
scale = like.scale.copy()
scale[3, 1] = np.nan  # on the second process
bad = dataclasses.replace(jax.tree.map(placed, like), scale=placed(scale))
try:
    fp8.check_state(bad, like)
except fp8.FP8StateError as error:
    print("refused", "scale[3, 1] = nan" in str(error))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    repaired = fp8.check_state(bad, like, repair=True)
same = [not shard.data.any() for shard in repaired.scale.addressable_shards]
print("warned", len(caught), "unset", all(same), "in place", repaired.scale.sharding == sharding)
print("checked", fp8.check_state(state, like).scale.shape)
