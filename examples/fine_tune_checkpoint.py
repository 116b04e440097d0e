"""Fine-tune a Hugging Face checkpoint in FP8, and write it for serving engines.

    python examples/fine_tune_checkpoint.py runs/tiny runs/out --random llama --learning-rate 1e-3
    python examples/fine_tune_checkpoint.py FOLDER OUT --data tokens.npy --steps 200
    python examples/fine_tune_checkpoint.py FOLDER OUT --recipe delayed --format compressed-channel

FOLDER holds config.json and safetensors, in bfloat16 or in a format of `fp8.checkpoint.FORMATS`.
Llama, Qwen 2 and Qwen 3 are known (llama_model.py). --random first writes a small checkpoint with
random weights to FOLDER. The first command takes less than a minute on two cores.

The example has no tokenizer. --data takes token ids, one axis of integers in a .npy file. Or it
takes any text, whose bytes are then the tokens. By default the text is Python's standard library.
That suits random weights. A trained model needs the ids of its own tokenizer.

The FP8 model trains float32 parameters by AdamW. At first its loss is printed beside that of bf16.
At the end its weights are cast as a next step would cast them, and exported with FOLDER's config.
The example loads OUT again, compares each weight, and prints the loss with the loaded weights.
"""

import argparse
import collections
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from chips import add_chip, describe, kernels_of, print_matmuls
from command_line import Parser, add_recipe, at_least_one, positive, recipe_of, run_script
from flax import nnx
from gpt_models import Model
from gpt_text import BATCH, SMALLEST, Text, load_text, split_end
from gpt_training import Settings, train
from llama_model import BF16, TINY, Decoder, read_config, rows

import jaxfp8 as fp8
from jaxfp8.nnx import FP8Linear, FP8State

VALIDATION = 4 * BATCH  # windows
# The matrices that are in FP8. The head stays in bf16.
IN_FP8 = [("layers/.*_proj/kernel", fp8.weights.WeightAxes())]


# ------------------------------------------------------------------------------------- command line
def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, fp8.Recipe, Text]:
    """Parse the command line, and read tokens. A mistake ends the program with one line."""
    parser = Parser(__file__, __doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="a checkpoint of Hugging Face")
    add("out", metavar="OUT", type=Path, help="where to write the export")
    # Scales of inputs (modelopt-fp8) need a recipe with state, and docs/checkpoints.md shows them.
    formats = [name for name, f in fp8.checkpoint.FORMATS.items() if not f.static_inputs]
    add(
        "--format",
        choices=[*formats, "none"],
        default="hf-fp8",
        help="of OUT (default: %(default)s)",
    )
    add("--random", choices=TINY, help="write random weights of this family to FOLDER first")
    add_recipe(parser)
    parser.set_defaults(recipe="blockwise")
    add("--steps", type=int, default=20, help="(default: %(default)s)")
    add("--learning-rate", type=float, default=1e-5, help="peak (default: %(default)s)")
    add("--seed", type=int, default=0, help="of random weights and batches (default: %(default)s)")
    add("--data", metavar="FILE", help="token ids in .npy, or text (default: standard library)")
    add_chip(parser)
    given = parser.parse_args(arguments)
    try:
        at_least_one("--steps", given.steps)
        positive("--learning-rate", given.learning_rate)
        if given.random and given.folder.exists():
            raise ValueError(f"--random: {given.folder} exists already; give a new FOLDER.")
        if given.out.resolve() == given.folder.resolve():
            raise ValueError(f"OUT {given.out}: that is FOLDER; give another folder.")
        given.chip = kernels_of(given.chip).chip
        given.format = None if given.format == "none" else given.format
        config = TINY[given.random] if given.random else read_config(given.folder)
        recipe, text = recipe_of(given), load_tokens(given.data, config["vocab_size"])
    except ValueError as error:
        parser.error(str(error))
    if given.random:
        write_random(given.folder, config, given.seed)
    return given, recipe, text


def load_tokens(file: str | None, vocabulary: int) -> Text:
    """Token ids of a .npy file, or the bytes of a text. The last 5 % of ids are for validation."""
    if file is None or not file.endswith(".npy"):
        text, most = load_text(file), 255
    else:
        try:
            ids = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"--data {file}: it cannot be read ({error}).") from None
        kind, least = ids.dtype.kind, ids.min() if ids.size else 0
        if ids.ndim != 1 or kind not in "iu" or len(ids) < SMALLEST or least < 0:
            raise ValueError(
                f"--data {file}: it has {ids.dtype}{list(ids.shape)} from {least}; give one axis "
                f"of {SMALLEST} ids or more, integers from 0."
            )
        text, most = Text(*split_end(ids), ""), ids.max()
    if most >= vocabulary:
        raise ValueError(
            f"--data {file}: it has ids up to {most}, but the model has {vocabulary}; give ids of "
            "its own tokenizer."
        )
    count = min(VALIDATION, len(text.validation))
    return text._replace(validation=text.validation[: count - count % BATCH or count])


def write_random(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Write a checkpoint with random weights, in bfloat16 and with the names of transformers."""
    model = Decoder(config, None, seed=seed)
    fp8.checkpoint.export(model, folder, format=None, names=rows(config), config=config, dtype=BF16)


# ---------------------------------------------------------------------------------------- fine-tune
def model_of(decoder: Decoder) -> Model:
    """A model in the form that the training loop needs."""
    graph, params, state = nnx.split(decoder, nnx.Param, FP8State)

    def apply(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, state)(tokens)

    matmuls = sum(isinstance(module, FP8Linear) for _, module in nnx.iter_modules(decoder))
    return Model(params, state, apply, matmuls)


def evaluator(decoder: Decoder, windows: np.ndarray, options: Any) -> Callable[[Decoder], float]:
    """A function that returns the loss of a model that differs from `decoder` in numbers only."""
    apply = model_of(decoder).apply

    @functools.partial(jax.jit, compiler_options=options)
    def loss_of(params: Any, state: Any, windows: jax.Array) -> jax.Array:
        tokens = windows.astype(jnp.int32)
        logits = apply(params, state, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return lambda other: float(loss_of(*model_of(other)[:2], windows))


# --------------------------------------------------------------------------------- in and out again
def open_checkpoint(given: argparse.Namespace, recipe: fp8.Recipe) -> Decoder:
    """The FP8 model with the weights of FOLDER. A mistake ends the program with one line.

    It also checks, before the training, that its matrices fit the format of OUT.
    """
    config = read_config(given.folder)
    model, names = Decoder(config, recipe, kernels=kernels_of(given.chip)), rows(config)
    try:
        model = fp8.checkpoint.load(given.folder, like=model, names=names)
        fp8.checkpoint.weights(model, given.format, names=names)
    except (ValueError, OSError) as error:
        Parser(__file__, None).error(str(error))
    return model


def as_served(decoder: Decoder, format: str | None, recipe: fp8.Recipe) -> Decoder:
    """The model with its weights in FP8, as its next step would cast them.

    Formats with a scale for a tensor get the weights as they are: engines merge q, k and v, so that
    the export casts these with a scale that they share.
    """
    if format is None or recipe.is_identity or fp8.checkpoint.FORMATS[format].cells == "tensor":
        return decoder
    return fp8.quantize_params(
        decoder, recipe, rules=IN_FP8, state=decoder, primary=True, dtype=BF16
    )  # fmt: skip


def compare(trained: Any, loaded: Any, names: tuple[fp8.checkpoint.Row, ...]) -> tuple[int, int]:
    """How many numbers of two models differ, and how many they have. FP8 counts as float32."""
    differ = total = 0
    both = (
        fp8.checkpoint.weights(model, None, names=names, dtype=jnp.float32)
        for model in (trained, loaded)
    )
    for (_, ours), (_, theirs) in zip(*both, strict=True):
        differ += int(np.sum(ours != theirs))
        total += ours.size
    return differ, total


def main(arguments: list[str] | None = None) -> None:
    given, recipe, text = parse(arguments)
    folder, out, kernels = given.folder, given.out, kernels_of(given.chip)
    options = kernels.compiler_options(recipe)
    print(describe(kernels))

    decoder = open_checkpoint(given, recipe)
    config = read_config(folder)
    names = rows(config)
    twin = Decoder(config, None)  # the same model in bf16
    nnx.update(twin, nnx.state(decoder, nnx.Param))
    windows = text.validation[:BATCH]
    loss_of = evaluator(decoder, windows, options)
    bf16 = evaluator(twin, windows, options)(twin)
    print(f"loss of {folder}: bf16 {bf16:.4f}, FP8 {loss_of(decoder):.4f}", flush=True)

    settings = Settings(learning_rate=given.learning_rate)
    report = functools.partial(print_matmuls, recipe=recipe, kernels=kernels)
    run = train(
        "FP8", model_of(decoder), text, given.steps, given.seed, options, None, settings, report
    )
    # Engines compute in bfloat16, and so the file has what is not in FP8.
    params = jax.tree.map(lambda p: p.astype(BF16).astype(p.dtype), run.params)
    nnx.update(decoder, params, run.state)

    served = as_served(decoder, given.format, recipe)
    done = fp8.checkpoint.export(
        served, out, format=given.format, names=names, config=folder, dtype=BF16
    )  # fmt: skip
    matrices = (how for name, how in done.how.items() if name.endswith("_proj.weight"))
    made = ", ".join(f"{n} {how}" for how, n in collections.Counter(matrices).items())
    print(f"{out}: matrices of layers, format {given.format}: {made}")

    loaded = fp8.checkpoint.load(out, like=decoder, names=names)
    differ, total = compare(served, loaded, names)
    print(f"{out}: {differ:,} of {total:,} weights differ from those of training")
    print(f"loss: trained {loss_of(decoder):.4f}, loaded from {out} {loss_of(loaded):.4f}")


if __name__ == "__main__":
    run_script(main)
