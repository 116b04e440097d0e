"""Train a small GPT in FP8 on a mesh.

The mesh has axes for data parallelism, fully sharded data parallelism and tensor parallelism.

    python examples/train_sharded.py               # eight CPU devices, unless there are GPUs
    python examples/train_sharded.py --mesh fsdp=8 --recipe mxfp8
    python examples/train_sharded.py --compare     # the same run on one device as well

FP8 adds one argument to each layer of a sharded train step. `w_shard=` names the axis that splits
the layer's weights. Each device quantizes its shard of the weights, and then the shards are
gathered in FP8.

Letters in shapes: B windows of a batch, T tokens of a window, D width, H heads.
"""

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import Parser, add_recipe, at_least_one, check_file, recipe_of, run_script
from devices import force_cpu_devices, make_mesh, one_device
from gpt_text import load_text
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense

AXES = ("data", "fsdp", "tensor")
ROLES = fp8.sharding.MeshRoles(data="data", fsdp="fsdp", tensor="tensor")
# Both axes split the batch. `fsdp` also splits parameters and optimizer state.
BATCH_AXES = ("data", "fsdp")
LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 2, 256, 8, 256, 64
BF16 = jnp.bfloat16
warmup = optax.linear_schedule(1e-4, 1e-3, 10)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warmup, b2=0.98, weight_decay=0.1))


# -------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    """Attention and MLP.

    `tensor` splits the columns of qkv and fc1, and the rows of out and fc2. `fsdp` splits the other
    axis of each weight.
    """

    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x):
        def dense(features, name, *axes):
            kernel_init = nn.with_partitioning(
                nn.linear.default_kernel_init, tuple(ROLES.spec(*axes))
            )
            gathered = ROLES.shard(axes.index("fsdp"), "fsdp")
            options = {
                "use_bias": False,
                "dtype": BF16,
                "kernel_init": kernel_init,
                "w_shard": gathered,
            }
            return FP8Dense(features, recipe=self.recipe, name=name, **options)

        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=BF16)
        tokens, split = ROLES.spec(BATCH_AXES, None, None), ROLES.spec(BATCH_AXES, None, "tensor")
        qkv = with_sharding_constraint(dense(3 * WIDTH, "qkv", "fsdp", "tensor")(norm()(x)), split)
        # q, k and v of one head are neighbours in the columns. So `tensor` splits between heads,
        # and never inside one.
        qkv = qkv.reshape(*x.shape[:2], HEADS, -1)
        y = jax.nn.dot_product_attention(*jnp.split(qkv, 3, axis=-1), is_causal=True).reshape(
            x.shape
        )
        x = with_sharding_constraint(x + dense(WIDTH, "out", "tensor", "fsdp")(y), tokens)
        y = with_sharding_constraint(dense(4 * WIDTH, "fc1", "fsdp", "tensor")(norm()(x)), split)
        return with_sharding_constraint(
            x + dense(WIDTH, "fc2", "tensor", "fsdp")(nn.gelu(y)), tokens
        )


class GPT(nn.Module):
    """Tokens [B, T] -> logits f32[B, T, 256].

    Embeddings and head are small here, so they are in bf16 and replicated on all devices.
    """

    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=BF16)
        x = embed(VOCABULARY, name="token")(tokens) + embed(CONTEXT, name="position")(
            jnp.arange(CONTEXT)[None]
        )
        for i in range(LAYERS):
            x = Block(self.recipe, name=f"block{i}")(x)
        x = nn.LayerNorm(use_bias=False, dtype=BF16)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=BF16, name="head")(x).astype(jnp.float32)


# ----------------------------------------------------------------------------------------- training
def init(model: GPT) -> tuple[Any, Any, Any]:
    """Parameters, quantizer state and optimizer state, sharded over the devices.

    Call it under `jax.set_mesh`.
    """

    def create():
        variables = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
        return variables["params"], variables.get(COLLECTION, {}), tx.init(variables["params"])

    # An array without names of axes has the spec P(), so scales are replicated.
    specs = nn.get_partition_spec(jax.eval_shape(create))
    return jax.jit(lambda: nn.unbox(create()), out_shardings=specs)()


def train_step(model: GPT) -> Callable[..., Any]:
    """Make the train step. Its code does not mention the mesh."""

    def loss_fn(params, state, windows):
        tokens = windows.astype(jnp.int32)
        logits = model.apply({"params": params, COLLECTION: state}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, opt_state, windows):
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    return step


def sample(
    text: np.ndarray, rng: np.random.Generator, shape: tuple[int, ...], rows: Any = ...
) -> np.ndarray:
    """Windows of text at random places, uint8[*shape, T + 1].

    All places are drawn, but only those of `rows` are read.
    """
    return text[
        rng.integers(0, len(text) - CONTEXT, shape)[rows][..., None] + np.arange(CONTEXT + 1)
    ]


def batches(mesh: Mesh, text: np.ndarray, batch: int, steps: int) -> Iterator[jax.Array]:
    """Windows uint8[B, T + 1] for each step, split over the devices."""
    rng, sharding = np.random.default_rng(0), NamedSharding(mesh, ROLES.spec(BATCH_AXES))
    return (jax.device_put(sample(text, rng, (batch,)), sharding) for _ in range(steps))


def train(
    mesh: Mesh,
    recipe: fp8.Recipe,
    batches: Iterable[jax.Array],
    show: Callable[[int, float], None] | None = None,
) -> tuple[list[float], jax.stages.Compiled]:
    """Train, and return the loss of each batch and the compiled train step.

    After each step `show(step, loss)` is called.
    """
    model, losses, compiled = GPT(recipe), [], None
    with jax.set_mesh(mesh):
        carry = init(model)
        for windows in batches:
            compiled = compiled or train_step(model).lower(*carry, windows).compile()
            *carry, loss = compiled(*carry, windows)
            losses.append(float(loss))
            if show:
                show(len(losses) - 1, losses[-1])
    return losses, compiled


# ------------------------------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mesh", default="data=2,fsdp=2,tensor=2", help="sizes of its axes (default: %(default)s)")
    add_recipe(parser)
    add(
        "--batch",
        type=int,
        default=16,
        help="windows of a step on all devices together (default: %(default)s)",
    )
    add("--steps", type=int, default=20, help="(default: %(default)s)")
    add("--json", metavar="FILE", help="where to write the losses")


def check(given: argparse.Namespace) -> tuple[Mesh, fp8.Recipe]:
    """The mesh and the recipe of the arguments.

    Raises:
      ValueError: for a mistake in the arguments. The message has its name, its value and the cure.
    """
    recipe, mesh = recipe_of(given), make_mesh(given.mesh, AXES)
    for axis, count, what in (("tensor", HEADS, "heads"), ("fsdp", WIDTH, "columns")):
        if count % mesh.shape[axis]:
            raise ValueError(
                f"--mesh {given.mesh}: {axis}={mesh.shape[axis]} does not divide the {count} "
                f"{what}; give a divisor of {count}."
            )
    # Each device quantizes its shard of a weight, and a tile has one scale. So a split over `fsdp`
    # must not cut a tile. If a split over `tensor` cuts one, XLA gathers the weight first.
    if (
        recipe.tile is not None
        and mesh.shape["fsdp"] > 1
        and WIDTH // mesh.shape["fsdp"] % recipe.tile
    ):
        raise ValueError(
            f"--mesh {given.mesh}: fsdp={mesh.shape['fsdp']} splits a width of {WIDTH} into shards "
            f"of {WIDTH // mesh.shape['fsdp']}, which cut the tiles of {recipe.tile} of --recipe "
            f"{given.recipe}; give fsdp={WIDTH // recipe.tile} or less, or a recipe with smaller "
            "tiles."
        )
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if given.batch < 1 or given.batch % parts:
        raise ValueError(
            f"--batch {given.batch} cannot be split evenly over {parts} devices; give a multiple "
            f"of {parts}."
        )
    at_least_one("--steps", given.steps)
    return mesh, recipe


def parse(
    arguments: Sequence[str] | None,
) -> tuple[argparse.Namespace, Mesh, fp8.Recipe, np.ndarray]:
    """Parse the command line, and read the text. A mistake ends the program with one line."""
    parser = Parser(__file__, __doc__)
    add_arguments(parser)
    parser.add_argument("--compare", action="store_true", help="do the same run on one device too")
    given = parser.parse_args(arguments)
    try:
        if given.json is not None:
            check_file("--json", given.json)
        return given, *check(given), load_text(None).train
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> None:
    force_cpu_devices(8)
    given, mesh, recipe, text = parse(arguments)
    losses, compiled = train(mesh, recipe, batches(mesh, text, given.batch, given.steps))
    runs = {"mesh": losses}
    if given.compare:
        one = one_device(AXES)
        runs["one device"], _ = train(one, recipe, batches(one, text, given.batch, given.steps))

    print("step", *(f"{name:>12}" for name in runs))
    for step, row in enumerate(zip(*runs.values(), strict=True)):
        print(f"{step:4d}", *(f"{loss:12.4f}" for loss in row))
    print("\nwhat a device sends in one step:")
    print(fp8.programs.wire_report(compiled))
    if given.json is not None:
        result = {"mesh": dict(mesh.shape), "recipe": given.recipe, "losses": losses}
        result["one_device_losses"] = runs.get("one device")  # null without --compare
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
