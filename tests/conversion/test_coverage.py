"""The coverage table: its figures, and how it is printed."""

import functools
import io

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import rich.console
from flax import nnx
from zoo import LM, NNXLM, TOKENS, VOCABULARY, WIDTH

import jaxfp8 as fp8
from jaxfp8.conversion._flops import OTHER, flops_of, layer_scope

CURRENT = fp8.recipes.current()


@functools.cache
def coverage_of(*fields):
    return fp8.convert(LM(*fields), CURRENT, inputs=(TOKENS,))[1]


def test_operations_are_those_of_a_count_by_hand():
    coverage = coverage_of()
    tokens, length, blocks = TOKENS.size, TOKENS.shape[1], 3
    projections = 4 * 2 * tokens * WIDTH * WIDTH
    mlp = 2 * 2 * tokens * WIDTH * 64
    scores = 2 * 2 * tokens * length * WIDTH  # of all heads, and their product with the values
    mix, head = 2 * tokens * WIDTH * WIDTH, 2 * tokens * WIDTH * VOCABULARY
    in_fp8 = blocks * (projections + mlp) + mix
    assert coverage.other_flops == blocks * scores
    assert coverage.flops == in_fp8 + head + blocks * scores
    assert coverage.share == in_fp8 / coverage.flops


@pytest.mark.parametrize("kind", ["scan", "remat", "jit", "shared loop", "vmap"])
def test_blocks_count_as_often_as_they_run(kind):
    # Scan also counts what has no kernel, the scores of attention. They take most of a trace.
    attention = kind == "scan"
    loop, other = (coverage_of(each, 3, attention) for each in ("loop", kind))
    assert (other.flops, other.other_flops) == (loop.flops, loop.other_flops)
    assert other.share == loop.share


def test_nnx_models_have_the_figures_of_linen():
    linen = coverage_of()
    for scan in (False, True):
        model = nnx.eval_shape(lambda scan=scan: NNXLM(nnx.Rngs(0), scan=scan))
        _, coverage = fp8.convert(model, CURRENT, inputs=(TOKENS,))
        assert (coverage.flops, coverage.share) == (linen.flops, linen.share)


def test_convolutions_and_branches():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, image):
            x = nn.Conv(8, (3, 3))(image)
            return nn.Dense(16, name="up")(x.reshape(len(x), -1))

    _, coverage = fp8.convert(Net(), CURRENT, inputs=(jnp.ones((2, 4, 4, 3)),))
    assert coverage["Conv_0"].reason == "a convolution, which has no FP8 kernel"
    assert coverage.other_flops == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)
    assert coverage["up"].flops == 2 * 2 * (4 * 4 * 8) * 16

    def branches(x, w):
        with layer_scope("a"):
            return jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)

    found = flops_of(jax.make_jaxpr(branches)(jnp.ones((2, 4)), jnp.ones((4, 4))).jaxpr)
    assert found == {"a": 2 * 2 * (2 * 4 * 4)}
    assert OTHER not in found


def test_the_table():
    coverage = coverage_of()
    lines = str(coverage).splitlines()
    assert lines[0].split() == ["layer", "type", "shape", "share", "recipe", "reason"]
    assert len(lines) == len(coverage) + 3
    assert "kept: lm_head" in next(line for line in lines if line.startswith("head"))
    assert lines[-2].startswith("(no layer)")
    assert lines[-1].endswith(": 19 of 21 layers")
    console = rich.console.Console(file=io.StringIO(), width=200)
    console.print(coverage)
    printed = console.file.getvalue()
    assert all(row.path in printed for row in coverage)
    assert lines[-1] in printed
    with pytest.raises(KeyError, match=r"no layer has the path 'up'\. Paths: \['embedding', "):
        coverage["up"]
