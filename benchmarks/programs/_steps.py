"""The train steps that `programs.py` compiles, and the compilation of one of them, with its costs.

A process measures one step. So no step finds what jax and XLA keep from another one.
"""

import collections
import contextlib
import functools
import itertools
import os
import re
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
import numpy as np
import optax
import transformer
from _bytes import moved
from fusions import fusions_of
from program import Program, size_of
from targets import state_of, topology

import jaxfp8 as fp8

FSDP, TENSOR = 2, 4  # of Llama: 8 GPUs
KERNELS = "+kernels"  # ends the name of a recipe whose matmuls get kernels=
SMALL = 2**16  # bytes: a kernel that writes less does bookkeeping, or norms


class Sizes(NamedTuple):
    """What makes a step: the chip or "cpu", and sizes. Llama has sizes of its own.

    `keep` and `manual` are of Llama only: the remat policy, and whether it is inside `shard_map`.
    `options` are more options of the compiler, "name=value".
    """

    model: str
    target: str
    blocks: int
    scanned: bool
    features: int
    tokens: int
    keep: str
    manual: bool
    options: tuple[str, ...] = ()


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


def train_step(
    loss_fn: Any, params: Any, state: Any, batch: tuple[Any, ...], target: str,
    *, in_fp8: bool = True,
) -> functools.partial[jax.stages.Traced]:  # fmt: skip
    """A call that traces a step of AdamW. Arguments are types."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, moments: Any, *batch: jax.Array) -> Any:
        if in_fp8:
            loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, *batch)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params, state, *batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments, loss

    arguments = (params, state, jax.eval_shape(optimizer.init, params), *batch)
    arguments = placed(arguments, target)
    return functools.partial(jax.jit(step, donate_argnums=(0, 1, 2)).trace, *arguments)


def blocks(
    recipe: fp8.Recipe, sizes: Sizes, settled: bool, kernels: fp8.Kernels | None
) -> functools.partial[jax.stages.Traced]:
    """Blocks of Llama 3 8B, one after the other, with cuDNN's attention."""
    own = state_of(recipe, settled=settled)
    weights = {name: shape for name, (shape, _) in transformer.WEIGHTS.items()}
    weights |= dict.fromkeys(transformer.NORMS, (transformer.D,))
    one = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in weights.items()}

    def loss_fn(params: Any, state: Any, h: jax.Array) -> jax.Array:
        for of_block, states in zip(params, state, strict=True):
            h = transformer.block(recipe, h, of_block, states, kernels=kernels)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    h = jax.ShapeDtypeStruct((transformer.B, transformer.T, transformer.D), jnp.bfloat16)
    params, state = ([of] * sizes.blocks for of in (one, dict.fromkeys(transformer.WEIGHTS, own)))
    return train_step(loss_fn, params, state, (h,), sizes.target)


def mlp(
    recipe: fp8.Recipe | None, sizes: Sizes, settled: bool
) -> functools.partial[jax.stages.Traced]:
    """The blocks of `Block`. Without a recipe it is a step of flax alone."""
    model = Stack(recipe, sizes.blocks, sizes.scanned)

    def loss_fn(params: Any, state: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        y: Any = model.apply({"params": params, **state}, x)
        return jnp.mean((y - target).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((sizes.tokens, sizes.features), jnp.bfloat16)
    state = dict(jax.eval_shape(model.init, jax.random.key(0), x))
    params = state.pop("params")
    if settled:
        state = {name: fp8.settle(of) for name, of in state.items()}
    return train_step(loss_fn, params, state, (x, x), sizes.target, in_fp8=recipe is not None)


def placed(arguments: Any, target: str) -> Any:
    """The types, on a device of the target."""
    if target == "cpu":
        return arguments
    device = jax.sharding.SingleDeviceSharding(topology(target).devices[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), arguments
    )


def mesh_of(target: str) -> jax.sharding.Mesh:
    """A mesh of one device of the target."""
    return jax.sharding.Mesh(np.array(topology(target).devices[:1]), ("device",))


def options_of(recipe: fp8.Recipe, target: str) -> dict[str, Any]:
    """XLA's options for a recipe."""
    return {} if target == "cpu" else dict(fp8.Kernels(target).compiler_options(recipe))


def measure(name: str, sizes: Sizes) -> dict[str, Any]:
    """CPU seconds of tracing, lowering and compiling a step, and what its program has."""
    kernels = fp8.Kernels(sizes.target) if name.endswith(KERNELS) else None
    name = name.removesuffix(KERNELS)
    settled = name != "unsettled"
    recipe = llama.RECIPES[name if settled else "delayed"]
    step: functools.partial[jax.stages.Traced]
    if sizes.model == "llama":  # bf16 has a recipe here, for the gathers of its weights
        step = functools.partial(
            llama.traced_step, recipe, FSDP, TENSOR, sizes.blocks,
            settled=settled, remat=KEEP[sizes.keep], manual=sizes.manual,
        )  # fmt: skip
        options = options_of(recipe, sizes.target)
    elif sizes.model == "blocks":
        step = blocks(recipe, sizes, settled, kernels)
        like = fp8.recipes.current() if name == "bf16" else recipe
        options = options_of(like, sizes.target)
    elif name == "bf16":  # with cuBLASLt for its matmuls, as per-tensor recipes have
        step, options = mlp(None, sizes, settled), options_of(fp8.recipes.current(), sizes.target)
    else:
        step, options = mlp(recipe, sizes, settled), options_of(recipe, sizes.target)

    words = {"true": True, "false": False}
    for option in sizes.options:
        key, value = option.split("=", 1)
        options[key] = words.get(value, value)

    # What jax and XLA do once in a process is not counted.
    one = placed(jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), sizes.target)
    jax.jit(lambda x: jnp.tanh(x @ x)).lower(one).compile(options)

    # Pallas reads the kind of device from the mesh that is set.
    with jax.set_mesh(mesh_of(sizes.target)) if kernels else contextlib.nullcontext():
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
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        **counts(Program(compiled.as_text()), on_gpu=sizes.target != "cpu"),
    }


def counts(program: Program, *, on_gpu: bool) -> dict[str, Any]:
    """Instructions of all computations, kernels that a step starts, and bytes that they move.

    Of a GPU also the kernels that write less than `SMALL`, by kind and type.
    """
    small: collections.Counter[str] = collections.Counter()
    for _, instruction, times in program.runs(program.entry):
        waits = instruction.op.endswith("-done")
        if instruction.is_kernel and not waits and size_of(instruction.type) < SMALL:
            kind = re.sub(r"[.\d]+$", "", instruction.name)
            small[f"{kind} {re.sub(r'{[^}]*}', '', instruction.type)}"] += times
    return {
        "instructions": sum(map(len, program.computations.values())),
        "kernels": program.launches(program.entry),
        "small": small.total() if on_gpu else None,
        "bytes": moved(program, program.entry) if on_gpu else None,
        "small_kernels": dict(small.most_common()) if on_gpu else {},
        **(fusions_of(program)._asdict() if on_gpu else {}),
    }
