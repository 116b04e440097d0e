"""Estimates for TPUs: the figures of docs/tpu.md, beside those of the chip's own compiler."""

import json
import re
from pathlib import Path

import pytest

import jaxfp8 as fp8

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tpu.md").read_text()
CYCLES = json.loads((ROOT / "benchmarks/results/tpu.json").read_text())
COMPILER = {
    row["contender"]: row["cycles"]
    for row in CYCLES["rows"]
    if (row["case"], row["chip"], row["vmem_kib"]) == ("layer", "tpu7x", "default")
}
SHAPE = tuple(CYCLES["shape"])
CHIPS = ("tpu7x", "v6e", "v5p", "v5e")


def speedup(shape, name, chip):
    recipe, kernels = getattr(fp8.recipes, name)(), fp8.Kernels(chip)
    return fp8.plan.roofline(shape, recipe=recipe, kernels=kernels).speedup


def test_figures_of_the_page():
    shapes = re.findall(r"^\| (\d+), (\d+), (\d+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(shapes) == 7
    for *shape, said in shapes:
        assert f"{speedup(tuple(map(int, shape)), 'delayed', 'tpu7x'):.2f}" == said, shape
    four = r"(?:[\d.]+ \| ){3}[\d.]+"
    rows = re.findall(rf"^\| `(\w+)\(\)` \| (below )?([\d.]+) \| ({four}) \|$", PAGE, re.M)
    assert len(rows) == 5
    for name, _, compiler, said in rows:
        assert [f"{speedup(SHAPE, name, chip):.2f}" for chip in CHIPS] == said.split(" | "), name
        assert f"{COMPILER['bfloat16'] / COMPILER[name]:.2f}" == compiler, name


def test_a_block_of_llama():
    """8192 tokens through q, k, v, o, gate, up and down of a Llama 3 8B block."""
    layers = {(4096, 4096): 2, (4096, 1024): 2, (4096, 14336): 2, (14336, 4096): 1}
    bf16 = in_fp8 = 0.0
    for shape, count in layers.items():
        total = fp8.plan.roofline(
            (8192, *shape), recipe=fp8.recipes.delayed(), kernels=fp8.Kernels("tpu7x")
        ).total
        bf16, in_fp8 = bf16 + count * total.bf16.seconds, in_fp8 + count * total.recipe.seconds
    assert f"are estimated to be {bf16 / in_fp8:.2f} times" in " ".join(PAGE.split())


def test_experts():
    kernels, recipe = fp8.Kernels("tpu7x"), fp8.recipes.delayed()
    said = [
        fp8.plan.roofline((16 * tokens, 4096, 2048), recipe=recipe, kernels=kernels, groups=16)
        for tokens in (4096, 512)
    ]
    words = "{:.2f} by `fp8.plan.roofline`. With 512 it hardly pays: 1.09, 1.04 and {:.2f}."
    assert words.format(*(each.speedup for each in said)) in " ".join(PAGE.split())


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "blockwise", "mxfp8"])
def test_near_to_the_compiler_s_estimate(name):
    by_compiler = COMPILER["bfloat16"] / COMPILER[name]
    assert speedup(SHAPE, name, "tpu7x") == pytest.approx(by_compiler, rel=0.1)


def test_tpus_without_fp8_matmuls_widen_operands():
    m, k, n = SHAPE
    # An amax and a cast read 2 bytes each, and the cast writes 1. Delayed scaling has one read.
    for recipe, bytes_a_value in ((fp8.recipes.current(), 5), (fp8.recipes.delayed(), 3)):
        estimate = fp8.plan.roofline(SHAPE, recipe=recipe, kernels=fp8.Kernels("v6e"))
        assert estimate.fprop.how == "bf16, operands widened in the matmul"
        assert estimate.fprop.recipe.bytes == m * k + k * n + 2 * m * n
        assert estimate.casts.recipe.bytes == bytes_a_value * (m * k + k * n + m * n)
