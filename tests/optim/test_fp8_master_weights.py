"""Master weights of weights in FP8: trained as bfloat16 weights that are cast at each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import ADAMW, KINDS, bytes_of, params32, quantized
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.ops._quantize_params import _quantize_weight
from jaxfp8.optim import (
    Float32,
    init_master_weights,
    master_weights,
    with_master_weights,
)
from jaxfp8.weights import QuantizedWeight, WeightAxes

pytestmark = pytest.mark.usefixtures("standard_promotion")

RECIPES = {
    "current": fp8.recipes.current(),
    "delayed": fp8.recipes.delayed(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
}


# A state, tiles, and a copy for each direction.
DEFAULT = {("bfloat16 + 8", recipe) for recipe in ("delayed", "blockwise", "mxfp8")}


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(
            kind,
            recipe,
            id=f"{kind}-{recipe}",
            marks=() if (kind, recipe) in DEFAULT else pytest.mark.slow,
        )
        for kind in KINDS
        for recipe in RECIPES
    ],
)
def test_fp8_weights_train_as_bfloat16_weights_do(kind, recipe):
    """Bit for bit as bfloat16 weights that are cast at each step, from the same master weights."""
    recipe = RECIPES[recipe]
    tx = with_master_weights(ADAMW, master=KINDS[kind])
    exact = {"w": 4 * params32()["dense"]["kernel"], "b": params32()["dense"]["bias"]}
    state = {"w": fp8.init_state(recipe)} if recipe.rows else ()

    def loss_fn(params, state, x):
        y = fp8.dot(x, params["w"], recipe=recipe, state=state["w"] if recipe.rows else None)
        return jnp.mean(jnp.tanh(y + params["b"]) ** 2)

    @jax.jit
    def step(params, opt_state, state, x):
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, x)
        updates, opt_state = tx.update(grads, opt_state, params, fp8_state=state)
        return optax.apply_updates(params, updates), opt_state, state, loss

    cast = jax.jit(lambda w, state: quantized(w, recipe, state["w"] if recipe.rows else None))
    wide, wide_opt = jax.jit(lambda p: init_master_weights(tx, p))(exact)
    like = {"w": cast(wide["w"], state), "b": wide["b"]}
    narrow, narrow_opt = jax.jit(
        lambda p, like, state: init_master_weights(tx, p, weights=like, state=state)
    )(exact, like, state)
    assert isinstance(narrow["w"], QuantizedWeight)
    wide_state = narrow_state = state
    for i in range(4):
        x = np.random.default_rng(i).normal(size=(32, 16)).astype(jnp.bfloat16)
        wide, wide_opt, wide_state, wide_loss = step(wide, wide_opt, wide_state, x)
        narrow, narrow_opt, narrow_state, narrow_loss = step(narrow, narrow_opt, narrow_state, x)
        assert_same_bits((narrow_loss, narrow_state), (wide_loss, wide_state))
        assert_same_bits(narrow, {"w": cast(wide["w"], wide_state), "b": wide["b"]})
    masters = jax.jit(master_weights)
    assert_same_bits(masters(narrow_opt, narrow), masters(wide_opt, wide))


def test_bytes_of_fp8_weights():
    """One byte a value and scales; two where two directions need two copies."""
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def nbytes(recipe):
        cast = lambda w: quantized(w, recipe, fp8.init_state(recipe) or None)
        weight = jax.eval_shape(cast, w)
        # `nbytes` is of arrays, which nothing has to compute.
        arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), weight)
        if recipe is RECIPES["blockwise"]:
            assert bytes_of(weight) == arrays.nbytes  # no other array
        return arrays.nbytes

    sizes = {name: nbytes(recipe) / w.size for name, recipe in RECIPES.items()}
    assert sizes["blockwise"] == 1 + 4 / 128**2
    assert sizes["current"] == sizes["delayed"] == 1 + 4 / w.size
    assert sizes["mxfp8"] == 2 * (1 + 1 / 32)
    assert sizes["rowwise"] == 2 * (1 + 4 / 256)


@jax.jit
def state_of_amax(amax):
    """A state of delayed scaling whose scales belong to an amax."""
    seen = fp8.nothing_seen(fp8.init_state(RECIPES["delayed"]))
    seen = jax.tree.map(lambda a: jnp.full_like(a, amax), seen)
    return fp8.commit(fp8.init_state(RECIPES["delayed"]), seen)


@pytest.mark.parametrize(
    "wrapped",
    {
        "alone": lambda tx: tx,
        "chain": lambda tx: optax.chain(optax.identity(), tx),
        "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    }.items(),
    ids=lambda item: item[0],
)
def test_fp8_state_reaches_the_cast_through_optax(wrapped):
    recipe, w = RECIPES["delayed"], np.full((4, 4), 3.0, np.float32)
    tx = wrapped[1](with_master_weights(optax.sgd(0.5), master=Float32()))
    like = {"w": jax.eval_shape(lambda w: quantized(w, recipe, state_of_amax(7.0)), w)}
    start = jax.jit(
        lambda params, state: init_master_weights(tx, params, weights=like, state=state)
    )
    params, opt_state = start({"w": w}, {"w": state_of_amax(7.0)})
    assert float(params["w"].scales[0]) == 7.0 / 448
    grads, new = {"w": np.ones((4, 4), np.float32)}, {"w": state_of_amax(14.0)}

    @jax.jit
    def step(grads, opt_state, params, new):
        updates, _ = tx.update(grads, opt_state, params, fp8_state=new)
        return optax.apply_updates(params, updates)

    params = step(grads, opt_state, params, new)
    assert float(params["w"].scales[0]) == 14.0 / 448
    assert float(params["w"].values[0][0, 0]) == 80.0  # 2.5 * 448 / 14


def test_train_state_of_linen_passes_its_state_on():
    recipe = RECIPES["delayed"]
    layer = fp8.linen.FP8Dense(8, use_bias=False, recipe=recipe, dtype=jnp.bfloat16)
    variables = jax.jit(layer.init)(jax.random.key(0), np.ones((4, 16), np.float32))
    exact, state = variables["params"], variables[fp8.linen.COLLECTION]
    tx = with_master_weights(optax.sgd(0.5), master=Float32())

    @jax.jit
    def start(exact, state):
        like = fp8.quantize_params(exact, recipe, state=state, primary=True, dtype=jnp.bfloat16)
        return init_master_weights(tx, exact, weights=like, state=state)

    params, opt_state = start(exact, state)
    ts = fp8.linen.TrainState(
        step=0, apply_fn=layer.apply, params=params, tx=tx, opt_state=opt_state, fp8_state=state
    )
    new = jax.tree.map(lambda _: state_of_amax(14.0), state, is_leaf=lambda n: hasattr(n, "rows"))
    grads = {"kernel": np.zeros((16, 8), np.float32)}
    after = jax.jit(lambda ts, g, s: ts.apply_gradients(grads=g, fp8_state=s))(ts, grads, new)
    assert float(after.params["kernel"].scales[0]) == 14.0 / 448
    assert after.tx is tx


def test_no_master_weight_starts_at_fp8_values():
    tx = with_master_weights(optax.sgd(0.5), master=Float32())
    with pytest.raises(ValueError, match="init_master_weights"):
        jax.eval_shape(lambda w: tx.init({"w": quantized(w)}), np.ones((4, 4), np.float32))


def test_fp8_weights_of_float32_are_refused():
    tx = with_master_weights(optax.sgd(0.5), master=Float32())
    w = np.ones((4, 4), np.float32)
    weight = jax.eval_shape(
        lambda w: _quantize_weight(w, RECIPES["current"], WeightAxes(), primary=True), w
    )
    with pytest.raises(ValueError, match=r"dtype=jnp\.bfloat16"):
        jax.eval_shape(
            lambda w, weight: init_master_weights(tx, {"w": w}, weights={"w": weight}), w, weight
        )
