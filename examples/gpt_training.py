"""The training loop of train_gpt.py for FP8 and bf16, and sampling from a trained model.

Letters in shapes: B windows of a batch, T tokens of a window.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import Checkpoints
from gpt_models import Model
from gpt_text import BATCH, Text

import jaxfp8 as fp8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of AdamW and of its schedule."""

    learning_rate: float = 2e-3  # peak, after warm-up; the end has 1/20 of it
    warmup_steps: int = 30
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule_steps: int | None = None  # of warm-up and decay; all steps of the run if None

    def optimizer(self, params: Any, steps: int) -> optax.GradientTransformation:
        """AdamW with warm-up and cosine decay. After the decay the learning rate stays."""
        steps = self.schedule_steps or steps
        warmup, peak = min(self.warmup_steps, steps // 4), self.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak / 20)
        matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # norms are not decayed
        adamw = optax.adamw(schedule, b2=0.98, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)


class Run(NamedTuple):
    """The figures of one training run, and the model that it trained."""

    losses: np.ndarray  # f32[steps], of the training batches
    val_loss: float  # nats per byte
    seconds: float  # of the steps
    compile_seconds: float
    params: Any
    state: Any  # of the quantizers
    in_fp8: bool | None = None  # what `report` returned


def train(
    name: str,
    model: Model,
    text: Text,
    steps: int,
    seed: int,
    options: dict[str, bool],
    checkpoints: Checkpoints | None = None,
    settings: Settings = Settings(),
    report: Callable[[str, Any], bool] | None = None,
) -> Run:
    """Train a model and print losses. Training starts from the newest checkpoint, if there is one.

    A step takes and returns the quantizer state. A checkpoint contains it too. Before the first
    step `report(name, compiled)` says whether the compiled step multiplies in FP8.
    """
    tx, context = settings.optimizer(model.params, steps), text.context

    def loss_fn(params, state, windows):  # windows: [B, T + 1], of the dtype of the text
        tokens = windows.astype(jnp.int32)
        logits = model.apply(params, state, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(params, state, opt_state, windows):
        # `grads` has no quantizer state, so any optax optimizer takes it.
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    def evaluate(params, state, windows):
        batches = windows.reshape(-1, min(BATCH, len(windows)), context + 1)
        return jax.lax.map(functools.partial(loss_fn, params, state), batches).mean()

    params, state, opt_state = model.params, model.state, tx.init(model.params)
    losses, seconds = [], 0.0  # of the finished steps

    def everything():  # the arguments of the next step, and the measurements so far
        measured = {"losses": np.array(losses, np.float32), "seconds": np.array(seconds)}
        return {"params": params, "state": state, "opt_state": opt_state} | measured

    if checkpoints and checkpoints.steps():
        done = checkpoints.steps()[-1]
        losses = [0.0] * done  # of the shape of those that are restored
        saved = checkpoints.restore(everything())
        params, state, opt_state = saved["params"], saved["state"], saved["opt_state"]
        losses, seconds = list(saved["losses"]), float(saved["seconds"])
        print(f"{name:>4} continues after step {done} of {checkpoints.directory}")
    # Positions of all batches are drawn here, so a resumed run reads the batches that come next.
    places = np.random.default_rng(seed).integers(0, len(text.train) - context, (steps, BATCH, 1))
    print(f"{name:>4} compiling ...", flush=True)
    # Both functions are compiled before the first step, so that tokens/s is the speed of steps.
    start = time.perf_counter()
    windows = jax.ShapeDtypeStruct((BATCH, context + 1), text.train.dtype)
    jitted = jax.jit(train_step, donate_argnums=(0, 1, 2), compiler_options=options)
    train_step = jitted.lower(params, state, opt_state, windows).compile()
    evaluate = (
        jax.jit(evaluate, compiler_options=options).lower(params, state, text.validation).compile()
    )
    compile_seconds = time.perf_counter() - start
    in_fp8 = report(f"{name:>4}", train_step) if report else None

    start = time.perf_counter() - seconds
    print_every = min(max(1, steps // 20), 50)
    for i in range(len(losses) + 1, steps + 1):
        windows = text.train[places[i - 1] + np.arange(context + 1)]
        params, state, opt_state, loss = train_step(params, state, opt_state, windows)
        losses.append(loss)
        save = checkpoints and (i % checkpoints.every == 0 or i == steps)
        # The loss is read only here, because reading it waits for its step.
        if i % print_every == 0 or i == steps or save:
            shown = f"{name:>4} step {i:{len(str(steps))}}/{steps}  loss {float(loss):.3f}"
            print(
                f"{shown}  {i * BATCH * context / (time.perf_counter() - start):9,.0f} tokens/s",
                flush=True,
            )
        if save:
            seconds = time.perf_counter() - start
            checkpoints.save(i, everything())
            start = time.perf_counter() - seconds  # the time of saving is not counted
    seconds = time.perf_counter() - start
    val_loss = float(evaluate(params, state, text.validation))
    return Run(np.array(losses), val_loss, seconds, compile_seconds, params, state, in_fp8)


def sample(
    model: Model,
    run: Run,
    context: int,
    count: int,
    seed: int,
    temperature: float,
    options: dict[str, bool],
) -> bytes:
    """Sample `count` bytes that follow a line break.

    Each byte is computed from the last T tokens, without a cache of keys and values.
    """

    def write(params, state, window, keys):
        def step(carry, key):
            # window: int32[T]. Its first `length` tokens are text. Attention is causal, so the
            # tokens after them have no effect.
            window, length = carry
            logits = model.apply(params, state, window[None])[0, length - 1]
            token = jax.random.categorical(key, logits / temperature)
            window = jnp.where(length == context, jnp.roll(window, -1), window)
            length = jnp.minimum(length + 1, context)
            return (window.at[length - 1].set(token), length), token

        return jax.lax.scan(step, (window, jnp.int32(1)), keys)[1]

    window = jnp.zeros(context, jnp.int32).at[0].set(ord("\n"))
    keys = jax.random.split(jax.random.key(seed), count)
    # Parameters are arguments. If the function closed over them, XLA would compute with them at
    # compile time, which is slow.
    tokens = jax.jit(write, compiler_options=options)(run.params, run.state, window, keys)
    return np.asarray(tokens, np.uint8).tobytes()
