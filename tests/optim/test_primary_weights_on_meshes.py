"""FP8 primary weights on a mesh: trained as bfloat16 weights are, and restored on another mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.optim import (
    BFloat16Plus,
    Float32,
    init_master_weights,
    master_weights,
    with_master_weights,
)
from jaxfp8.sharding import Shard
from jaxfp8.weights import QuantizedWeight, WeightAxes

pytestmark = pytest.mark.usefixtures("standard_promotion")

K, N, TOKENS = 512, 128, 512
AXES = WeightAxes(shard=Shard(0, "fsdp"))
TX = with_master_weights(optax.sgd(2.0**-4, momentum=0.5), master=Float32())
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
}
KINDS = ["auto", "explicit", "manual"]


def mesh_of(kind, size=4):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh((size,), ("fsdp",), axis_types=(axis_type,))


def exact():
    return {
        "w": np.float32(0.1 * np.random.default_rng(0).normal(size=(K, N))),
        "b": np.full(N, 0.01, np.float32),
    }


def start(recipe, state, params, primary):
    """Weights, in bfloat16 or FP8, and the optimizer state."""
    if not primary:
        return init_master_weights(TX, params)
    like = fp8.quantize_params(
        params, recipe, rules=[("w", AXES)], state=state, primary=True, dtype=jnp.bfloat16
    ) | {"b": jax.ShapeDtypeStruct((N,), jnp.bfloat16)}
    return init_master_weights(TX, params, weights=like, state=state)


def specs_of(tree):
    """How each array is split: a weight [K, N] by rows, with its scales; others are whole."""

    def one(node):
        if isinstance(node, QuantizedWeight):
            return node.specs(P("fsdp"))
        return P("fsdp") if jnp.shape(node) == (K, N) else P()

    return jax.tree.map(one, tree, is_leaf=lambda n: isinstance(n, QuantizedWeight))


def put(tree, mesh):
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs_of(tree)
    )


@functools.cache
def train(kind, name, primary, steps=3):
    """Losses, weights, optimizer state and quantizer state after some steps on 4 devices."""
    recipe = RECIPES[name]

    def loss_fn(params, state, x):
        y = fp8.dot(
            x, params["w"], recipe=recipe, state=state["w"] if recipe.rows else None,
            w_shard=AXES.shard, out_sharding=P("fsdp") if kind == "explicit" else None,
        )  # fmt: skip
        loss = jnp.sum(jnp.tanh(y + params["b"]).astype(jnp.float32) ** 2)
        return jax.lax.psum(loss, "fsdp") if kind == "manual" else loss

    def step(params, opt_state, state, x):
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, x)
        grads = jax.tree.map(lambda g: g * jnp.asarray(2.0**-8, g.dtype), grads)
        updates, opt_state = TX.update(grads, opt_state, params, fp8_state=state)
        return optax.apply_updates(params, updates), opt_state, state, loss

    state = {"w": fp8.init_state(recipe)} if recipe.rows else ()
    begin = jax.jit(lambda params, state: start(recipe, state, params, primary))
    run = *begin(exact(), state), state  # on one device
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        if kind == "manual":
            specs = specs_of(run)
            step = jax.shard_map(
                step, mesh=mesh, in_specs=(*specs, P("fsdp")), out_specs=(*specs, P())
            )
        step, run, losses = jax.jit(step), put(run, mesh), []
        for i in range(steps):
            x = np.random.default_rng(i + 1).normal(size=(TOKENS, K)).astype(jnp.bfloat16)
            *run, loss = step(*run, jax.device_put(x, NamedSharding(mesh, P("fsdp"))))
            losses.append(loss)
    return losses, *run


DEFAULT = {("auto", "delayed"), ("explicit", "blockwise"), ("manual", "delayed")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in DEFAULT else pytest.mark.slow)
        for name in RECIPES
        for kind in KINDS
    ],
)
def test_trained_as_bfloat16_weights_that_are_cast_at_each_step(kind, name):
    losses, narrow, narrow_opt, narrow_state = train(kind, name, primary=True)
    wide_losses, wide, wide_opt, wide_state = train(kind, name, primary=False)
    assert_same_bits((losses, narrow_state, narrow["b"]), (wide_losses, wide_state, wide["b"]))
    masters = jax.jit(master_weights)
    assert_same_bits(masters(narrow_opt, narrow), masters(wide_opt, wide))
    assert isinstance(narrow["w"], QuantizedWeight)
    assert narrow["w"].values[0].sharding.spec[0] == "fsdp"


@pytest.mark.parametrize(
    ("kind", "size"),
    [("auto", 8), ("explicit", 2), pytest.param("auto", 1, marks=pytest.mark.slow)],
)
def test_restored_on_another_mesh(kind, size, tmp_path):
    run = train("auto", "delayed", primary=True)[1:]
    mesh = mesh_of(kind, size)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", list(run))
        checkpointer.wait_until_finished()
        types = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            list(run), specs_of(list(run)),
        )  # fmt: skip
        restored = checkpointer.restore(tmp_path / "run", types)
    assert jax.tree.structure(restored) == jax.tree.structure(list(run))
    assert restored[0]["w"].values[0].sharding.mesh.shape == {"fsdp": size}
    assert_same_bits(jax.device_get(restored), jax.device_get(list(run)))

    def update(params, opt_state, state):
        grads = {"w": np.ones((K, N), jnp.bfloat16), "b": np.ones(N, jnp.bfloat16)}
        updates, opt_state = TX.update(grads, opt_state, params, fp8_state=state)
        return optax.apply_updates(params, updates), opt_state

    with jax.set_mesh(mesh):
        continued = jax.jit(update)(*restored)
    assert_same_bits(jax.device_get(continued), jax.device_get(jax.jit(update)(*run)))


@pytest.mark.parametrize("master", [Float32(), BFloat16Plus(bits=16)], ids=["32", "16 + 16"])
def test_a_bfloat16_checkpoint_goes_in_and_out(master):
    """Bit for bit. Out come the master weights, not the FP8 values."""
    recipe, rules = RECIPES["blockwise"], [("w", WeightAxes())]
    saved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact())
    tx = with_master_weights(optax.sgd(0.1), master=master)
    cast = functools.partial(fp8.quantize_params, recipe=recipe, rules=rules, primary=True)
    like = jax.jit(cast)(saved)
    params, opt_state = jax.jit(lambda p, like: init_master_weights(tx, p, weights=like))(
        saved, like
    )
    assert_same_bits(params, like)
    out = jax.tree.map(
        lambda x: np.asarray(x).astype(jnp.bfloat16), master_weights(opt_state, params)
    )
    assert_same_bits(out, saved)
