"""The train steps that `programs.py` compiles, and the compilation of one of them, with its costs.

A process measures one step. So no step finds what jax and XLA keep from another one.
"""

import functools
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))

import flax.linen as nn
import jax
import jax.numpy as jnp
import llama
import optax
from _bytes import moved
from program import Program
from targets import topology

import jaxfp8 as fp8

FSDP, TENSOR = 2, 4  # of Llama: 8 GPUs


class Sizes(NamedTuple):
    """What makes a step: the chip or "cpu", and sizes. Llama has sizes of its own.

    `keep` and `manual` are of Llama only: the remat policy, and whether it is inside `shard_map`.
    """

    model: str
    target: str
    blocks: int
    scanned: bool
    features: int
    tokens: int
    keep: str
    manual: bool


KEEP = {"products": llama.KEEP_PRODUCTS, "residuals": llama.KEEP_RESIDUALS}


class Block(nn.Module):
    """One block of an MLP, as the body of `nn.scan`. No recipe: `nn.Dense`."""

    recipe: fp8.Recipe | None

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        def dense(features: int) -> nn.Module:
            if self.recipe is None:
                return nn.Dense(features, dtype=jnp.bfloat16)
            return fp8.linen.FP8Dense(features, dtype=jnp.bfloat16, recipe=self.recipe)

        features = x.shape[-1]
        return x + dense(features)(nn.gelu(dense(4 * features)(x))), None


class Stack(nn.Module):
    """Blocks, each with its own weights and states, in a loop or one after the other."""

    recipe: fp8.Recipe | None
    blocks: int
    scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            stack = nn.scan(
                Block,
                variable_axes={"params": 0, fp8.linen.COLLECTION: 0},
                split_rngs={"params": True},
                length=self.blocks,
            )
            return stack(self.recipe)(x, None)[0]
        for _ in range(self.blocks):
            x, _ = Block(self.recipe)(x)
        return x


def mlp(
    recipe: fp8.Recipe | None, sizes: Sizes, settled: bool
) -> functools.partial[jax.stages.Traced]:
    """A call that traces a step of AdamW. Without a recipe it is a step of flax alone."""
    model, optimizer = Stack(recipe, sizes.blocks, sizes.scanned), optax.adamw(1e-3)

    def loss_fn(params: Any, state: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        y: Any = model.apply({"params": params, **state}, x)
        return jnp.mean((y - target).astype(jnp.float32) ** 2)

    def step(params: Any, state: Any, moments: Any, *batch: jax.Array) -> Any:
        if recipe is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, state, *batch)
        else:
            loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, *batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments, loss

    x = jax.ShapeDtypeStruct((sizes.tokens, sizes.features), jnp.bfloat16)
    state = dict(jax.eval_shape(model.init, jax.random.key(0), x))
    params = state.pop("params")
    if settled:
        state = {name: fp8.settle(of) for name, of in state.items()}
    arguments = (params, state, jax.eval_shape(optimizer.init, params), x, x)
    arguments = placed(arguments, sizes.target)
    return functools.partial(jax.jit(step, donate_argnums=(0, 1, 2)).trace, *arguments)


def placed(arguments: Any, target: str) -> Any:
    """The types, on a device of the target."""
    if target == "cpu":
        return arguments
    device = jax.sharding.SingleDeviceSharding(topology(target).devices[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), arguments
    )


def options_of(recipe: fp8.Recipe, target: str) -> dict[str, Any]:
    """XLA's options for a recipe."""
    return {} if target == "cpu" else dict(fp8.Kernels(target).compiler_options(recipe))


def measure(name: str, sizes: Sizes) -> dict[str, Any]:
    """CPU seconds of tracing, lowering and compiling a step, and what its program has."""
    settled = name != "unsettled"
    recipe = llama.RECIPES[name if settled else "delayed"]
    step: functools.partial[jax.stages.Traced]
    if sizes.model == "llama":  # bf16 has a recipe here, for the gathers of its weights
        step = functools.partial(
            llama.traced_step, recipe, FSDP, TENSOR, sizes.blocks,
            settled=settled, remat=KEEP[sizes.keep], manual=sizes.manual,
        )  # fmt: skip
        options = options_of(recipe, sizes.target)
    elif name == "bf16":  # with cuBLASLt for its matmuls, as per-tensor recipes have
        step, options = mlp(None, sizes, settled), options_of(fp8.recipes.current(), sizes.target)
    else:
        step, options = mlp(recipe, sizes, settled), options_of(recipe, sizes.target)

    # What jax and XLA do once in a process is not counted.
    one = placed(jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), sizes.target)
    jax.jit(lambda x: jnp.tanh(x @ x)).lower(one).compile(options)

    times = [time.process_time()]
    traced = step()
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile(options)
    times.append(time.process_time())
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return {
        **dict(zip(("trace_seconds", "lower_seconds", "compile_seconds"), seconds, strict=True)),
        "total_seconds": times[-1] - times[0],
        **counts(Program(compiled.as_text()), on_gpu=sizes.target != "cpu"),
    }


def counts(program: Program, *, on_gpu: bool) -> dict[str, int | None]:
    """Instructions of all computations, kernels that a step starts, and bytes that they move."""
    return {
        "instructions": sum(map(len, program.computations.values())),
        "kernels": program.launches(program.entry),
        "bytes": moved(program, program.entry) if on_gpu else None,
    }
