r"""Train a small GPT in FP8 and in bf16, and compare the two loss curves.

    pip install -e ".[examples]"                            # in a checkout; ".[examples,cuda13]"
    python examples/train_gpt.py                            # delayed; about a minute on two cores
    python examples/train_gpt.py --data FILE --sample       # any text; then text of the FP8 model
    python examples/train_gpt.py --width 384 --layers 4 --steps 1000 --learning-rate 1e-3
    python examples/train_gpt.py --framework nnx --recipe current
    python examples/train_gpt.py --recipe rowwise --set high_precision_wgrad=true
    python examples/train_gpt.py --recipe blockwise
    python examples/train_gpt.py --recipe mxfp8 --set w_tile_dim=2
    python examples/train_gpt.py --recipe static \
        --set x_scale=0.015 --set w_scale=0.001 --set g_scale=5e-8
    python examples/train_gpt.py --checkpoint DIR           # saves every 50 steps, and at the end
    python examples/train_gpt.py --checkpoint DIR --resume  # continues DIR, bit for bit
    python examples/train_gpt.py --checkpoint DIR --resume --steps 600  # also a finished run

The text is Python's own standard library, which every machine has. A token is a byte. Both models
start from the same parameters and see the same batches. They differ in the matmuls qkv, out, fc1
and fc2 of every block. In the FP8 model these run in FP8, forward and backward. Embedding,
attention, norms and head are in bf16. Parameters and optimizer state are in float32.

The learning rate falls over the steps with which a run was started. A run that is continued for
more steps keeps the last learning rate, 1/20 of the peak. So its losses do not depend on where it
was interrupted.

The models are in gpt_models.py, the training loop in gpt_training.py, the text in gpt_text.py.
"""

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import jax
from checkpoints import CheckpointError, Checkpoints, open_directory
from chips import add_chip, describe, kernels_of, print_matmuls
from command_line import (
    Parser,
    add_recipe,
    at_least_one,
    check_file,
    positive,
    recipe_of,
    run_script,
)
from gpt_models import FRAMEWORKS, HEAD_WIDTH, Model, Size
from gpt_results import plot, table, write_json
from gpt_text import BATCH, VALIDATION_WINDOWS, Text, load_text, printable
from gpt_training import Run, Settings, sample, train
from matplotlib.backend_bases import FigureCanvasBase
from rich.console import Console

import jaxfp8 as fp8

PLOT = "runs/train_gpt.png"  # git ignores runs/
RUNS = ("bf16", "FP8")  # in the order in which they train


# ------------------------------------------------------------------------------------- command line
def arguments_of(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    add("--framework", choices=FRAMEWORKS, default="linen", help="(default: %(default)s)")
    add(
        "--width",
        type=int,
        default=Size.width,
        help=f"model width, a multiple of {HEAD_WIDTH} (default: %(default)s)",
    )
    add("--layers", type=int, default=Size.layers, help="number of blocks (default: %(default)s)")
    add("--steps", type=int, default=300, help="(default: %(default)s)")
    add(
        "--learning-rate",
        type=float,
        default=Settings.learning_rate,
        help="peak learning rate (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of parameters, batches and samples (default: %(default)s)",
    )
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train the bf16 model too (the default)",
    )
    add("--data", metavar="FILE", help="text to train on (default: Python's standard library)")
    add_chip(parser)
    add(
        "--sample",
        type=int,
        nargs="?",
        const=400,
        metavar="BYTES",
        help="at the end print BYTES (%(const)s) that the FP8 model samples",
    )
    add(
        "--temperature", type=float, default=0.8, help="sampling temperature (default: %(default)s)"
    )
    add(
        "--plot",
        metavar="FILE",
        default=PLOT,
        help="where to draw the curves (default: %(default)s)",
    )
    add("--json", metavar="FILE", help="where to write the results")
    add("--checkpoint", metavar="DIR", help="where to save the run, so that it can be continued")
    add(
        "--save-every",
        type=int,
        default=50,
        metavar="N",
        help="save after each N steps (default: %(default)s)",
    )
    add("--resume", action="store_true", help="continue the run in DIR; repeat its arguments")


def check_numbers(given: argparse.Namespace) -> None:
    """Raise ValueError for a number that is out of range."""
    counts = {"--layers": given.layers, "--steps": given.steps, "--save-every": given.save_every}
    for option, count in (
        counts if given.sample is None else counts | {"--sample": given.sample}
    ).items():
        at_least_one(option, count)
    positive("--learning-rate", given.learning_rate)
    positive("--temperature", given.temperature)
    if not 0 <= given.seed < 2**31:
        raise ValueError(f"--seed {given.seed}: give a number from 0 to {2**31 - 1}.")
    if given.width < 1 or given.width % HEAD_WIDTH:
        nearest = max(HEAD_WIDTH, round(given.width / HEAD_WIDTH) * HEAD_WIDTH)
        raise ValueError(
            f"--width {given.width}: a head of attention is {HEAD_WIDTH} wide; give a multiple of "
            f"it, as in --width {nearest}."
        )


def check_files(given: argparse.Namespace) -> None:
    """Raise ValueError for a file that cannot be written."""
    if given.resume and not given.checkpoint:
        raise ValueError("--resume: it needs the directory of the run; add --checkpoint DIR.")
    if given.checkpoint == "":
        raise ValueError("--checkpoint '': give a directory.")
    if given.json is not None:
        check_file("--json", given.json)
    drawn = FigureCanvasBase.get_supported_filetypes()
    if (suffix := Path(given.plot).suffix[1:]).lower() not in drawn and not Path(
        given.plot
    ).is_dir():
        kind = f".{suffix} pictures" if suffix else "pictures without a suffix"
        raise ValueError(
            f"--plot {given.plot}: matplotlib draws no {kind}; give a name in .png, .pdf or .svg."
        )
    if given.plot == PLOT:
        try:
            Path(PLOT).parent.mkdir(exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--plot {PLOT}: the folder runs/ cannot be made ({error.strerror}); give another "
                "--plot."
            ) from None
    check_file("--plot", given.plot)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, fp8.Recipe, Text]:
    """Parse the command line. A mistake in it ends the program with one line that says the cure."""
    parser = Parser(__file__, __doc__)
    arguments_of(parser)
    given = parser.parse_args(arguments)
    try:
        check_numbers(given)
        check_files(given)
        given.chip = kernels_of(given.chip).chip
        return given, recipe_of(given), load_text(given.data)
    except ValueError as error:
        parser.error(str(error))


def schedule_steps_of(given: argparse.Namespace) -> int:
    """The steps over which the learning rate falls: those that the run was started with."""
    for name in RUNS if given.resume else ():
        saved = Checkpoints(Path(given.checkpoint) / name, {}, given.save_every)
        if saved.steps():
            steps = saved.description().get("schedule_steps")
            return steps if isinstance(steps, int) and steps > 0 else given.steps
    return given.steps


def checkpoints_of(
    given: argparse.Namespace, text: Text, settings: Settings
) -> dict[str, Checkpoints]:
    """The checkpoints of each run, by name.

    The description of a run has every setting that changes its numbers.
    """
    if not given.checkpoint:
        return {}
    described = {
        **{
            key: getattr(given, key)
            for key in ("framework", "recipe", "width", "layers", "seed", "chip")
        },
        **{"set": dict(given.set), "data": text.sha256, "batch": BATCH, "context": text.context},
        **dataclasses.asdict(settings),
    }
    parent, every = Path(given.checkpoint), given.save_every
    found = {name: Checkpoints(parent / name, described, every) for name in RUNS}
    open_directory(given.checkpoint, list(found.values()), given.resume)
    done = max((run.steps()[-1] for run in found.values() if run.steps()), default=0)
    if done > given.steps:
        raise CheckpointError(
            f"--steps {given.steps}: the run in {given.checkpoint} has done {done} steps; give "
            f"--steps {done} or more."
        )
    return found


# ---------------------------------------------------------------------------------------------- run
def train_all(
    given: argparse.Namespace, recipe: fp8.Recipe, text: Text, settings: Settings
) -> tuple[dict[str, Run], dict[str, Model]]:
    """Train the FP8 model and, with --compare, the bf16 model.

    Returns:
      The runs and the models, by name.
    """
    kernels, checkpoints = kernels_of(given.chip), checkpoints_of(given, text, settings)
    options = kernels.compiler_options(recipe)
    size = Size(layers=given.layers, width=given.width, context=text.context)
    recipes = {"bf16": None, "FP8": recipe} if given.compare else {"FP8": recipe}
    models = {
        name: FRAMEWORKS[given.framework](used, given.seed, size, kernels)
        for name, used in recipes.items()
    }
    runs = {}
    for name, model in models.items():
        expected = 4 * given.layers if recipes[name] else 0
        assert model.fp8_layers == expected, f"{model.fp8_layers} FP8 layers in the {name} model"
        # Only the program that XLA compiled says whether its matmuls are in FP8.
        report = functools.partial(print_matmuls, recipe=recipe, kernels=kernels)
        runs[name] = train(
            name,
            model,
            text,
            given.steps,
            given.seed,
            options,
            checkpoints.get(name),
            settings,
            report if recipes[name] else None,
        )
    return runs, models


def main(arguments: list[str] | None = None) -> None:
    given, recipe, text = parse(arguments)
    if len(text.validation) < VALIDATION_WINDOWS:
        print(f"{given.data or 'the standard library'}: {text}")
    print(describe(kernels_of(given.chip)))
    try:
        settings = Settings(
            learning_rate=given.learning_rate, schedule_steps=schedule_steps_of(given)
        )
        if settings.schedule_steps != given.steps:
            print(f"learning rate: it falls for {settings.schedule_steps} steps, and then stays")
        runs, models = train_all(given, recipe, text, settings)
    except CheckpointError as error:
        Parser(__file__, None).error(str(error))

    parameters = sum(leaf.size for leaf in jax.tree.leaves(models["FP8"].params))
    title = (
        f"Byte-level GPT, {parameters:,} parameters, {given.steps} steps, {given.recipe} "
        f"({given.framework})"
    )
    Console().print(table(runs, title))
    sampled = None
    if given.sample is not None:
        ends = given.sample, given.seed, given.temperature
        options = kernels_of(given.chip).compiler_options(recipe)
        drawn = sample(models["FP8"], runs["FP8"], text.context, *ends, options)
        sampled = printable(drawn, sys.stdout.encoding)
        print(
            f"\nThe FP8 model writes (temperature {given.temperature}, seed "
            f"{given.seed}):\n{sampled}"
        )
    plot(runs, title, given.plot)
    if given.json is not None:
        write_json(given.json, given, settings, runs, text, parameters, sampled)
    written = {"picture": given.plot, "results": given.json, "checkpoints": given.checkpoint}
    for what, path in written.items():
        if path is not None:
            print(f"{what}: {Path(path).absolute()}")


if __name__ == "__main__":
    run_script(main)
