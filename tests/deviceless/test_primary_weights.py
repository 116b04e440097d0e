"""A train step with FP8 primary weights on 8 H200: what travels, and what is in memory.

Compiled, not run. Master weights are sharded. Weights are sharded, too (ZeRO-3, FSDP), or whole on
each device (ZeRO-1).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.optim import Float32, init_master_weights, with_master_weights
from jaxfp8.programs import wire_report
from jaxfp8.sharding import Shard
from jaxfp8.weights import QuantizedWeight, WeightAxes

pytestmark = [pytest.mark.deviceless, needs_mosaic]

D, TOKENS, NAMES = 4096, 4096, ("w0", "w1", "w2")
FSDP = Shard(0, "fsdp")
RULES = [("w.", WeightAxes(shard=FSDP))]
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
}


@functools.cache
def compiled(name, sharded, primary=True):
    """A step of SGD with momentum, with FP8 weights, or bfloat16 weights that it casts."""
    recipe = RECIPES[name]
    mesh = Mesh(np.array(topology("h200", "1x1x8").devices), ("fsdp",), axis_types=(AxisType.Auto,))
    tx = with_master_weights(optax.sgd(0.1, momentum=0.9), master=Float32())
    shard = FSDP if sharded else None

    def start():
        exact = {name: jnp.ones((D, D)) for name in NAMES}
        state = {name: fp8.init_state(recipe) for name in NAMES} if recipe.rows else ()
        if not primary:
            return *init_master_weights(tx, exact), state
        like = fp8.quantize_params(
            exact, recipe, rules=RULES, primary=True, dtype=jnp.bfloat16, state=state
        )
        return *init_master_weights(tx, exact, weights=like, state=state), state

    def loss_fn(params, state, x):
        for name in NAMES:
            own = state[name] if recipe.rows else None
            x = jnp.tanh(fp8.dot(x, params[name], recipe=recipe, state=own, w_shard=shard))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, opt_state, state, x):
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, x)
        updates, opt_state = tx.update(grads, opt_state, params, fp8_state=state)
        return optax.apply_updates(params, updates), opt_state, state, loss

    def there(tree, spec):
        """Arrays that are weights [D, D] lie as `spec` says, others on all devices."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=NamedSharding(mesh, spec if a.shape == (D, D) else P())
            ),
            tree,
        )

    def weight_there(node):
        spec = P("fsdp") if sharded else P()
        if not isinstance(node, QuantizedWeight):
            return there(node, spec)
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)),
            node,
            node.specs(spec),
        )

    with jax.set_mesh(mesh):
        params, opt_state, state = jax.eval_shape(start)
        params = jax.tree.map(
            weight_there, params, is_leaf=lambda node: isinstance(node, QuantizedWeight)
        )
        opt_state, state = there(opt_state, P("fsdp")), there(state, P())
        x = jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
        out = jax.tree.map(lambda a: a.sharding, (params, opt_state, state))
        step = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=(*out, None))
        lowered = step.lower(params, opt_state, state, x)
        return lowered.compile(compiler_options=fp8.Kernels("h200").compiler_options(recipe))


ROWS = [
    pytest.param(
        name,
        sharded,
        id=f"{name}-{'sharded' if sharded else 'whole'}",
        marks=()
        if (name, sharded) in {("current", False), ("blockwise", True)}
        else pytest.mark.slow,
    )
    for name in RECIPES
    for sharded in (True, False)
]


@pytest.mark.parametrize(("name", "sharded"), ROWS)
def test_gathers_of_weights_are_fp8(name, sharded):
    """Also that after the update, with which ZeRO-1 makes its weights whole."""
    gathers = [
        t for t in wire_report(compiled(name, sharded)).only(kind="all-gather").transfers
        if sorted(t.shape)[-2:] == [D // 8, D]
    ]  # fmt: skip
    assert len(gathers) >= len(NAMES)
    assert {np.dtype(t.dtype).itemsize for t in gathers} == {1}, gathers


def maxima_of_updates(text):
    """The all-reduces of amaxes outside of the forward and backward pass."""
    lines = [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    return [line for line in lines if "reduce_max" in line and "jvp" not in line]


def test_amaxes_of_all_shards_travel_together():
    """Current scaling needs the amax of each new weight. One all-reduce brings all three."""
    (line,) = maxima_of_updates(compiled("current", False).as_text())
    assert line.count("bf16[]") == len(NAMES)


def wide_arrays(text):
    """What computes an array of 16 or 32 bits of the size of a weight or its shard."""
    entry = text[text.index("ENTRY ") :]
    shapes = rf"(bf16|f32)\[({D},{D}|{D // 8},{D})\]"
    lines = re.findall(rf"= {shapes}\S* (\S+?)\(", entry)
    return [opcode for *_, opcode in lines if opcode in ("fusion", "broadcast", "convert", "copy")]


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
def test_the_handle_of_the_gradient_takes_no_memory(name):
    """With FP8 weights a step writes no array that it does not write with bfloat16 weights."""
    narrow, wide = (compiled(name, True, primary) for primary in (True, False))
    assert len(wide_arrays(narrow.as_text())) <= len(wide_arrays(wide.as_text()))
    weights = len(NAMES) * D * D // 8  # on one device
    arguments = [each.memory_analysis().argument_size_in_bytes for each in (narrow, wide)]
    assert arguments[0] == pytest.approx(arguments[1] - weights, abs=4096)
