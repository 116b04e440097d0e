"""Train a small GPT in FP8 beside its bf16 twin, and see that the two loss curves agree.

    pip install "jaxfp8[examples]"
    python examples/train_gpt.py                        # delayed scaling, flax.linen; about a minute on two cores
    python examples/train_gpt.py --framework nnx --recipe current
    python examples/train_gpt.py --recipe rowwise --set high_precision_wgrad=true
    python examples/train_gpt.py --recipe blockwise
    python examples/train_gpt.py --recipe mxfp8 --set w_tile_dim=2
    python examples/train_gpt.py --checkpoint DIR           # saves every 50 steps, and at the end
    python examples/train_gpt.py --checkpoint DIR --resume  # continues DIR, bit for bit

The text is Python's own standard library, which every machine has; a token is a byte. Both models start from the same
parameters and see the same batches. They differ in one thing: the matmuls qkv, out, fc1 and fc2 of every block run in
FP8, forward and backward. Embedding, attention, norms and head stay in bf16, parameters and optimizer in float32.

Letters in shapes: B batch, T tokens of a window, D width.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import CheckpointError, Checkpoints, open_directory
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.nnx import FP8Linear, FP8State

LAYERS, WIDTH, HEADS, VOCABULARY = 2, 192, 6, 256
BATCH, CONTEXT = 16, 64
PEAK_LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, CLIP_NORM = 2e-3, 30, 0.1, 1.0
BLOCK_BYTES, VALIDATION_EVERY, VALIDATION_WINDOWS = 4096, 20, 1024  # 1024 windows of 64 tokens: 64 Ki tokens
BF16 = jnp.bfloat16


# ---------------------------------------------------------------------------------------------------------------- data
class Text(NamedTuple):
    """Bytes as tokens."""

    train: np.ndarray  # uint8[N]
    validation: np.ndarray  # uint8[1024, T + 1], spread evenly over every 20th block, the same in every run
    sha256: str


def load_text(file: str | None) -> Text:
    """A file, or the sorted top-level modules of Python's standard library."""
    if file and not Path(file).is_file():
        raise ValueError(f"--data {file}: there is no such file; give one, or none for the standard library.")
    library = Path(os.__file__).parent
    paths = [Path(file)] if file else sorted(library.glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)
    blocks = np.frombuffer(text, np.uint8)[: len(text) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
    held_out = np.arange(len(blocks)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    windows_per_block = BLOCK_BYTES // (CONTEXT + 1)
    windows = blocks[held_out, : windows_per_block * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    if len(windows) < VALIDATION_WINDOWS:
        needed = -(-VALIDATION_WINDOWS // windows_per_block) * VALIDATION_EVERY * BLOCK_BYTES
        origin = file or f"the standard library in {library}"
        raise ValueError(f"{origin}: {len(text):,} bytes of text, {needed:,} are needed; give a larger --data FILE.")
    spread = np.linspace(0, len(windows) - 1, VALIDATION_WINDOWS).astype(int)
    return Text(blocks[~held_out].ravel(), windows[spread], hashlib.sha256(text).hexdigest())


# -------------------------------------------------------------------------------------------------------------- models
class Model(NamedTuple):
    """A model of either framework as the training loop sees it."""

    params: Any
    state: Any  # of the quantizers; empty for bf16 and for recipes without state
    apply: Callable[[Any, Any, jax.Array], jax.Array]  # params, state, tokens [B, T] -> logits f32[B, T, 256]
    fp8_layers: int


def attention(qkv: jax.Array) -> jax.Array:
    """Causal self-attention in bf16: [B, T, 3 D] -> [B, T, D]."""
    q, k, v = (part.reshape(*part.shape[:2], HEADS, -1) for part in jnp.split(qkv, 3, axis=-1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*qkv.shape[:2], -1)


class Block(nn.Module):
    """One block in flax.linen; `recipe=None` is the bf16 twin."""

    recipe: fp8.Recipe | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(FP8Dense, recipe=self.recipe) if self.recipe else nn.Dense  # the whole difference
        dense = functools.partial(dense, use_bias=False, dtype=BF16)
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=BF16)
        x = x + dense(WIDTH, name="out")(attention(dense(3 * WIDTH, name="qkv")(norm(name="norm1")(x))))
        return x + dense(WIDTH, name="fc2")(nn.gelu(dense(4 * WIDTH, name="fc1")(norm(name="norm2")(x))))


class GPT(nn.Module):
    """The model in flax.linen."""

    recipe: fp8.Recipe | None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=BF16)
        x = embed(VOCABULARY, name="token")(tokens) + embed(CONTEXT, name="position")(jnp.arange(tokens.shape[1])[None])
        for i in range(LAYERS):
            x = Block(self.recipe, name=f"block{i}")(x)
        x = nn.LayerNorm(use_bias=False, dtype=BF16, name="norm")(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=BF16, name="head")(x).astype(jnp.float32)


def linen_gpt(recipe: fp8.Recipe | None, seed: int) -> Model:
    """Parameters and quantizer state are two collections of the variables."""
    model, key, tokens = GPT(recipe), jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32)
    variables = jax.jit(model.init)(key, tokens)

    def apply(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        return model.apply({"params": params, COLLECTION: state}, tokens)

    fp8_layers = sum(isinstance(module, FP8Dense) for module in model.module_paths(key, tokens).values())
    return Model(variables["params"], variables.get(COLLECTION, {}), apply, fp8_layers)


class NnxBlock(nnx.Module):
    """One block in flax.nnx."""

    def __init__(self, recipe: fp8.Recipe | None, rngs: nnx.Rngs) -> None:
        linear = functools.partial(FP8Linear, recipe=recipe) if recipe else nnx.Linear  # the whole difference
        linear = functools.partial(linear, use_bias=False, dtype=BF16, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, WIDTH, use_bias=False, dtype=BF16, rngs=rngs)
        self.norm1, self.qkv, self.out = norm(), linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.norm2, self.fc1, self.fc2 = norm(), linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(attention(self.qkv(self.norm1(x))))
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class NnxGPT(nnx.Module):
    """The model in flax.nnx."""

    def __init__(self, recipe: fp8.Recipe | None, rngs: nnx.Rngs) -> None:
        embed = functools.partial(nnx.Embed, features=WIDTH, dtype=BF16, rngs=rngs)
        self.token, self.position = embed(VOCABULARY), embed(CONTEXT)
        self.blocks = nnx.List(NnxBlock(recipe, rngs) for _ in range(LAYERS))
        self.norm = nnx.LayerNorm(WIDTH, use_bias=False, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, dtype=BF16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def nnx_gpt(recipe: fp8.Recipe | None, seed: int) -> Model:
    """Parameters and quantizer state are Variables of two types; `fp8.nnx.value_and_grad` takes the whole model."""
    model = NnxGPT(recipe, nnx.Rngs(seed))
    graph, params, state = nnx.split(model, nnx.Param, FP8State)

    def apply(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, state)(tokens)

    return Model(params, state, apply, sum(isinstance(module, FP8Linear) for _, module in nnx.iter_modules(model)))


FRAMEWORKS = {"linen": linen_gpt, "nnx": nnx_gpt}


# ------------------------------------------------------------------------------------------------------------ training
class Run(NamedTuple):
    """What one training run showed."""

    losses: np.ndarray  # f32[steps], of the training batches
    val_loss: float  # nats per byte
    seconds: float  # of the steps
    compile_seconds: float


def train(
    name: str,
    model: Model,
    text: Text,
    steps: int,
    seed: int,
    options: dict[str, bool],
    checkpoints: Checkpoints | None = None,
) -> Run:
    """AdamW with warm-up and cosine decay; continues from the newest checkpoint, if there is one.

    A step takes and returns the quantizer state, and a checkpoint holds it.
    """
    warmup = min(WARMUP_STEPS, steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_LEARNING_RATE, warmup, steps, PEAK_LEARNING_RATE / 20)
    matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, model.params)  # norms are not decayed
    adamw = optax.adamw(schedule, b2=0.98, weight_decay=WEIGHT_DECAY, mask=matrices)
    tx = optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw)

    def loss_fn(params, state, windows):  # windows: uint8[B, T + 1]
        tokens = windows.astype(jnp.int32)
        logits = model.apply(params, state, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(params, state, opt_state, windows):
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, windows)  # grads hold no quantizer state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    def evaluate(params, state, windows):
        return jax.lax.map(functools.partial(loss_fn, params, state), windows.reshape(-1, BATCH, CONTEXT + 1)).mean()

    params, state, opt_state = model.params, model.state, tx.init(model.params)
    losses, seconds = [], 0.0  # of the steps that are done

    def everything():  # what the next step takes, and what was measured
        all_losses = np.array(losses + [np.nan] * (steps - len(losses)), np.float32)
        measured = {"losses": all_losses, "seconds": np.array(seconds)}
        return {"params": params, "state": state, "opt_state": opt_state} | measured

    if checkpoints and checkpoints.steps():
        done, saved = checkpoints.steps()[-1], checkpoints.restore(everything())
        params, state, opt_state = saved["params"], saved["state"], saved["opt_state"]
        losses, seconds = list(saved["losses"][:done]), float(saved["seconds"])
        print(f"{name:>4} continues after step {done} of {checkpoints.directory}")
    # All positions of batches are drawn at once, so a resumed run reads the batches that come next.
    places = np.random.default_rng(seed).integers(0, len(text.train) - CONTEXT, (steps, BATCH, 1))
    columns = f"{name:>4}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.description}"
    with Progress(*columns) as progress:
        task = progress.add_task("compiling", total=steps, completed=len(losses))
        start = time.perf_counter()  # compiled before the first step, so that tokens/s is the speed of the steps
        jitted = jax.jit(train_step, donate_argnums=(0, 1, 2), compiler_options=options)
        train_step = jitted.lower(params, state, opt_state, text.validation[:BATCH]).compile()
        evaluate = jax.jit(evaluate, compiler_options=options).lower(params, state, text.validation).compile()
        compile_seconds = time.perf_counter() - start
        progress.update(task, description="")

        start = time.perf_counter() - seconds
        for i in range(len(losses) + 1, steps + 1):
            windows = text.train[places[i - 1] + np.arange(CONTEXT + 1)]
            params, state, opt_state, loss = train_step(params, state, opt_state, windows)
            losses.append(loss)
            save = checkpoints and (i % checkpoints.every == 0 or i == steps)
            if i % 10 == 0 or i == steps or save:  # reading a loss waits for its step
                speed = f"loss {float(loss):.3f}  {i * BATCH * CONTEXT / (time.perf_counter() - start):,.0f} tokens/s"
                progress.update(task, completed=i, description=speed)
            if save:
                seconds = time.perf_counter() - start
                checkpoints.save(i, everything())
                start = time.perf_counter() - seconds  # saving is not counted
        seconds = time.perf_counter() - start
    return Run(np.array(losses), float(evaluate(params, state, text.validation)), seconds, compile_seconds)


# ------------------------------------------------------------------------------------------------------------- results
def plot(runs: dict[str, Run], title: str, file: str) -> None:
    """Training loss of each run, and below it what FP8 adds to bf16, batch by batch."""
    styles = {"bf16": {"color": "tab:orange", "lw": 4, "alpha": 0.4}, "FP8": {"color": "tab:blue", "lw": 1}}
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots(len(runs), 1, sharex=True, height_ratios=[3, 1][: len(runs)], squeeze=False)[:, 0]
    steps = np.arange(1, len(runs["FP8"].losses) + 1)
    for name, run in runs.items():
        axes[0].plot(steps, run.losses, label=f"{name}, validation loss {run.val_loss:.4f}", **styles[name])
    axes[0].set(title=title, ylabel="training loss [nats per byte]")
    axes[0].legend(frameon=False)
    if "bf16" in runs:
        axes[1].axhline(0, **styles["bf16"])
        axes[1].plot(steps, runs["FP8"].losses - runs["bf16"].losses, **styles["FP8"])
        axes[1].set(ylabel="FP8 − bf16")
    axes[-1].set(xlabel="optimizer step", xlim=(0, len(steps)))
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def recipe_field(text: str) -> tuple[str, Any]:
    """FIELD=VALUE, the value as in JSON."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, fp8.Recipe, Text]:
    """The command line; a mistake in it ends the program with its name, its value and the cure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipe", default="delayed", help="delayed, current, rowwise, blockwise, mxfp8, ... (default: %(default)s)")
    add("--set", type=recipe_field, action="append", default=[], metavar="FIELD=VALUE", help="a field of the recipe")
    add("--framework", choices=FRAMEWORKS, default="linen", help="(default: %(default)s)")
    add("--steps", type=int, default=300, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of parameters and batches (default: %(default)s)")
    add("--compare", action=argparse.BooleanOptionalAction, default=True, help="train the bf16 twin too (the default)")
    add("--data", metavar="FILE", help="text to train on (default: Python's standard library)")
    add("--chip", default="cpu", help="h200, b200, ...: what it runs on, for XLA's options (default: %(default)s)")
    add("--plot", metavar="FILE", default="train_gpt.png", help="where to draw the curves (default: %(default)s)")
    add("--json", metavar="FILE", help="where to write the results")
    add("--checkpoint", metavar="DIR", help="where to save the run, so that it can be continued")
    add("--save-every", type=int, default=50, metavar="N", help="save after each N steps (default: %(default)s)")
    add("--resume", action="store_true", help="continue the run in DIR; repeat its arguments")
    given = parser.parse_args(arguments)
    for option, value in {"--steps": given.steps, "--save-every": given.save_every}.items():
        if value < 1:
            parser.error(f"{option} {value}: give at least 1.")
    if given.resume and not given.checkpoint:
        parser.error("--resume: it needs the directory of the run; add --checkpoint DIR.")
    for file in (given.json, given.plot):
        if file and not Path(file).absolute().parent.is_dir():
            parser.error(f"{file}: its folder does not exist; make it first.")
    try:
        recipe = fp8.recipes.get(given.recipe, **dict(given.set))
        if recipe.tile is not None and given.chip == "b200":  # tiles have matmuls of their own on Blackwell
            recipe = dataclasses.replace(recipe, chip=given.chip)
        fp8.compiler_options(recipe, given.chip)
        return given, recipe, load_text(given.data)
    except (OSError, ValueError, TypeError) as error:
        parser.error(str(error))


def checkpoints_of(given: argparse.Namespace, text: Text) -> dict[str, Checkpoints]:
    """The checkpoints of each run, by name. Arguments and the constants above describe a run."""
    if not given.checkpoint:
        return {}
    described = {
        **{key: getattr(given, key) for key in ("framework", "recipe", "steps", "seed", "chip")},
        **{"set": dict(given.set), "data": text.sha256},
        **{name: value for name, value in globals().items() if isinstance(value, int | float)},
    }
    parent, every = Path(given.checkpoint), given.save_every
    found = {name: Checkpoints(parent / name, described, every) for name in ("bf16", "FP8")}
    open_directory(given.checkpoint, list(found.values()), given.resume)
    return found


def train_all(
    given: argparse.Namespace,
    recipe: fp8.Recipe,
    text: Text,
) -> tuple[dict[str, Run], int]:
    """The FP8 run and, with --compare, the bf16 run, by name; then the number of parameters."""
    options, checkpoints = fp8.compiler_options(recipe, given.chip), checkpoints_of(given, text)
    runs = {}
    for name, used in {"bf16": None, "FP8": recipe}.items():
        if name == "FP8" or given.compare:
            model = FRAMEWORKS[given.framework](used, given.seed)
            assert model.fp8_layers == (4 * LAYERS if used else 0), f"{model.fp8_layers} FP8 layers in the {name} model"
            parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
            saved = checkpoints.get(name)
            runs[name] = train(name, model, text, given.steps, given.seed, options, saved)
    return runs, parameters


def main(arguments: list[str] | None = None) -> None:
    given, recipe, text = parse(arguments)
    try:
        runs, parameters = train_all(given, recipe, text)
    except CheckpointError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None

    title = f"Byte-level GPT, {parameters:,} parameters, {given.steps} steps, {given.recipe} ({given.framework})"
    table = Table("", "validation loss", "seconds", "compile seconds", title=title)
    for name, run in runs.items():
        table.add_row(name, f"{run.val_loss:.4f}", f"{run.seconds:.1f}", f"{run.compile_seconds:.1f}")
    if given.compare:
        gaps = (ours - theirs for ours, theirs in zip(runs["FP8"][1:], runs["bf16"][1:], strict=True))
        table.add_row("gap", *(f"{gap:+.{digits}f}" for gap, digits in zip(gaps, (4, 1, 1), strict=True)))
    Console().print(table)
    plot(runs, title, given.plot)
    if given.json:
        result = {"recipe": given.recipe, "recipe_fields": dict(given.set), "steps": given.steps, "seed": given.seed}
        for prefix, name in {"": "FP8", "bf16_": "bf16"}.items():
            for field in ("val_loss", "seconds", "compile_seconds"):
                result[prefix + field] = getattr(runs.get(name), field, None)  # null without --compare
            result[prefix + "losses"] = runs[name].losses.tolist() if name in runs else None
        result |= {"framework": given.framework, "parameters": parameters, "jax": jax.__version__}
        result |= {"data": given.data or "standard library", "sha256": text.sha256, "python": platform.python_version()}
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
