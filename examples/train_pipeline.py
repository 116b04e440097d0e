"""Train a GPT with pipeline parallelism.

Each stage runs on its own devices. Microbatches move from stage to stage.

    python examples/train_pipeline.py              # eight CPU devices, unless there are GPUs
    python examples/train_pipeline.py --mesh pipe=8 --microbatches 16
    python examples/train_pipeline.py --mesh pipe=2,data=4 --recipe rowwise

A stage holds its layers, their parameters and their quantizer state. `P("pipe")` splits all of them
in the same way. `data` splits the tokens of one layer, so amaxes are reduced over `data`. `pipe`
splits layers, so amaxes are never reduced over `pipe`. For amaxes that a state records, JAX's types
inside `jax.shard_map` say this. For recipes without state, `reduce_axes=` says it.

The same model is trained on one device without a pipeline. Losses and scales must be the same.

Letters in shapes: M microbatches, B windows of a microbatch, T tokens of a window, D width, L
layers.
"""

import argparse
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import Parser, add_recipe, at_least_one, check_file, recipe_of, run_script
from devices import force_cpu_devices, make_mesh, one_device
from gpt_models import BF16, VOCABULARY, Size, attention
from gpt_text import CONTEXT, load_text
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_sharded import sample, tx

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense

LAYERS, WIDTH, HEADS = 8, Size.width, Size().heads
AXES = ("pipe", "data")
ROLES = fp8.sharding.MeshRoles(pipeline="pipe", data="data")


# -------------------------------------------------------------------------------------------- model
class Embedding(nn.Module):
    """The model before its first block: tokens [..., T] -> [..., T, D]."""

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=BF16)
        return embed(VOCABULARY, name="token")(tokens) + embed(CONTEXT, name="position")(
            jnp.arange(CONTEXT)
        )


class Block(nn.Module):
    """A block of gpt_models.py: [..., T, D] -> [..., T, D]."""

    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x):
        # ROLES.reduce_axes has every mesh axis but `pipe`.
        dense = functools.partial(FP8Dense, recipe=self.recipe, reduce_axes=ROLES.reduce_axes)
        dense = functools.partial(dense, use_bias=False, dtype=BF16)
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=BF16)
        x = x + dense(WIDTH, name="out")(
            attention(dense(3 * WIDTH, name="qkv")(norm(name="norm1")(x)), HEADS)
        )
        return x + dense(WIDTH, name="fc2")(
            nn.gelu(dense(4 * WIDTH, name="fc1")(norm(name="norm2")(x)))
        )


class Head(nn.Module):
    """The model after its last block: [..., T, D] -> logits f32[..., T, 256]."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(use_bias=False, dtype=BF16)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=BF16)(x).astype(jnp.float32)


def init(block: Block) -> tuple[tuple[Any, Any, Any], Any]:
    """Parameters, quantizer state and optimizer state, and their specs.

    Each stage's shard of them is on the devices of the stage.
    """

    def split(tree):
        return jax.tree.map(lambda leaf: nn.Partitioned(leaf, ("pipe",)), tree)

    def create():
        first, last, *keys = jax.random.split(jax.random.key(0), 2 + LAYERS)
        x = jnp.zeros((1, CONTEXT, WIDTH), BF16)
        # leaves of all blocks stacked: [L, ...]
        blocks = jax.vmap(block.init, in_axes=(0, None))(jnp.stack(keys), x)
        embedding, head = (
            Embedding().init(first, jnp.zeros(CONTEXT, jnp.int32)),
            Head().init(last, x),
        )
        params = {"embedding": embedding, "blocks": split(blocks["params"]), "head": head}
        return params, split(blocks.get(COLLECTION, {})), tx.init(params)

    specs = nn.get_partition_spec(jax.eval_shape(create))
    return jax.jit(lambda: nn.unbox(create()), out_shardings=specs)(), specs


def run_blocks(block: Block, params: Any, state: Any, x: jax.Array) -> jax.Array:
    """All blocks of `params`, one after the other: [B, T, D] -> [B, T, D]."""

    def one(x, layer):
        params, state = layer
        return block.apply({"params": params, COLLECTION: state}, x), None

    return lax.scan(one, x, (params, state))[0]


def cross_entropy(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Head and mean loss: x [..., T, D], targets [..., T] -> []."""
    return optax.softmax_cross_entropy_with_integer_labels(Head().apply(params, x), targets).mean()


# ----------------------------------------------------------------------------------------- pipeline
def pipeline_loss(block: Block, params: Any, state: Any, windows: jax.Array) -> jax.Array:
    """The loss of all microbatches, windows uint8[M, B, T + 1], on one device inside shard_map.

    The schedule is GPipe's, with M + stages - 1 ticks. In each tick every stage runs its blocks on
    one microbatch and sends the result to the next stage. At the start and at the end some stages
    have no microbatch, and compute on zeros. The blocks have no bias, so the results are zeros too.
    Their amax is 0, which never changes a maximum.
    """
    stage, stages = lax.axis_index("pipe"), lax.axis_size("pipe")
    tokens = windows.astype(jnp.int32)
    x = Embedding().apply(params["embedding"], tokens[..., :-1])  # used by the first stage only
    x = jnp.where(stage == 0, x, 0)
    x = jnp.concatenate([x, jnp.broadcast_to(jnp.zeros_like(x[:1]), (stages - 1, *x.shape[1:]))])

    def tick(carry, x):
        received, state = carry
        # Each microbatch uses the same state. With `fork` the maximum of their amaxes is exact.
        state, now = fp8.fork(state)
        y = run_blocks(block, params["blocks"], now, x + received)  # x or received is zero
        return (lax.ppermute(y, "pipe", [(i, i + 1) for i in range(stages - 1)]), state), y

    _, y = lax.scan(tick, (jnp.zeros_like(x[0]), state), x)
    # Only the last stage has results of the last block, from tick stages - 1 on.
    loss = cross_entropy(params["head"], y[stages - 1 :], tokens[..., 1:])
    return lax.pmean(lax.psum(jnp.where(stage == stages - 1, loss, 0), "pipe"), "data")


def one_device_loss(block: Block, params: Any, state: Any, windows: jax.Array) -> jax.Array:
    """The loss of the same model without a pipeline, one microbatch after the other.

    Windows are uint8[M, B, T + 1].
    """

    def microbatch(state, windows):
        state, now = fp8.fork(state)
        tokens = windows.astype(jnp.int32)
        x = Embedding().apply(params["embedding"], tokens[:, :-1])
        return state, cross_entropy(
            params["head"], run_blocks(block, params["blocks"], now, x), tokens[:, 1:]
        )

    return lax.scan(microbatch, state, windows)[1].mean()


# ----------------------------------------------------------------------------------------- training
def train(
    mesh: Mesh, block: Block, batches: Iterable[np.ndarray], *, pipeline: bool
) -> tuple[list[float], Any]:
    """Train, and return the loss of each batch and the quantizer state at the end."""
    with jax.set_mesh(mesh):
        (params, state, opt_state), (*specs, _) = init(block)
        batch_spec, losses = P(None, "data"), []
        gradients = fp8.value_and_grad(
            functools.partial(pipeline_loss if pipeline else one_device_loss, block)
        )
        if pipeline:
            gradients = jax.shard_map(
                gradients, in_specs=(*specs, batch_spec), out_specs=(P(), *specs)
            )

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def train_step(params, state, opt_state, windows):
            loss, grads, state = gradients(params, state, windows)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), state, opt_state, loss

        for windows in batches:
            windows = jax.device_put(windows, NamedSharding(mesh, batch_spec))
            params, state, opt_state, loss = train_step(params, state, opt_state, windows)
            losses.append(float(loss))
    return losses, state


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Mesh, fp8.Recipe, np.ndarray]:
    """Parse the command line, and read the text.

    A mistake ends the program with one line that says the cure.
    """
    parser = Parser(__file__, __doc__)
    add = parser.add_argument
    add("--mesh", default="pipe=4,data=2", help="(default: %(default)s)")
    add(
        "--microbatches",
        type=int,
        default=4,
        help="microbatches in one step (default: %(default)s)",
    )
    add("--batch", type=int, default=2, help="windows of a microbatch (default: %(default)s)")
    add_recipe(parser)
    add("--steps", type=int, default=10, help="(default: %(default)s)")
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train on one device too (the default)",
    )
    add("--json", metavar="FILE", help="where to write losses and scales")
    given = parser.parse_args(arguments)
    try:
        if given.json is not None:
            check_file("--json", given.json)
        recipe, mesh = recipe_of(given), make_mesh(given.mesh, AXES)
        check(given, mesh)
        return given, mesh, recipe, load_text(None).train
    except ValueError as error:
        parser.error(str(error))


def check(given: argparse.Namespace, mesh: Mesh) -> None:
    """Raise ValueError for numbers that do not fit the mesh.

    The mesh cannot cut a tile, because each device quantizes the tokens and layers that it has.
    """
    pipe, data = (mesh.shape[axis] for axis in AXES)
    if LAYERS % pipe:
        raise ValueError(
            f"--mesh {given.mesh}: {LAYERS} layers cannot be split evenly into {pipe} stages; give "
            f"a number of stages that divides {LAYERS}."
        )
    if given.batch < 1 or given.batch % data:
        raise ValueError(
            f"--batch {given.batch}: give a multiple of data={data}, over which it is split."
        )
    at_least_one("--steps", given.steps)
    at_least_one("--microbatches", given.microbatches)


def main(arguments: list[str] | None = None) -> None:
    force_cpu_devices(8)
    given, mesh, recipe, text = parse(arguments)

    def run(mesh, pipeline):
        rng = np.random.default_rng(0)
        batches = (sample(text, rng, (given.microbatches, given.batch)) for _ in range(given.steps))
        losses, state = train(mesh, Block(recipe), batches, pipeline=pipeline)
        return losses, np.array(
            state["fc1"]["FP8DotGeneral_0"]["fp8"].scale
        ) if recipe.rows else np.zeros((LAYERS, 0))

    runs = {"pipeline": run(mesh, pipeline=True)}
    if given.compare:
        runs["one device"] = run(one_device(AXES), pipeline=False)

    print("step", *(f"{name:>12}" for name in runs))
    for step, losses in enumerate(zip(*(losses for losses, _ in runs.values()), strict=True)):
        print(f"{step:4d}", *(f"{loss:12.4f}" for loss in losses))
    if recipe.rows:
        print("\nscales of x, w and g in fc1 of each stage's first layer:")
        print("stage", *(f"{name:>32}" for name in runs))
        stages = mesh.shape["pipe"]
        for stage, rows in enumerate(
            zip(*(scales[:: LAYERS // stages] for _, scales in runs.values()), strict=True)
        ):
            print(f"{stage:5d}", *("".join(f"{scale:11.3e}" for scale in row)[1:] for row in rows))
    if given.json is not None:
        result = {
            name: {"losses": losses, "scales": scales.tolist()}
            for name, (losses, scales) in runs.items()
        }
        Path(given.json).write_text(
            json.dumps({"mesh": dict(mesh.shape)} | result, indent=2) + "\n"
        )


if __name__ == "__main__":
    run_script(main)
