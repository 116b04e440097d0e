"""Train steps under remat policies: FP8, and the bfloat16 program that saves the same.

`MODELS` are the layers of `llama.py` and the blocks of `transformer.py`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import llama
import transformer
from cells import BLACKWELL

import jaxfp8 as fp8
from jaxfp8.programs import WireReport, wire_report

GIB = 2**30
AMAXES = fp8.save_fp8_residuals(inputs=False)
both = jax.checkpoint_policies.save_from_both_policies
# What the forward pass saves for the backward pass, in FP8 and in bfloat16. With its amaxes saved,
# a second cast neither reads a tensor twice nor asks other devices.
POLICIES: dict[str, tuple[Any, Any]] = {
    "none": (AMAXES, jax.checkpoint_policies.nothing_saveable),
    "products": (both(llama.KEEP_PRODUCTS, AMAXES), llama.KEEP_PRODUCTS),
    "inputs": (fp8.save_fp8_residuals(), llama.KEEP_INPUTS),
    "no remat": (None, None),
}
# A matmul in bfloat16 whose weight is read in the layout in which it is stored. Users would write
# `with_layout_constraint` by hand for it.
STORED = "bf16, stored layout"
RECIPES = {"bf16": llama.RECIPES["bf16"], STORED: llama.RECIPES["bf16"], **llama.RECIPES}
# On an H200 XLA multiplies tiles in bfloat16. These rows have matmuls that read FP8 tiles: kernels
# in Mosaic, and those of cuDNN for Blackwell.
KERNELS = {
    "blockwise, kernels": (
        llama.RECIPES["blockwise"],
        {"kernels": fp8.Kernels("h200", casts="mosaic", matmuls="mosaic")},
    ),
    "bf16, B200": (llama.RECIPES["bf16"], {"chip": "b200"}),
    "mxfp8, B200": (llama.RECIPES["mxfp8"], {"chip": "b200", "kernels": BLACKWELL}),
}
MESHES = {8: (2, 4), 64: (8, 8), 512: (64, 8)}  # fsdp x tensor
Compiled = jax.stages.Compiled


def is_bf16(name: str) -> bool:
    return name.startswith("bf16")


def baseline(name: str) -> str:
    """The row that a row is compared with."""
    return "bf16, B200" if name.endswith("B200") else "bf16"


def compile_llama(name: str, gpus: int, policy: str) -> Compiled:
    """A train step of llama.py."""
    remat = POLICIES[policy][is_bf16(name)]
    return llama.compile_step(RECIPES[name], *MESHES[gpus], remat=remat, stored=name == STORED)


def compile_transformer(name: str, gpus: int, policy: str) -> Compiled:
    """A train step of transformer.py."""
    recipe, options = KERNELS.get(name) or (RECIPES[name], {"stored": name == STORED})
    remat = POLICIES[policy][is_bf16(name)]
    return transformer.compile_step(recipe, gpus, remat=remat, **options)


class Model(NamedTuple):
    """A model, the numbers of GPUs and the rows that it has, and how its gathers are found."""

    compile: Callable[[str, int, str], Compiled]
    gpus: tuple[int, ...]
    rows: tuple[str, ...]
    layers: int
    gathers: Callable[[WireReport, int], WireReport]


def _of_llama(report: WireReport, gpus: int) -> WireReport:
    found = llama.gathers(report, *MESHES[gpus])
    return WireReport(found["weights"].transfers + found["activations"].transfers)


def _of_transformer(report: WireReport, gpus: int) -> WireReport:
    """The gathers of blocks. The embedding and the head are in bfloat16 in every program."""
    whole = {math.prod(shape) // gpus for shape, _ in transformer.WEIGHTS.values()}
    gathers = report.only(kind="all-gather").transfers
    return WireReport(tuple(t for t in gathers if math.prod(t.shape) in whole))


MODELS = {
    "llama": Model(compile_llama, tuple(MESHES), tuple(RECIPES), llama.LAYERS, _of_llama),
    "transformer": Model(
        compile_transformer,
        (1, 8),
        (*RECIPES, *KERNELS),
        transformer.LAYERS,
        _of_transformer,
    ),
}


def gathered(model: str, step: Compiled, gpus: int) -> dict[str, int]:
    """Bytes of weights and activations that one GPU sends in gathers of a step, by dtype."""
    sums: dict[str, int] = {}
    for transfer in MODELS[model].gathers(wire_report(step), gpus).transfers:
        sums[transfer.dtype] = sums.get(transfer.dtype, 0) + round(transfer.wire_bytes)
    return sums


def check_gathers(model: str, name: str, gpus: int, sums: dict[str, int]) -> None:
    """Raise AssertionError if a weight or an activation is not gathered in FP8."""
    if gpus > 1:
        assert set(sums) == {"bfloat16" if is_bf16(name) else "uint8"}, (model, name, gpus, sums)
