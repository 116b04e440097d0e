"""Golden choices: which kernels run, and the estimates behind them, for all chips and recipes.

    python tests/golden/choices.py           compare with choices.json
    python tests/golden/choices.py --write   remake choices.json

Another choice is another kernel, so other bits on a GPU. On a CPU no bits change. The file holds
answers in full. `Kernels.choices` traces kernels that need jax 0.11. All other answers are the same
on every jax.
"""

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from inputs import RECIPES as FP8_RECIPES

import jaxfp8 as fp8

FILE = Path(__file__).with_name("choices.json")
TRACES_KERNELS = jax.__version_info__ >= (0, 11)
Answers: TypeAlias = dict[str, str]

RECIPES = FP8_RECIPES | {"identity": fp8.recipes.identity()}
PARTS = ("x", "w", "g", "fprop", "dgrad", "wgrad")
CHIPS = (
    None,
    "cpu",
    "tpu7x",
    "v6e",
    "v5p",
    "v5e",
    "mi300x",
    "a100",
    "l4",
    "l40s",
    "h100",
    "h200",
    "b200",
)
SHAPES = (
    # A layer of Llama 8B, from the decoding of one token to training.
    *((tokens, 4096, 4096) for tokens in (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)),
    *itertools.product((1, 8192), (4096,), (6144, 14336, 128256)),
    *itertools.product((1, 8192), (14336,), (4096,)),
    # Llama 70B.
    *itertools.product((16, 4096), (8192,), (10240, 57344)),
    *itertools.product((16, 4096), (28672,), (8192,)),
    *((size, size, size) for size in (16, 128, 256, 512, 1024, 2048, 16384)),
    # Sizes that no tile divides.
    *((1, 1, 1), (3, 5, 7), (17, 33, 65), (127, 129, 255), (1000, 1000, 1000), (8200, 4096, 4096)),
    # One axis is small: adapters, routers, and matrices with one column.
    *((8192, 16, 4096), (8192, 4096, 16), (8192, 4096, 1), (8192, 1, 4096)),
)
COPIES = (
    (fp8.PerTensor(),),
    (fp8.PerAxis(1),),
    *((fp8.PerBlock(tile),) for tile in ((1, 32), (32, 1), (32, 32), (1, 128), (128, 128))),
    (fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1))),
)
GROUPED = (((65536, 4096, 2048), 8), ((65536, 2048, 4096), 64), ((512, 4096, 14336), 8))
TRACED = ((8192, 4096, 14336), (128, 4096, 4096))
_TILED = (
    "blockwise", "blockwise, float32 scales", "blockwise, w in 1D tiles", "mxfp8",
    "mxfp8, w in 2D tiles",
)  # fmt: skip
_ESTIMATED = ("delayed", "current", "rowwise", *_TILED, "static", "rowwise, high_precision_wgrad")


def text(shape: tuple[int, ...]) -> str:
    """A shape as the file names it."""
    return "x".join(map(str, shape))


def backends(chip: str | None, recipe: fp8.Recipe) -> Answers:
    """`Kernels.backends`: the names that are tried for each matmul and cast, in this order."""
    answers = {}
    for shape in SHAPES:
        parts: dict[str, list[str]] = {}
        found = fp8.Kernels(chip).backends(recipe, shape)
        for part in PARTS:
            parts.setdefault(" then ".join(getattr(found, part)), []).append(part)
        answer = "; ".join(f"{' '.join(each)}: {names}" for names, each in parts.items())
        answers[text(shape)] = answer
    return answers


def casts(chip: str | None) -> Answers:
    """`Kernels.for_cast`: the backends of a cast without a recipe."""
    kernels = fp8.Kernels(chip)
    return {
        f"{values} values, {' and '.join(map(repr, copies))}": " then ".join(
            kernels.for_cast(copies, values)
        )
        for copies, values in itertools.product(COPIES, (1, 2**12, 2**20, 2**28))
    }


def compiler_options(chip: str) -> Answers:
    """`Kernels.compiler_options`: they decide which kernels XLA takes."""
    kernels = fp8.Kernels(chip)
    return {name: str(kernels.compiler_options(recipe)) for name, recipe in RECIPES.items()}


def roofline(chip: str, recipe: fp8.Recipe) -> Answers:
    """`fp8.plan.roofline` of XLA's program for a layer, and of experts by the chosen kernels."""
    by_xla, chosen = fp8.Kernels(chip, casts="xla", matmuls="xla"), fp8.Kernels(chip)
    estimate = functools.partial(fp8.plan.roofline, recipe=recipe)
    estimates = {text(shape): estimate(shape, kernels=by_xla) for shape in TRACED} | {
        f"{text(shape)}, {groups} groups": estimate(shape, kernels=chosen, groups=groups)
        for shape, groups in GROUPED
    }
    answers = {}
    for case, estimated in estimates.items():
        parts = [(name, getattr(estimated, name)) for name in ("fprop", "dgrad", "wgrad", "casts")]
        answers[case] = f"{estimated.speedup:.3f}x of bf16: " + "; ".join(
            f"{name} {1e6 * part.recipe.seconds:.1f} us, {part.how}" for name, part in parts
        )
    return answers


def choices(chip: str, recipe: fp8.Recipe) -> Answers:
    """`Kernels.choices`: the backend that can do each case, with the estimates of all."""
    answers = {}
    for shape in TRACED:
        found = fp8.Kernels(chip).choices(recipe, shape)
        for part in PARTS:
            choice = getattr(found, part)
            answers[f"{text(shape)} {part}"] = f"{choice.backend}: {choice.why}"
    return answers


_MADE_FOR = ("h200", "b200")  # jaxfp8 has kernels for these; "h100" takes those of "h200"
TABLE: dict[str, Callable[[], Answers]] = (
    {
        f"backends / {chip} / {recipe}": functools.partial(backends, chip, RECIPES[recipe])
        for chip, recipe in itertools.product(CHIPS, RECIPES)
    }
    | {f"casts / {chip}": functools.partial(casts, chip) for chip in CHIPS}
    | {
        f"compiler_options / {chip}": functools.partial(compiler_options, chip)
        for chip in CHIPS
        if chip is not None
    }
    | {
        f"roofline / {chip} / {recipe}": functools.partial(roofline, chip, RECIPES[recipe])
        for chip, recipe in (
            *itertools.product(_MADE_FOR, _ESTIMATED),
            *itertools.product(("a100", "l4", "l40s", "h100"), ("delayed", "rowwise", "blockwise")),
        )
    }
    | {
        f"choices / {chip} / {recipe}": functools.partial(choices, chip, RECIPES[recipe])
        for chip, recipe in itertools.product(_MADE_FOR, _TILED)
    }
)
"""What finds the answers of each group of the file."""


def kind(name: str) -> str:
    """The kind of a group. Groups of one kind have the same cases."""
    return name.partition(" / ")[0]


KINDS = tuple(dict.fromkeys(map(kind, TABLE)))
_EVERY = "every case"


def read(file: Path) -> dict[str, Answers]:
    """The answers of each group of a file."""
    stored = json.loads(file.read_text())
    cases = stored.pop("cases")
    return {
        name: {
            case: answer
            for answer, of in group.items()
            for case in (cases[kind(name)] if of == _EVERY else of)
        }
        for name, group in stored.items()
    }


def written(answers: dict[str, Answers]) -> str:
    """JSON with one answer and its cases a line, so that a diff shows what changed."""
    cases = {kind(name): list(group) for name, group in answers.items()}
    groups = {"cases": {name: cases[name] for name in KINDS}}
    for name, group in answers.items():
        by_answer: dict[str, list[str]] = {}
        for case, answer in group.items():
            by_answer.setdefault(answer, []).append(case)
        of_all = list(group) == cases[kind(name)] and len(by_answer) == 1
        groups[name] = dict.fromkeys(by_answer, _EVERY) if of_all else by_answer
    rows = []
    for name, group in groups.items():
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in group.items()]
        inside = lines[0] if len(lines) == 1 else "\n  " + ",\n  ".join(lines) + "\n"
        rows.append(f"{json.dumps(name)}: {{{inside}}}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def differences(name: str, golden: Answers, now: Answers) -> list[str]:
    """One line for each case that has another answer."""
    return [
        f"{name} / {case}:\n  was {golden.get(case, 'absent')}\n  is  {now.get(case, 'absent')}"
        for case in dict.fromkeys((*golden, *now))
        if golden.get(case) != now.get(case)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="remake the file of golden choices")
    given = parser.parse_args()
    print(f"{fp8.__file__}, jax {jax.__version__}")
    if given.write:
        if not TRACES_KERNELS:
            parser.error(f"jax {jax.__version__} traces no kernel; write with jax 0.11 or later")
        FILE.write_text(written({name: find() for name, find in TABLE.items()}))
        return 0
    golden, lines = read(FILE), []
    for name in dict.fromkeys((*golden, *TABLE)):
        if kind(name) == "choices" and not TRACES_KERNELS:
            continue
        lines += differences(name, golden.get(name, {}), TABLE.get(name, dict)())
    print("\n".join(lines) or "all choices are equal")
    if not TRACES_KERNELS:
        print(f"jax {jax.__version__} traces no kernel, so `Kernels.choices` is not compared")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
