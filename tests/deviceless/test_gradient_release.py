"""What a step with released layers takes on an H200: no stacked gradients, and no second copy.

A layer is two matrices [2048, 8192]: bfloat16 weights, a remainder of 8 bits, and `Int8` moments.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.optim import BFloat16Plus, Int8, adamw, release, with_master_weights

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]

D, F, TOKENS = 2048, 8192, 4096
LAYER = 2 * D * F  # parameters
ACTIVATIONS = 2 * TOKENS * D  # bytes of x, which the backward pass of a layer starts from
TX = with_master_weights(adamw(1e-3, mu=Int8(), nu=Int8()), master=BFloat16Plus(bits=8))
STACK = release(TX)
# bfloat16 weight, remainder, two moments of one byte and 4 / 128 for their scales.
BYTES = 2 + 1 + 2 * (1 + 4 / 128)


def layer(recipe, x, w):
    if recipe is None:
        dot = jnp.matmul
    else:
        dot = functools.partial(fp8.dot, recipe=recipe, kernels=fp8.Kernels("h200", casts="xla"))
    return x + dot(jax.nn.relu(dot(x, w["up"])), w["down"]), None


def loss_fn(scan, recipe, layers, x):
    y, _ = scan(jax.checkpoint(functools.partial(layer, recipe)), x, layers)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def released_step(recipe, layers, x):
    loss, layers = jax.value_and_grad(functools.partial(loss_fn, STACK.scan, recipe))(layers, x)
    return layers, loss


def plain_step(recipe, state, x):
    params, opt_state = state
    loss, grads = jax.value_and_grad(functools.partial(loss_fn, jax.lax.scan, recipe))(params, x)
    updates, opt_state = jax.vmap(TX.update)(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def start(layers):
    return {
        "up": jnp.zeros((layers, D, F), jnp.bfloat16),
        "down": jnp.zeros((layers, F, D), jnp.bfloat16),
    }


def plain_start(layers):
    return start(layers), jax.vmap(TX.init)(start(layers))


@functools.cache
def compiled(layers, *, is_released=True, recipe=None, gpus=1):
    """The step, with donated state. On several GPUs all arrays are split, see `spec_of`."""
    first = (lambda: STACK.init(start(layers))) if is_released else lambda: plain_start(layers)
    if gpus == 1:
        sharding = SingleDeviceSharding(topology("h200").devices[0])
        sharding_of = lambda x: sharding
    else:
        devices = np.array(topology("h200", f"1x1x{gpus}").devices)
        mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
        sharding_of = lambda x: NamedSharding(mesh, spec_of(x))
    typed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x))
    x = jax.ShapeDtypeStruct((TOKENS, D), jnp.bfloat16)
    arguments = jax.tree.map(typed, (jax.eval_shape(first), x))
    step = functools.partial(released_step if is_released else plain_step, recipe)
    shardings = (jax.tree.map(lambda x: x.sharding, arguments[0]), None) if gpus > 1 else None
    jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings)
    return jitted.lower(*arguments).compile()


def spec_of(x):
    if x.ndim == 2:  # tokens
        return P("data")
    return P(None, "data") if x.ndim == 3 else P()


def total(step):
    """Bytes of arguments, results and temporaries."""
    memory = step.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


RECIPES = {"bfloat16": None, "fp8": fp8.recipes.current()}


def more(**options):
    """Bytes of 16 layers more."""
    return total(compiled(32, **options)) - total(compiled(16, **options))


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_of_one_more_parameter(recipe):
    """Weight, remainder and moments once, and no gradient."""
    a_parameter = (more(recipe=RECIPES[recipe]) - 16 * ACTIVATIONS) / (16 * LAYER)
    print(f"{recipe}: {a_parameter:.3f} bytes a parameter")
    assert a_parameter == pytest.approx(BYTES, abs=0.01)


def test_bytes_of_one_more_parameter_without_release():
    """The control: the gradient takes 2 bytes more at least."""
    a_parameter = more(is_released=False) / (16 * LAYER)
    print(f"without release: {a_parameter:.3f} bytes a parameter")
    assert a_parameter >= BYTES + 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_temporaries(recipe):
    """Activations, and what a single layer takes while it runs and is updated."""
    step = compiled(16, recipe=RECIPES[recipe])
    memory = step.memory_analysis()
    of_a_layer = memory.temp_size_in_bytes - 16 * ACTIVATIONS
    print(f"{recipe}: {memory.temp_size_in_bytes / 2**20:.0f} MiB of temporaries")
    assert of_a_layer < 20 * LAYER  # 16 bf16 gradients would be 32 bytes for each of its parameters
    plain = compiled(16, is_released=False, recipe=RECIPES[recipe]).memory_analysis()
    print(f"{recipe}: {plain.temp_size_in_bytes / 2**20:.0f} MiB without release")
    # Without release there are 16 gradients, and with it one. A sixteenth is for other arrays.
    assert memory.temp_size_in_bytes + 2 * 14 * LAYER < plain.temp_size_in_bytes
    # All arrays of the state are updated in their memory.
    types = jax.eval_shape(lambda: STACK.init(start(16)))
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types))
    assert memory.alias_size_in_bytes >= state


INSTRUCTION = re.compile(r"(%\S+) = \(?(\w+)\[([\d,]*)\]\S* .*?([a-z][a-z-]+)\((%[^)]*)\)")
COPIES = {
    "bitcast", "bitcast-convert", "dynamic-slice", "dynamic-update-slice", "fusion", "tuple",
    "get-tuple-element",
}  # fmt: skip


def operations(text, dtype):
    """The operations that make or read arrays of a dtype."""
    found = INSTRUCTION.findall(text)
    made = {op for _, of, _, op, _ in found if of == dtype}
    names = set(re.findall(rf"(%\S+) = {dtype}\[", text))
    read = {op for *_, op, operands in found if names & set(re.findall(r"%[^\s,]+", operands))}
    return made, read


def test_carriers_are_only_copied():
    """No conversion of a carrier, and no operation on a whole stack but the write of a layer."""
    text = compiled(16).as_text()
    made, read = operations(text, "f8e4m3fn")
    assert {"dynamic-slice", "dynamic-update-slice"} <= made
    assert "bitcast-convert" in read or "bitcast" in read
    assert (made | read) <= COPIES, (made | read) - COPIES
    # Weights are read by matmuls. So this control finds more than copies.
    assert not operations(text, "bf16")[1] <= COPIES
    stacks = {
        op for _, _, shape, op, _ in INSTRUCTION.findall(text)
        if shape in (f"16,{D},{F}", f"16,{F},{D}")
    }  # fmt: skip
    assert stacks <= {"dynamic-update-slice", "fusion", "get-tuple-element", "tuple"}, stacks


def test_fully_sharded():
    """On 8 GPUs a parameter takes an eighth, and the stack of gradients is missing as well."""
    a_parameter = (more(gpus=8) - 2 * ACTIVATIONS) / (2 * LAYER)
    print(f"8 GPUs: {a_parameter:.3f} bytes a parameter")
    assert a_parameter == pytest.approx(BYTES, abs=0.01)
