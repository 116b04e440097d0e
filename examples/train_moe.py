"""Train a small GPT whose MLPs are mixtures of experts, in FP8 on a mesh.

The mesh has two axes. `expert` splits the experts. Both axes split the tokens. Each token is cast
once, and sent to its experts in FP8.

    python examples/train_moe.py               # on all GPUs; without one, on eight CPU devices
    python examples/train_moe.py --mesh expert=8 --recipe mxfp8
    python examples/train_moe.py --compare     # on one device and in bf16 too; about three minutes
    python examples/train_moe.py --capacity-factor 1.5 --gradient-in-fp8

While it trains, it prints how the router of each block loads its experts. A warning says when a
load is uneven. Routers are so in the first steps. One that stays so collapses. The last lines are
the losses on text that no step has seen.

Letters in shapes: B windows of a batch, T tokens of a window, D width, E experts.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import (
    Parser,
    add_recipe,
    at_least_one,
    check_file,
    positive,
    recipe_of,
    run_script,
)
from devices import force_cpu_devices, make_mesh, one_device
from gpt_models import BF16, VOCABULARY, attention
from gpt_text import CONTEXT, VALIDATION_WINDOWS, Text, load_text
from gpt_training import Settings
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_sharded import sample

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8MoE

AXES = ("expert", "data")
TOKENS = ("data", "expert")  # the axes that split tokens
WIDTH, HEADS = 128, 4
EXPERTS, HIDDEN, CHOICES = 8, 128, 2  # HIDDEN features of an expert, CHOICES of a token
VALIDATION_PART = 128  # windows that are validated together, if their number is a multiple of it
BALANCE, Z = 0.01, 0.001  # weights of the losses of a router
# The largest load over the mean load. It is 1 if all experts get equally many tokens, and
# EXPERTS / CHOICES = 4 if one expert gets every token.
COLLAPSED = 3.0
settings = Settings(learning_rate=1e-3)


# -------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    """Attention and a mixture of experts: [B, T, D] -> [B, T, D], and what the router did."""

    recipe: fp8.Recipe
    parallel: fp8.moe.ExpertParallel

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(FP8Dense, use_bias=False, dtype=BF16, recipe=self.recipe)
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=BF16)
        qkv = dense(3 * WIDTH, name="qkv")(norm()(x))
        x = x + dense(WIDTH, name="out")(attention(qkv, HEADS))
        experts = FP8MoE(
            experts=EXPERTS,
            hidden=HIDDEN,
            k=CHOICES,
            dtype=BF16,
            recipe=self.recipe,
            parallel=self.parallel,
            name="experts",
        )
        y, stats = experts(norm()(x))
        return x + y, stats


class GPT(nn.Module):
    """Tokens [B, T] -> logits f32[B, T, 256], and what the router of each block did.

    Embeddings, attention, norms and head are in bf16, routers in float32.
    """

    layers: int
    recipe: fp8.Recipe
    parallel: fp8.moe.ExpertParallel

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=BF16)
        x = embed(VOCABULARY, name="token")(tokens) + embed(CONTEXT, name="position")(
            jnp.arange(CONTEXT)[None]
        )
        stats = []
        for i in range(self.layers):
            x, of_router = Block(self.recipe, self.parallel, name=f"block{i}")(x)
            stats.append(of_router)
        x = nn.LayerNorm(use_bias=False, dtype=BF16)(x)
        logits = nn.Dense(VOCABULARY, use_bias=False, dtype=BF16, name="head")(x)
        return logits.astype(jnp.float32), stats


# ----------------------------------------------------------------------------------------- training
def spec_of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> P:
    """How a parameter, a state or a moment is split. `expert` splits all that experts have."""
    of_experts = any(getattr(key, "key", None) == "experts" for key in path)
    return P("expert") if of_experts and leaf.shape[:1] == (EXPERTS,) else P()


def init(model: GPT, tx: optax.GradientTransformation, seed: int) -> tuple[Any, Any, Any]:
    """Parameters, quantizer state and optimizer state. Call it under `jax.set_mesh`."""

    def create():
        variables = model.init(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))
        return variables["params"], variables.get(COLLECTION, {}), tx.init(variables["params"])

    specs = jax.tree_util.tree_map_with_path(spec_of, jax.eval_shape(create))
    return jax.jit(create, out_shardings=specs)()


def cross_entropy(model: GPT, params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any]:
    """The loss of windows uint8[B, T + 1] in nats per byte, and what the routers did."""
    tokens = windows.astype(jnp.int32)
    logits, stats = model.apply({"params": params, COLLECTION: state}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), stats


def train_step(model: GPT, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Make the train step. Its code does not mention the mesh."""

    def loss_fn(params, state, windows):
        loss, stats = cross_entropy(model, params, state, windows)
        of_routers = sum(BALANCE * each.load_balancing_loss + Z * each.z_loss for each in stats)
        return loss + of_routers, (loss, stats)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, opt_state, windows):
        (_, shown), grads, state = fp8.value_and_grad(loss_fn, has_aux=True)(params, state, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, shown

    return step


class Run(NamedTuple):
    """The figures of one training run."""

    losses: list[float]  # cross-entropy of each batch
    val_loss: float  # nats per byte
    dropped: int  # choices, in all steps and layers


def train(
    mesh: Mesh,
    model: GPT,
    text: Text,
    given: argparse.Namespace,
    show: Callable[[int, float, Any], None] | None = None,
) -> Run:
    """Train a model on batches that depend on the seed alone.

    After each step `show(step, loss, stats)` is called.
    """
    rng, rows = np.random.default_rng(given.seed), NamedSharding(mesh, P(TOKENS))
    batches: Iterable[np.ndarray] = (
        sample(text.train, rng, (given.batch,)) for _ in range(given.steps)
    )
    losses, dropped = [], 0
    with jax.set_mesh(mesh):
        params_like = jax.eval_shape(lambda: init(model, optax.identity(), given.seed))[0]
        tx = settings.optimizer(params_like, given.steps)
        carry, step = init(model, tx, given.seed), train_step(model, tx)
        for windows in batches:
            *carry, (loss, stats) = step(*carry, jax.device_put(windows, rows))
            losses.append(float(loss))
            dropped += sum(int(each.dropped) for each in stats)
            if show:
                show(len(losses), losses[-1], stats)
        params, state, _ = carry
        parallel = dataclasses.replace(model.parallel, capacity_factor=None)  # nothing is dropped
        evaluate = jax.jit(functools.partial(cross_entropy, model.clone(parallel=parallel)))
        chosen = np.linspace(0, len(text.validation) - 1, given.validation).astype(int)
        # Parts of one size, so that one program does all of them.
        count = max(1, given.validation // VALIDATION_PART)
        count = next(n for n in range(count, 0, -1) if given.validation % (n * mesh.size) == 0)
        parts = np.split(text.validation[chosen], count)
        found = [evaluate(params, state, jax.device_put(part, rows))[0] for part in parts]
    return Run(losses, float(np.mean(found)), dropped)


# ---------------------------------------------------------------------------------------- telemetry
def describe(stats: Sequence[Any]) -> list[str]:
    """A line for each router, and a warning for each whose load is uneven."""
    lines = []
    for i, each in enumerate(stats):
        load, balance = np.asarray(each.load), float(each.load_balancing_loss)
        ratio = load.max() / load.mean()
        lines.append(
            f"  block{i}  load: max/mean {ratio:.2f}, least {load.min() / load.sum():.1%}  "
            f"dropped {int(each.dropped)}  load-balancing loss {balance:.3f}"
        )
        if load.min() == 0:
            lines.append(f"  warning: block{i}: uneven load: expert {load.argmin()} gets no token.")
        elif ratio > COLLAPSED:
            lines.append(
                f"  warning: block{i}: uneven load: expert {load.argmax()} gets {ratio:.1f} times "
                "the mean."
            )
    return lines


# ------------------------------------------------------------------------------------- command line
def parse(
    arguments: Sequence[str] | None,
) -> tuple[argparse.Namespace, Mesh, GPT, Text]:
    """Parse the command line, and read the text. A mistake ends the program with one line."""
    parser = Parser(__file__, __doc__)
    add = parser.add_argument
    add(
        "--mesh",
        default="expert=4,data=2",
        help="sizes of its axes, for all devices (default: %(default)s)",
    )
    add_recipe(parser)
    parser.set_defaults(recipe="blockwise")
    add(
        "--batch",
        type=int,
        default=16,
        help="windows of a step on all devices together (default: %(default)s)",
    )
    add("--layers", type=int, default=2, help="number of blocks (default: %(default)s)")
    add("--steps", type=int, default=200, help="train steps (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    add(
        "--capacity-factor",
        type=float,
        help="slots of a device over an even load, as 1.25 (default: no choice is dropped)",
    )
    add("--tokens-in-bf16", action="store_true", help="send tokens to the experts in bf16")
    add("--gradient-in-fp8", action="store_true", help="send gradients of results in FP8")
    add(
        "--validation",
        type=int,
        default=VALIDATION_WINDOWS,
        help="windows to validate on (default: %(default)s)",
    )
    add("--compare", action="store_true", help="do the run on one device and in bf16 too")
    add("--json", metavar="FILE", help="where to write the losses")
    given = parser.parse_args(arguments)
    try:
        if given.json is not None:
            check_file("--json", given.json)
        return given, *check(given), load_text(None)
    except ValueError as error:
        parser.error(str(error))


def check(given: argparse.Namespace) -> tuple[Mesh, GPT]:
    """The mesh and the model of the arguments.

    Raises:
      ValueError: for a mistake in the arguments. The message has its name, its value and the cure.
    """
    recipe, mesh = recipe_of(given), make_mesh(given.mesh, AXES)
    if EXPERTS % mesh.shape["expert"]:
        raise ValueError(
            f"--mesh {given.mesh}: expert={mesh.shape['expert']} does not divide the {EXPERTS} "
            f"experts; give a divisor of {EXPERTS}."
        )
    if given.batch < 1 or given.batch % mesh.size:
        raise ValueError(
            f"--batch {given.batch} cannot be split evenly over {mesh.size} devices; give a "
            f"multiple of {mesh.size}."
        )
    if given.validation % mesh.size or not 0 < given.validation <= VALIDATION_WINDOWS:
        raise ValueError(
            f"--validation {given.validation}: give a multiple of {mesh.size}, at most "
            f"{VALIDATION_WINDOWS}."
        )
    at_least_one("--layers", given.layers)
    at_least_one("--steps", given.steps)
    if not 0 <= given.seed < 2**31:
        raise ValueError(f"--seed {given.seed}: give a number from 0 to {2**31 - 1}.")
    if given.capacity_factor is not None:
        positive("--capacity-factor", given.capacity_factor)
    parallel = fp8.moe.ExpertParallel(
        axis="expert",
        tokens=TOKENS,
        capacity_factor=given.capacity_factor,
        sent_in_fp8=not given.tokens_in_bf16,
        gradient_sent_in_fp8=given.gradient_in_fp8,
    )
    model, windows = (
        GPT(given.layers, recipe, parallel),
        jnp.zeros((mesh.size, CONTEXT + 1), jnp.uint8),
    )
    try:
        with jax.set_mesh(mesh):
            params, state, _ = jax.eval_shape(lambda: init(model, optax.identity(), 0))
            jax.eval_shape(functools.partial(cross_entropy, model), params, state, windows)
    except ValueError as error:  # not every recipe can cast before it sends
        written = "".join(f" --set {field}={json.dumps(value)}" for field, value in given.set)
        raise ValueError(
            f"--recipe {given.recipe}{written}: {error} Here --tokens-in-bf16 is "
            "sent_in_fp8=False, and --gradient-in-fp8 is gradient_sent_in_fp8=True."
        ) from None
    return mesh, model


def runs_of(given: argparse.Namespace, mesh: Mesh, model: GPT, text: Text) -> dict[str, Run]:
    """The run, and with --compare the same run on one device and in bf16."""
    every = max(1, given.steps // 10)

    def show(step, loss, stats):
        if step == 1 or step % every == 0:
            print(f"step {step:4d}  loss {loss:.4f}", *describe(stats), sep="\n", flush=True)

    runs = {given.recipe: train(mesh, model, text, given, show)}
    if given.compare:
        print("the same on one device ...", flush=True)
        runs["one device"] = train(one_device(AXES), model, text, given)
        print("the same in bf16 ...", flush=True)
        twin = dataclasses.replace(model, recipe=fp8.recipes.identity())
        runs["bf16"] = train(mesh, twin, text, given)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    force_cpu_devices(8)
    given, mesh, model, text = parse(arguments)
    runs = runs_of(given, mesh, model, text)
    ours = runs[given.recipe]
    print(f"\n{'run':>12}  validation loss  {given.recipe} minus it")
    for name, run in runs.items():
        gap = "" if run is ours else f"{ours.val_loss - run.val_loss:+.4f}"
        print(f"{name:>12}  {run.val_loss:15.4f}  {gap}")
    if given.json is not None:
        result = {"mesh": dict(mesh.shape), "recipe": given.recipe, "seed": given.seed}
        result["runs"] = {name: run._asdict() for name, run in runs.items()}
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
