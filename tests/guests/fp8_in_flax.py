"""A pytest plugin.

It replaces flax's dense layers by ours, with `recipes.identity()`, before flax's tests are
imported.

`--face linen` replaces the layers of flax.linen, `--face nnx` those of flax.nnx. With `--converted`
the layers stay flax's, and are converted as `fp8.convert` converts those of a model. Each test's
report holds how often it called which class of ours.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator

import flax.linen
import flax.nnx
import pytest
from flax.core import Scope

import jaxfp8 as fp8
from jaxfp8.conversion import _linen
from jaxfp8.conversion._nnx import _give_matmul, _known_of, _obstacle_of
from jaxfp8.conversion._plan import Plan

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
    parser.addoption("--converted", action="store_true", help="convert the layers of flax")


def pytest_configure(config: pytest.Config) -> None:
    # As in our pyproject.toml: another process may be writing the entry. JAX then compiles.
    entry = "Error (reading|writing) persistent compilation cache entry"
    config.addinivalue_line("filterwarnings", f"ignore:{entry}:UserWarning")
    face = config.getoption("--face")
    flax_face = {"linen": flax.linen, "nnx": flax.nnx}[face]
    plug = PLUGS[face]
    count_calls({"linen": fp8.linen.FP8DotGeneral, "nnx": fp8.nnx.FP8DotGeneral}[face])
    if config.getoption("--converted"):
        for name in (*LAYERS["nnx"], *ATTENTION["nnx"]) if face == "nnx" else ():
            kind = getattr(flax_face, name)
            setattr(flax_face, name, functools.partial(made_and_converted, kind))
        has_flag = Scope.has_flag  # each run in these tests is that of the converted model
        Scope.has_flag = lambda scope, key: key == _linen._OURS or has_flag(scope, key)
        return
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


def made_and_converted(kind: type, *arguments: object, **keywords: object) -> object:
    """A layer of flax.nnx whose matmuls are ours, as in a model that `fp8.convert` made."""
    layer = kind(*arguments, **keywords)
    for _, module in flax.nnx.iter_modules(layer):
        known = _known_of(module, ())
        if known is not None and known.size is not None and not _obstacle_of(module, known):
            _give_matmul(module, known, known.plug(RECIPE))
    return layer


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
    convert = item.config.getoption("--converted") and item.config.getoption("--face") == "linen"
    plan = Plan(recipe=RECIPE, keep=())
    try:
        with _linen._run(plan, 0) if convert else contextlib.nullcontext():
            return (yield)
    finally:
        item.user_properties.extend(calls.items())
