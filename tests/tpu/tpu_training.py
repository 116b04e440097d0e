"""Features for `tpu_program.py`: optimizers, master weights, weights in FP8, gradient release."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from tpu_matmuls import Feature, K, L, M, N, Rows, array, one, preset, size_of, state_of

import jaxfp8 as fp8
from jaxfp8 import optim

# Large enough for every moment format: smaller arrays stay in float32.
SIDE = 256


def update(tx: optax.GradientTransformation, dtype: Any = jnp.float32) -> Feature:
    """One update of a matrix, its state donated."""
    params = {"w": array(SIDE, SIDE, dtype=dtype)}

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Feature(step, (params, jax.eval_shape(tx.init, params), params), donate=(0, 1))


FORMATS: dict[str, tuple[Any, Any]] = {
    "Int8()": (optim.Int8(), optim.Int8()),
    "ExpandedFP8()": (optim.ExpandedFP8(), optim.ExpandedFP8()),
    "FP8(), Float16()": (optim.FP8(), optim.Float16()),
    "FP8(E5M2), Float16()": (optim.FP8(fp8.E5M2), optim.Float16()),
    "FP8(rounding='stochastic'), Float16()": (optim.FP8(rounding="stochastic"), optim.Float16()),
    "BFloat16()": (optim.BFloat16(), optim.BFloat16()),
    "BFloat16(rounding='stochastic')": (optim.BFloat16("stochastic"), optim.BFloat16("stochastic")),
    "Float32()": (optim.Float32(), optim.Float32()),
}
MASTERS = {
    "Float32()": optim.Float32(),
    "BFloat16Plus(16)": optim.BFloat16Plus(16),
    "BFloat16Plus(8)": optim.BFloat16Plus(8),
    "Float16()": optim.Float16(),
}


def primary(name: str, master: Any) -> Feature:
    """A step with weights that are stored in FP8 alone, and an update that casts them again."""
    recipe, rules = preset(name), [("w", fp8.weights.WeightAxes())]
    tx = optim.with_master_weights(optax.adamw(1e-3), master=master)
    state = {"w": state_of(recipe)}

    def start(state: Any) -> Any:
        exact = {"w": jnp.zeros((K, N))}
        like = fp8.quantize_params(
            exact, recipe, rules=rules, state=state, primary=True, dtype=jnp.bfloat16
        )
        return optim.init_master_weights(tx, exact, weights=like, state=state)

    def step(params: Any, opt_state: Any, state: Any, x: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            return size_of(fp8.dot(x, params["w"], recipe=recipe, state=state["w"]))

        value, grads, state = fp8.value_and_grad(loss)(params, state)
        updates, opt_state = tx.update(grads, opt_state, params, fp8_state=state)
        return optax.apply_updates(params, updates), opt_state, state, value

    given = (*jax.eval_shape(start, state), state, array(M, K))
    return Feature(step, given, donate=(0, 1, 2))


def held(name: str) -> Feature:
    """A forward pass with weights that were quantized before."""
    recipe, rules, state = preset(name), [("w", fp8.weights.WeightAxes())], {"w": array(K, N)}
    weights = jax.eval_shape(
        lambda params: fp8.quantize_params(params, recipe, rules=rules, dtype=jnp.bfloat16), state
    )
    forward = lambda weights, x: fp8.dot(x, weights["w"], recipe=recipe)
    return Feature(forward, (weights, array(M, K)))


def released(tx: Any) -> Feature:
    """A step that updates each layer in the backward pass."""
    recipe, stack = preset("delayed"), optim.release(tx)
    state = {"up": state_of(recipe, L), "down": state_of(recipe, L)}
    params = {"up": array(L, K, N), "down": array(L, N, K)}

    def layer(x: Any, of_layer: Any) -> Any:
        w, state = of_layer
        dot = lambda x, name: fp8.dot(x, w[name], recipe=recipe, state=state[name])
        return x + dot(jax.nn.relu(dot(x, "up")), "down"), None

    def step(layers: Any, state: Any, x: Any) -> Any:
        loss = lambda layers, state: size_of(
            stack.scan(jax.checkpoint(layer), x, (layers, state))[0]
        )
        return fp8.value_and_grad(loss)(layers, state)

    # Shapes do not show that each layer needs a seed of its own, so zeros are packed.
    layers = jax.eval_shape(
        lambda: stack.init(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params))
    )
    return Feature(step, (layers, state, array(M, K)), donate=(0, 1))


def train_state() -> Feature:
    """A step of `fp8.linen.TrainState`, with clipping, short moments and master weights."""
    model = fp8.linen.FP8Dense(N, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optim.adamw(1e-3))
    tx = optim.with_master_weights(adamw, master=optim.BFloat16Plus(8))
    x, collection = array(M, K), fp8.linen.COLLECTION

    def start(x: Any) -> Any:
        variables = model.init(jax.random.key(0), x)
        return fp8.linen.TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx,
            fp8_state=variables[collection],
        )  # fmt: skip

    def step(ts: Any, x: Any) -> Any:
        def loss(params: Any, state: Any) -> Any:
            return size_of(model.apply({"params": params, collection: state}, x))

        value, grads, state = fp8.value_and_grad(loss)(ts.params, ts.fp8_state)
        return ts.apply_gradients(grads=grads, fp8_state=state), value

    return Feature(step, (jax.eval_shape(start, x), x), donate=(0,))


def optimizers() -> Rows:
    rows: Rows = {}
    for words, (mu, nu) in FORMATS.items():
        rows[f"optim: adamw, {words}"] = one(update, optim.adamw(1e-3, mu=mu, nu=nu))
    for words, master in MASTERS.items():
        tx = optim.with_master_weights(optax.adamw(1e-3), master=master)
        rows[f"optim: master weights, {words}"] = one(update, tx, jnp.bfloat16)
    muon = optax.chain(optim.scale_by_muon(), optax.scale(-1e-3))
    rows["optim: scale_by_muon, Int8()"] = one(update, muon)
    lion = optim.with_moment_formats(optax.lion(1e-4), {"mu": optim.Int8()})
    rows["optim: lion with_moment_formats, Int8()"] = one(update, lion)
    mixed = optim.PerParameter([("w", optim.ExpandedFP8())], default=optim.Int8())
    rows["optim: adamw, PerParameter"] = one(update, optim.adamw(1e-3, mu=mixed, nu=mixed))
    fused = optim.fused_adamw(1e-3, moments=optim.Int8())
    rows["optim: fused_adamw, Int8()"] = one(update, fused)
    for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8"):
        rows[f"optim: primary weights, {name}"] = one(primary, name, optim.Float16())
    rows["optim: primary weights, BFloat16Plus(16), current"] = one(
        primary, "current", optim.BFloat16Plus(16)
    )
    rows["optim: quantize_params, rowwise"] = one(held, "rowwise")
    adamw = optim.adamw(1e-3, mu=optim.Int8(), nu=optim.Int8())
    rows["optim: release, delayed"] = one(
        released, optim.with_master_weights(adamw, master=optim.BFloat16Plus(8))
    )
    rows["optim: linen.TrainState, delayed"] = one(train_state)
    return rows
