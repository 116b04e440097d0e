"""An FP8 train step with gradient accumulation.

    python examples/train_step.py [RECIPE]

The same code runs every recipe, with and without state, on a CPU or a GPU.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from chips import add_chip, describe, kernels_of, print_matmuls
from command_line import Parser, run_script

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, TrainState

MICROBATCHES, BATCH, FEATURES = 4, 64, 32


class MLP(nn.Module):
    recipe: fp8.Recipe
    kernels: fp8.Kernels

    @nn.compact
    def __call__(self, x):
        dense = FP8Dense(256, recipe=self.recipe, kernels=self.kernels, dtype=jnp.bfloat16)
        return nn.Dense(1)(nn.relu(dense(x)))[..., 0].astype(jnp.float32)


def train_step(ts, batch):  # leaves of batch: [MICROBATCHES, BATCH, ...]
    def loss_fn(params, fp8_state, batch):
        predicted = ts.apply_fn({"params": params, COLLECTION: fp8_state}, batch["x"])
        return jnp.mean((predicted - batch["y"]) ** 2)

    run = fp8.value_and_grad(loss_fn, commit=False)  # returns the amaxes that it saw

    def microbatch(total, batch):
        *found, seen = run(ts.params, ts.fp8_state, batch)
        return (jax.tree.map(jnp.add, total[0], found), fp8.merge_seen(total[1], seen)), None

    nothing = [0.0, jax.tree.map(jnp.zeros_like, ts.params)], fp8.nothing_seen(ts.fp8_state)
    (sums, seen), _ = jax.lax.scan(microbatch, nothing, batch)
    # Loss and gradients are means. `merge_seen` already took the maximum of the amaxes.
    loss, grads = jax.tree.map(lambda total: total / MICROBATCHES, sums)
    # One commit for each optimizer step:
    return ts.apply_gradients(grads=grads, fp8_state=fp8.commit(ts.fp8_state, seen)), loss


def main(arguments=None):
    parser = Parser(__file__, __doc__)
    names = "delayed", "current", "rowwise", "blockwise", "mxfp8", "identity"
    parser.add_argument("recipe", nargs="?", choices=names, default=names[0])
    add_chip(parser)
    given, steps = parser.parse_args(arguments), 200
    recipe = fp8.recipes.get(given.recipe)
    try:
        kernels = kernels_of(given.chip)
    except ValueError as error:
        parser.error(str(error))
    model, tx = MLP(recipe, kernels), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    x = jax.random.normal(jax.random.key(1), (steps, MICROBATCHES, BATCH, FEATURES))
    y = jnp.sin(x[..., 0]) + x[..., 1] * x[..., 2]
    variables = model.init(jax.random.key(0), x[0, 0])
    params, fp8_state = variables["params"], variables.get(COLLECTION, {})
    ts = TrainState.create(apply_fn=model.apply, params=params, fp8_state=fp8_state, tx=tx)
    jitted = jax.jit(train_step, compiler_options=kernels.compiler_options(recipe))
    compiled = jitted.lower(ts, {"x": x[0], "y": y[0]}).compile()
    print(describe(kernels))
    print_matmuls("train_step", compiled, recipe, kernels)
    for step in range(steps):
        ts, loss = compiled(ts, {"x": x[step], "y": y[step]})
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss:.4f}")
    states, _ = jax.tree.flatten(ts.fp8_state, lambda s: isinstance(s, fp8.state.MatmulState))
    for state in states:
        print("scales of x, w and g:", state.scale)


if __name__ == "__main__":
    run_script(main)
