"""A pytest plugin.

It replaces flax's dense layers by ours, with `recipes.identity()`, before flax's tests are
imported.

`--face linen` replaces the layers of flax.linen, `--face nnx` those of flax.nnx. Each test's report
holds how often it called which class of ours.
"""

import functools
from collections import Counter
from collections.abc import Iterator

import flax.linen
import flax.nnx
import pytest

import jaxfp8 as fp8

RECIPE = fp8.recipes.identity()
PLUGS = {
    "linen": fp8.linen.FP8DotGeneral.using(RECIPE),
    "nnx": functools.partial(fp8.nnx.FP8DotGeneral, RECIPE),
}
LAYERS = {
    "linen": {
        "Dense": fp8.linen.FP8Dense,
        "DenseGeneral": fp8.linen.FP8DenseGeneral,
        "Einsum": fp8.linen.FP8Einsum,
    },
    "nnx": {
        "Linear": fp8.nnx.FP8Linear,
        "LinearGeneral": fp8.nnx.FP8LinearGeneral,
        "Einsum": fp8.nnx.FP8Einsum,
    },
}
# Attention stays flax's own; its four projections take our matmul.
ATTENTION = {
    "linen": ("MultiHeadDotProductAttention", "MultiHeadAttention"),
    "nnx": ("MultiHeadAttention",),
}

calls: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--face", choices=LAYERS, required=True, help="whose layers are replaced")


def pytest_configure(config: pytest.Config) -> None:
    face = config.getoption("--face")
    flax_face = {"linen": flax.linen, "nnx": flax.nnx}[face]
    plug = PLUGS[face]
    count_calls({"linen": fp8.linen.FP8DotGeneral, "nnx": fp8.nnx.FP8DotGeneral}[face])
    for name, layer in LAYERS[face].items():
        count_calls(layer)
        setattr(flax_face, name, functools.partial(layer, recipe=RECIPE))
    for name in ATTENTION[face]:
        attention = getattr(flax_face, name)
        setattr(
            flax_face,
            name,
            functools.partial(attention, qkv_dot_general_cls=plug, out_dot_general_cls=plug),
        )


def count_calls(of: type) -> None:
    call = of.__call__

    @functools.wraps(call)
    def counted(self, *arguments, **keywords):
        calls[of.__name__] += 1
        return call(self, *arguments, **keywords)

    of.__call__ = counted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    calls.clear()
    try:
        return (yield)
    finally:
        item.user_properties.extend(calls.items())
