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
from jaxfp8.jaxprs._flops import OTHER, flops_of, layer_scope

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

    found, _ = flops_of(jax.make_jaxpr(branches)(jnp.ones((2, 4)), jnp.ones((4, 4))).jaxpr)
    assert found == {"a": 2 * 2 * (2 * 4 * 4)}
    assert OTHER not in found


def test_the_table():
    coverage = coverage_of()
    lines = coverage.table(all=True).splitlines()
    assert lines[0].split() == ["layer", "type", "shape", "share", "recipe", "reason"]
    assert len(lines) == len(coverage) + 3
    assert "kept: lm_head" in next(line for line in lines if line.startswith("head"))
    assert lines[-2].startswith("(no layer)")
    assert lines[-1].endswith(": 19 of 20 layers that can")  # an embedding cannot
    console = rich.console.Console(file=io.StringIO(), width=200)
    console.print(coverage)
    printed = console.file.getvalue()
    assert all(line.split()[0] in printed for line in str(coverage).splitlines()[1:-2])
    assert lines[-1] in printed
    with pytest.raises(KeyError, match=r"no layer has the path 'up'\. Paths: \['embedding', "):
        coverage["up"]


def test_equal_blocks_are_one_line():
    """Also in nnx, and only where all but the number is equal. Their shares are added."""
    name = "MultiHeadDotProductAttention_0"
    parts = [f"{name}/{part}" for part in ("query", "key", "value", "out")] + ["up", "down"]
    lines = str(coverage_of()).splitlines()[1:-2]
    assert [line.split()[0] for line in lines] == [
        "embedding", *(f"blocks_0..2/{part}" for part in parts), "mix", "head"
    ]  # fmt: skip
    (up,) = (line.split() for line in lines if "/up" in line)
    share = 3 * coverage_of()["blocks_0/up"].flops / coverage_of().flops
    assert up == ["blocks_0..2/up", "Dense", "(16,", "32,", "64)", f"{share:.0%}", "current"]
    _, coverage = fp8.convert(
        NNXLM(nnx.Rngs(0), depth=11, attention=False), CURRENT, inputs=(TOKENS,),
        rules=[("blocks/(3|10)/up", None)],
    )  # fmt: skip
    ups = [line.split()[0] for line in str(coverage).splitlines() if "/up" in line]
    assert ups == ["blocks/0..2/up", "blocks/3/up", "blocks/4..9/up", "blocks/10/up"]
    assert sum("/down" in line for line in coverage.table().splitlines()) == 1
    assert len(coverage.table(all=True).splitlines()) == len(coverage) + 2


@pytest.mark.parametrize("kind", ["linen", "nnx", "nnx, no inputs"])
def test_rows_are_in_the_order_of_calls(kind):
    class Net(nnx.Module):
        def __init__(self):
            for name in ("z", "b", "a"):  # flax sorts them by name
                setattr(self, name, nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
            self.table = nnx.Embed(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            return self.a(self.z(self.b(self.table(tokens))))

    class Linen(nn.Module):
        def setup(self):
            self.z, self.b, self.a, self.table = (*(nn.Dense(8) for _ in "zba"), nn.Embed(8, 8))

        __call__ = Net.__call__

    model, inputs = Linen() if kind == "linen" else Net(), (jnp.zeros((2, 8), jnp.int32),)
    given = None if kind == "nnx, no inputs" else inputs
    _, coverage = fp8.convert(model, CURRENT, inputs=given, keep=())
    calls = ["table", "b", "z", "a"]
    assert [row.path for row in coverage] == (calls if given else ["z", "b", "a", "table"])


class Raw(nn.Module):
    """Parameters that are added, that are queries, and one that is multiplied by."""

    multiplies: bool = True

    @nn.compact
    def __call__(self, x, kernel=None):
        probe = self.param("probe", nn.initializers.normal(), (1, 8))
        scores = nn.Dense(8, name="query")(probe) @ nn.Dense(8, name="key")(x).T
        position = self.param("position", nn.initializers.normal(), (2, 8))
        position = position.at[0].add(1.0)  # JAX keeps a program for it, without a matmul
        x = x + jax.image.resize(position, (4, 8), "bilinear") * scores.T  # by a matmul
        if self.multiplies:
            w = self.param("w", nn.initializers.normal(), (8, 4, 2))
            x = jax.jit(lambda w: x @ w.astype(jnp.float32).reshape(8, 8))(w)
        return x


class NNXRaw(nnx.Module):
    def __init__(self, multiplies):
        shapes = {"probe": (1, 8), "position": (2, 8), "w": (8, 4, 2)}
        self.own = nnx.Dict({name: nnx.Param(jnp.ones(shape)) for name, shape in shapes.items()})
        self.query, self.key = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))
        self.multiplies = multiplies

    def __call__(self, x):
        scores = self.query(self.own["probe"][...]) @ self.key(x).T
        x = x + jax.image.resize(self.own["position"][...], (4, 8), "bilinear") * scores.T
        return x @ self.own["w"][...].reshape(8, 8) if self.multiplies else x


@pytest.mark.parametrize("kind", [Raw, NNXRaw])
def test_only_what_multiplies_has_a_row(kind):
    x = jnp.ones((4, 8))
    for multiplies in (True, False):
        _, coverage = fp8.convert(kind(multiplies), CURRENT, inputs=(x,))
        own = ["own/w" if kind is NNXRaw else "w"] if multiplies else []
        assert [row.path for row in coverage] == ["query", "key", *own]
        assert all(row.recipe for row in coverage)
        assert str(coverage).endswith(
            "3 of 3 layers that can" if multiplies else "2 of 2 layers that can"
        )


def test_a_scan_multiplies_by_parameters_and_carries_them():
    """The first carry is a parameter, and later ones are activations."""

    class RNN(nn.Module):
        @nn.compact
        def __call__(self, xs):
            xs = nn.Dense(8)(xs)
            w = self.param("w", nn.initializers.normal(), (8, 8))
            return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), Start()(), xs)[0]

    class Start(nn.Module):
        @nn.compact
        def __call__(self):
            return self.param("start", nn.initializers.normal(), (1, 8))

    _, coverage = fp8.convert(RNN(), CURRENT, inputs=(jnp.ones((3, 1, 8)),))
    assert [(row.path, row.recipe) for row in coverage] == [
        ("Dense_0", "current"),
        ("w", "current"),
    ]


def test_a_convolution_and_a_head_that_code_of_the_model_computes():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(16, 8, name="embed")
            x = nn.Dense(8)(embed(tokens))
            x = Causal(name="conv")(x)
            return x @ embed.embedding.T

    class Causal(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (2, 8, 8))
            return jax.lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
            )

    _, coverage = fp8.convert(Net(), CURRENT, inputs=(TOKENS % 16,))
    assert coverage["conv/w"].reason == "a convolution, which has no FP8 kernel"
    assert coverage["embed"].reason == "an embedding, a lookup"
    assert coverage["embed/embedding"].reason == "kept: lm_head"


def test_operations_of_grouped_matmuls():
    groups = jnp.array([2, 0, 4], jnp.int32)
    x, w = jnp.ones((6, 4)), jnp.ones((3, 4, 5))
    forward = lambda x, w: jax.lax.ragged_dot(x, w, groups)
    assert flops_of(jax.make_jaxpr(forward)(x, w).jaxpr)[0][OTHER] == 2 * 6 * 4 * 5
    both = jax.make_jaxpr(jax.grad(lambda w: forward(x, w).sum()))(w).jaxpr
    assert flops_of(both)[0][OTHER] == 2 * 2 * 6 * 4 * 5
