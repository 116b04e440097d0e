"""Small train steps, for the tests of `memory_report`."""

import jax
import jax.numpy as jnp
import optax

import jaxfp8 as fp8

DELAYED, IDENTITY = fp8.recipes.delayed(), fp8.recipes.identity()
L, B, D = 4, 64, 32  # layers, batch, features
W = L * D * D  # elements of the weights
STATE = 3 * 4 + 3 * 16 * 4 + 3 * 4 + 3 * 4  # of one matmul: scales, history, counts, fingerprints
ADAM = optax.adam(1e-3)


def stack(recipe=DELAYED, remat=True):
    """`loss(w, state, x)` of a scan over L layers, each a matmul and a ReLU."""

    def loss(w, state, x):
        def layer(x, ws):
            w, state = ws
            return jax.nn.relu(fp8.dot(x, w, recipe=recipe, state=state)), None

        y, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (w, state))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return loss


def stacked_state(recipe=DELAYED):
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (L, *a.shape)), fp8.init_state(recipe))


def train_step(loss, tx=ADAM):
    def step(w, opt_state, state, x):
        value, grads, state = fp8.value_and_grad(loss)(w, state, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return value, optax.apply_updates(w, updates), opt_state, state

    return jax.jit(step, donate_argnums=(0, 1, 2))


def arguments(recipe=DELAYED, tx=ADAM):
    w = jnp.ones((L, D, D))  # float32: XLA for CPUs would widen the residuals of bfloat16
    return w, tx.init(w), stacked_state(recipe), jnp.ones((B, D))


def sums(compiled):
    """What XLA allocates: for arguments, temporaries, and other results."""
    stats = compiled.memory_analysis()
    other = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes, stats.temp_size_in_bytes, other


def check_sums(kinds, compiled):
    at = dict.fromkeys(
        ("weights", "master weights", "moments", "quantizer state", "other arguments"), 0
    )
    in_arguments = sum(kinds.get(kind, 0) for kind in at)
    in_temporary = sum(kinds[kind] for kind in ("gradients", "residuals", "temporaries"))
    assert (in_arguments, in_temporary, kinds["results"]) == sums(compiled)
    assert min(kinds.values()) >= 0
