"""Explicit meshes with axes of size 1.

The answer of one device, and the types of `jax.lax.dot_general`.

One model runs on every mesh, so its specs name axes that a small mesh does not split. Data are
integers, so every sum is exact. Values must have the same bits as on one device.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes.recipes import ALL

import jaxfp8 as fp8
from jaxfp8.linen import FP8Dense
from jaxfp8.sharding import MeshRoles, Shard

ROLES = MeshRoles(data="data", fsdp="fsdp", tensor="tensor")
BATCH = ("data", "fsdp")
SIZES = [(4, 1, 1), (1, 4, 1), (1, 1, 1), (2, 2, 1), (4, 1, 2), (1, 4, 2)]
IDENTITY = fp8.recipes.identity()
RECIPES = ALL | {"blockwise of 128": fp8.recipes.blockwise(), "mxfp8 of 32": fp8.recipes.mxfp8()}


class Case(NamedTuple):
    """x and w, how they lie, and the product."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    x_spec: P
    w_spec: P
    contracted: tuple[tuple[int, ...], tuple[int, ...]] = ((1,), (0,))
    shards: dict[str, Shard] | None = None
    out: P | None = None


# Eight rows in tiles of 2: as many tiles as devices split them.
MATRICES = {
    "batch": Case((8, 8), (8, 8), P(BATCH, None), P(None, "tensor")),
    "batch, fsdp first": Case((8, 8), (8, 8), P(("fsdp", "data"), None), P(None, "tensor")),
    "w by fsdp and tensor": Case(
        (8, 8), (8, 8), P(BATCH, None), P("fsdp", "tensor"), shards={"w_shard": Shard(0, "fsdp")}
    ),
    "w by tensor and fsdp": Case(
        (8, 8),
        (8, 8),
        P(BATCH, "tensor"),
        P("tensor", "fsdp"),
        shards={"w_shard": Shard(1, "fsdp")},
        out=P(BATCH, None),
    ),
    "both gathered": Case(
        (16, 8),
        (8, 8),
        P((*BATCH, "tensor"), None),
        P("fsdp", "tensor"),
        shards={"x_shard": Shard(0, "tensor"), "w_shard": Shard(0, "fsdp")},
    ),
}
# Axes that are merged into one for tiles of 32.
MERGED = {
    "heads": Case(
        (4, 32, 64), (64, 8, 16), P(BATCH, None, None), P(None, "tensor", None), ((2,), (0,))
    ),
    "heads, split within": Case(
        (4, 32, 64), (64, 2, 16), P(BATCH, None, None), P(None, None, "tensor"), ((2,), (0,))
    ),
    "tokens": Case((4, 16, 64), (64, 64), P("data", "tensor", None), P(None, None), ((2,), (0,))),
    "contracted": Case(
        (4, 32, 8, 16),
        (8, 16, 64),
        P(BATCH, None, "tensor", None),
        P("tensor", None, None),
        ((2, 3), (0, 1)),
        out=P(BATCH, None, None),
    ),
}


OTHERS = {
    "512 rows": Case((512, 128), (128, 128), P(BATCH, None), P(None, "tensor")),
    "contracted by tensor": Case(
        (8, 8), (8, 8), P(BATCH, "tensor"), P("tensor", None), out=P(BATCH, None)
    ),
}
CASES = MATRICES | MERGED | OTHERS


def mesh(sizes):
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(
        sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3, devices=devices
    )


def integers(seed, shape):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def step(recipe, case, x, w, g, *, on_mesh):
    """y, dx and dw for a gradient of y."""
    state = fp8.freeze(fp8.init_state(recipe)) if recipe.rows else None
    how: dict[str, Any] = {**(case.shards or {}), "out_sharding": case.out} if on_mesh else {}
    dot = functools.partial(
        fp8.dot_general,
        dimension_numbers=(case.contracted, ((), ())),
        recipe=recipe,
        state=state,
        **how,
    )
    y, pull = jax.vjp(dot, x, w)
    return y, *pull(jax.sharding.reshard(g, jax.typeof(y).sharding) if on_mesh else g)


@functools.cache
def expected(recipe, name):
    case = CASES[name]
    x, w = integers(0, case.x), integers(1, case.w)
    y = jax.eval_shape(lambda x, w: lax.dot_general(x, w, (case.contracted, ((), ()))), x, w)
    operands = x, w, integers(2, y.shape)
    run = jax.jit(functools.partial(step, RECIPES[recipe], case, on_mesh=False))
    return operands, jax.device_get(run(*operands))


def check(recipe, name, sizes):
    case, (operands, wanted) = CASES[name], expected(recipe, name)
    with jax.set_mesh(mesh(sizes)):
        lie = [NamedSharding(mesh(sizes), spec) for spec in (case.x_spec, case.w_spec)]
        placed = [*jax.device_put([*operands[:2]], lie), operands[2]]
        types = jax.eval_shape(functools.partial(step, IDENTITY, case, on_mesh=True), *placed)
        results = jax.jit(functools.partial(step, RECIPES[recipe], case, on_mesh=True))(*placed)
    for result, of_lax, want in zip(results, types, wanted, strict=True):
        assert jax.typeof(result).sharding.spec == of_lax.sharding.spec
        np.testing.assert_array_equal(result, want)


# Each case, and each of two meshes with each of three recipes.
DEFAULT = {
    ("batch", "blockwise", (4, 1, 2)),
    ("batch", "rowwise", (1, 1, 1)),
    ("batch, fsdp first", "mxfp8_2d", (4, 1, 2)),
    ("w by fsdp and tensor", "rowwise", (4, 1, 2)),
    ("w by tensor and fsdp", "blockwise", (1, 1, 1)),
    ("both gathered", "mxfp8_2d", (1, 1, 1)),
}


def rows(cases, recipes):
    for name in cases:
        for recipe in recipes:
            for sizes in SIZES:
                marks = () if (name, recipe, sizes) in DEFAULT else (pytest.mark.slow,)
                yield pytest.param(name, recipe, sizes, id=f"{name}-{recipe}-{sizes}", marks=marks)


TILED = ["blockwise", "mxfp8", "mxfp8_2d"]


@pytest.mark.parametrize(
    ("name", "recipe", "sizes"), list(rows(MATRICES, [*TILED, "rowwise", "current", "delayed"]))
)
def test_matmuls(name, recipe, sizes):
    # Before, of (4, 1, 2) tiles of "batch": "mul got incompatible shardings for broadcasting:
    # (('data', 'fsdp'), None), ('data', None)".
    check(recipe, name, sizes)


MERGED_ON = {
    ("heads", (4, 1, 2)),
    ("heads, split within", (2, 1, 1)),
    ("tokens", (2, 1, 1)),
    ("contracted", (1, 1, 1)),
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            name, sizes, id=f"{name}-{sizes}",
            marks=() if (name, sizes) in MERGED_ON else pytest.mark.slow,
        )
        for name in MERGED
        for sizes in ((2, 1, 1), (4, 1, 2), (1, 4, 1), (1, 1, 1))
    ],
)  # fmt: skip
def test_merged_axes(name, sizes):
    # Before, on (2, 1, 1): y of "tokens" had the type P(('data', 'tensor'), None, None), and
    # "heads, split within" was refused, "This reshape is not supported".
    if sizes[2] > 1 and name in ("tokens", "heads, split within"):
        pytest.skip("devices split an axis that is merged into another")
    check("mxfp8 of 32", name, sizes)


def test_a_preset():
    """Its tiles of 128: four of 512 rows, one on each of four devices."""
    check("blockwise of 128", "512 rows", (4, 1, 1))


def test_float32_scales_where_one_device_has_all_of_what_is_contracted():
    # Before: "an Explicit mesh splits over 'tensor': tiles are multiplied one after the other".
    check("blockwise_f32", "contracted by tensor", (1, 1, 1))


@functools.cache
def quantizing(tile):
    """To FP8 and back: on one device one program for all meshes."""
    return jax.jit(lambda x: (q := fp8.quantize(x, fp8.E4M3, fp8.PerBlock(tile)), q.dequantize()))


TILES = ((1, 2), (2, 1), (2, 2))


@pytest.mark.parametrize(
    ("tile", "sizes"),
    [
        pytest.param(tile, sizes, marks=() if i % 3 == j else pytest.mark.slow)
        for j, tile in enumerate(TILES)
        for i, sizes in enumerate(SIZES)  # each mesh once
    ],
    ids=str,
)
def test_quantize_and_dequantize(tile, sizes):
    """7 columns: the last tile is ragged where no device splits them."""
    spec = P(BATCH, None if sizes[2] > 1 else "tensor")
    x = np.random.default_rng(3).standard_normal((8, 7)).astype(np.float32)
    run = quantizing(tile)
    q, wide = run(x)
    with jax.set_mesh(mesh(sizes)):
        mine, my_wide = run(jax.device_put(x, NamedSharding(mesh(sizes), spec)))
        assert jax.typeof(mine.values).sharding.spec == jax.typeof(my_wide).sharding.spec == spec
        assert jax.typeof(mine.scale).sharding.spec == fp8.sharding.quantized_specs(q, spec).scale
    np.testing.assert_array_equal(mine.values.view(jnp.uint8), q.values.view(jnp.uint8))
    np.testing.assert_array_equal(mine.scale, q.scale)
    np.testing.assert_array_equal(my_wide, wide)


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        ("blockwise", (4, 1, 2)),
        pytest.param("rowwise", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("blockwise", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("rowwise", (4, 1, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layer_in_roles(recipe, sizes):
    """x + layer(x), which an Explicit mesh refuses unless both have one type."""
    layer = FP8Dense(8, recipe=ALL[recipe], w_shard=ROLES.shard(0, "fsdp"))
    batch, weight = ROLES.spec(("data", "fsdp"), None), ROLES.spec("fsdp", None)
    x, kernel, bias = integers(0, (8, 8)), integers(1, (8, 8)), integers(2, (8,))

    def step(layer, params, x):
        return jax.value_and_grad(
            lambda params: jnp.sum((x + layer.apply({"params": params}, x)) ** 2)
        )(params)

    alone = FP8Dense(8, recipe=ALL[recipe])
    wanted = jax.jit(functools.partial(step, alone))({"kernel": kernel, "bias": bias}, x)
    with jax.set_mesh(mesh(sizes)):
        put = lambda value, spec: jax.device_put(value, NamedSharding(mesh(sizes), spec))
        params = {"kernel": put(kernel, weight), "bias": put(bias, P(None))}
        got = jax.jit(functools.partial(step, layer))(params, put(x, batch))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert jax.typeof(got[1]["kernel"]).sharding.spec == weight
