"""The chip that an example runs on, and whether its matmuls run in FP8.

`fp8.Kernels` never looks for a chip, so that all processes of a run compile the same program. A
script looks once, and gives the name to every layer.
"""

import argparse
import re
from typing import Any

import jax

import jaxfp8 as fp8

TPUS = {"TPU7x": "tpu7x", "TPU v6 lite": "v6e", "TPU v5": "v5p", "TPU v5 lite": "v5e"}
"""What jax calls TPUs, and the names that `fp8.Kernels` has for them."""


def add_chip(parser: argparse.ArgumentParser) -> None:
    """Add --chip, which `kernels_of` reads."""
    text = "chip that decides kernels and XLA's options: h200, tpu7x, ... (default: this machine's)"
    parser.add_argument("--chip", help=text)


def chip_here() -> str:
    """The name that `fp8.Kernels` has for the first device of jax.

    Raises:
      ValueError: if it has none.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "cpu"
    if device.device_kind in TPUS:
        return TPUS[device.device_kind]
    for word in re.split("[ -]", device.device_kind.lower()):  # "NVIDIA A100-SXM4-80GB"
        try:
            return fp8.Kernels(word).chip
        except ValueError:
            continue
    raise ValueError(
        f"the chip of {device.device_kind!r} has no name in fp8.Kernels; give the most similar "
        "one, as in --chip l4 for GPUs of compute capability 8.9, or --chip a100 for those without "
        "FP8 matmuls."
    )


def kernels_of(chip: str | None) -> fp8.Kernels:
    """The kernels of --chip, or else of this machine.

    Raises:
      ValueError: if `fp8.Kernels` does not know the chip.
    """
    try:
        return fp8.Kernels(chip_here() if chip is None else chip)
    except ValueError as error:
        raise ValueError(str(error) if chip is None else f"--chip {chip}: {error}") from None


def describe(kernels: fp8.Kernels) -> str:
    """One line: the chip of the kernels, and the device that runs the program."""
    device, chip = jax.devices()[0], kernels.chip
    if device.platform == "cpu":
        elsewhere = " on a CPU: XLA computes there what the kernels would"
        return f"chip: {chip}{'' if chip == 'cpu' else elsewhere}"
    return f"chip: {chip}, on {device.device_kind}"


def print_matmuls(name: str, compiled: Any, recipe: fp8.Recipe, kernels: fp8.Kernels) -> bool:
    """Print whether the recipe's matmuls of a compiled step run in FP8. Return it, too."""
    if recipe.is_identity:
        print(f"{name}: the recipe {recipe.name} asks for no FP8", flush=True)
        return False
    try:
        fp8.programs.assert_fp8_gemms(compiled)  # reads the program that XLA made
    except AssertionError as error:
        first_line = str(error).partition("\n")[0]
        print(f"{name}: warning: {first_line} {_why(kernels)}", flush=True)
        return False
    print(f"{name}: all matmuls of the recipe {recipe.name} run in FP8", flush=True)
    return True


def _why(kernels: fp8.Kernels) -> str:
    """Why matmuls are in high precision, or where to look."""
    chip = kernels.chip
    if jax.devices()[0].platform == "cpu":
        return "CPUs have no FP8 matmuls: the losses are those of FP8, the speed is not."
    if chip == "cpu":
        return "--chip cpu asks for no FP8 matmuls; leave it out."
    return f"fp8.Kernels({chip!r}).choices(recipe, shape) prints why."
