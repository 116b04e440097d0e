"""The results of train_gpt.py: a table, a picture and a JSON file."""

import argparse
import json
import platform
from pathlib import Path

import jax
import numpy as np
from gpt_text import Text
from gpt_training import Run, Settings
from matplotlib.figure import Figure
from rich.table import Table

MEASURED = ("val_loss", "seconds", "compile_seconds")


def table(runs: dict[str, Run], title: str) -> Table:
    """A row for each run, and a row with the difference FP8 - bf16."""
    shown = Table("", "validation loss", "seconds", "compile seconds", title=title)
    for name, run in runs.items():
        shown.add_row(
            name, f"{run.val_loss:.4f}", f"{run.seconds:.1f}", f"{run.compile_seconds:.1f}"
        )
    if "bf16" in runs:
        gaps = (getattr(runs["FP8"], field) - getattr(runs["bf16"], field) for field in MEASURED)
        shown.add_row(
            "gap", *(f"{gap:+.{digits}f}" for gap, digits in zip(gaps, (4, 1, 1), strict=True))
        )
    return shown


def plot(runs: dict[str, Run], title: str, file: str) -> None:
    """Plot the training loss of each run, and below it FP8 - bf16 for each batch."""
    styles = {
        "bf16": {"color": "tab:orange", "lw": 4, "alpha": 0.4},
        "FP8": {"color": "tab:blue", "lw": 1},
    }
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots(
        len(runs), 1, sharex=True, height_ratios=[3, 1][: len(runs)], squeeze=False
    )[:, 0]
    steps = np.arange(1, len(runs["FP8"].losses) + 1)
    for name, run in runs.items():
        axes[0].plot(
            steps, run.losses, label=f"{name}, validation loss {run.val_loss:.4f}", **styles[name]
        )
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


def write_json(
    file: str,
    given: argparse.Namespace,
    settings: Settings,
    runs: dict[str, Run],
    text: Text,
    parameters: int,
    sample: str | None,
) -> None:
    """Write arguments, results and versions. A field is null if it was not requested."""
    result = {
        key: getattr(given, key)
        for key in ("recipe", "framework", "width", "layers", "steps", "seed", "chip")
    }
    result |= {
        "recipe_fields": dict(given.set),
        "learning_rate": settings.learning_rate,
        "schedule_steps": settings.schedule_steps,
        "context": text.context,
        "in_fp8": runs["FP8"].in_fp8,
    }
    for prefix, name in {"": "FP8", "bf16_": "bf16"}.items():
        for field in MEASURED:
            result[prefix + field] = getattr(runs.get(name), field, None)
        result[prefix + "losses"] = runs[name].losses.tolist() if name in runs else None
    result |= {"parameters": parameters, "sample": sample, "jax": jax.__version__}
    result |= {
        "data": given.data or "standard library",
        "sha256": text.sha256,
        "python": platform.python_version(),
    }
    Path(file).write_text(json.dumps(result, indent=2) + "\n")
