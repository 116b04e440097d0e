"""An FP8 train step with gradient accumulation: quantizer state rides beside parameters and optimizer state.

python examples/train_step.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense

MICROBATCHES, BATCH, FEATURES = 4, 64, 32
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(FP8Dense(256, dtype=jnp.bfloat16)(x))  # delayed scaling, the default recipe
        return nn.Dense(1)(x)[..., 0].astype(jnp.float32)


def loss_fn(params, state, batch):
    predicted = MLP().apply({"params": params, COLLECTION: state}, batch["x"])
    return jnp.mean((predicted - batch["y"]) ** 2)


@jax.jit
def train_step(params, state, opt_state, batch):  # leaves of batch: [MICROBATCHES, BATCH, ...]
    run = fp8.value_and_grad(loss_fn, commit=False)  # tells what it saw and leaves the state alone

    def microbatch(total, batch):
        loss, grads, seen = run(params, state, batch)
        losses, sums, before = total
        return (losses + loss, jax.tree.map(jnp.add, sums, grads), fp8.merge_seen(before, seen)), None

    nothing = (0.0, jax.tree.map(jnp.zeros_like, params), fp8.nothing_seen(state))
    (loss, grads, seen), _ = jax.lax.scan(microbatch, nothing, batch)
    loss, grads = jax.tree.map(lambda total: total / MICROBATCHES, (loss, grads))  # means; amaxes are a maximum
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), fp8.commit(state, seen), opt_state, loss  # one commit per update


def main(steps=200):
    x = jax.random.normal(jax.random.key(1), (steps, MICROBATCHES, BATCH, FEATURES))
    y = jnp.sin(x[..., 0]) + x[..., 1] * x[..., 2]
    variables = MLP().init(jax.random.key(0), x[0, 0])
    params, state, opt_state = variables["params"], variables[COLLECTION], tx.init(variables["params"])
    for step in range(steps):
        batch = {"x": x[step], "y": y[step]}
        params, state, opt_state, loss = train_step(params, state, opt_state, batch)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss:.4f}")
    print("scales of x, w and g:", state["FP8Dense_0"]["FP8DotGeneral_0"]["fp8"].scale)


if __name__ == "__main__":
    main()
