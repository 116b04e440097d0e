"""Tiles on a mesh.

The shard of the quantized whole is the quantized shard, bit for bit, and nothing travels.
"""

import functools
import re

import jax
import numpy as np
import pytest
from hard_inputs import mentions
from hard_tiles import assert_equals_oracle, scale_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

TILES = [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (32, 32)]
KINDS = {
    "float32": {},
    "power_of_two": {"power_of_two": True},
    "rceil": {"scale_format": fp8.E8M0},
    "floor": {"scale_format": fp8.E8M0, "scale_rounding": "floor"},
}
SPECS = {
    "both": P("data", "tp"),
    "rows": P(("data", "tp"), None),
    "columns": P(None, ("tp", "data")),
}
# The smallest of which each device has whole tiles.
SHAPES = {"both": (512, 256), "rows": (1024, 128), "columns": (128, 1024)}
COLLECTIVE = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "tp"), axis_types=(kind, kind))


@functools.cache
def whole(shape) -> np.ndarray:
    """Magnitudes that differ from tile to tile, with what is hard in some."""
    random = np.random.default_rng(0)
    x = np.ldexp(
        random.standard_normal(shape),
        random.integers(-9, 9, shape) + random.integers(-20, 20, (1, shape[1])),
    )
    m, k = shape
    x[m // 8 + 2, k // 4], x[-5, -5] = np.nan, np.inf
    x[m // 3 : m // 2, k // 2 : k // 2 + 40] = 0
    return x.astype(np.float32)


def quantize(x, rule):
    return fp8.quantize(x, fp8.E4M3, tuple(map(fp8.PerBlock, TILES)), **KINDS[rule])


@functools.cache
def expected(shape, rule):
    """Of the whole array on one device; it is the oracle's."""
    x = whole(shape)
    copies = jax.jit(quantize, static_argnums=1)(x, rule)
    for q, tile in zip(copies, TILES, strict=True):
        assert_equals_oracle(q, x, tile, rule, str(tile))
    return copies


def assert_equal(actual, shape, rule):
    for q, reference, tile in zip(actual, expected(shape, rule), TILES, strict=True):
        assert q.granularity == fp8.PerBlock(tile)
        values, wanted = (np.asarray(tensor.values).view(np.uint8) for tensor in (q, reference))
        np.testing.assert_array_equal(values, wanted, err_msg=str(tile))
        np.testing.assert_array_equal(scale_of(q), scale_of(reference), err_msg=str(tile))


@pytest.mark.parametrize(("spec", "rule"), [("both", "rceil"), ("rows", "float32")])
def test_slices(spec, rule):
    shape = SHAPES[spec]
    x, copies = whole(shape), expected(shape, rule)
    rows, columns = slice(shape[0] // 2, shape[0]), slice(shape[1] - 128, shape[1])
    of_slices = jax.jit(quantize, static_argnums=1)(x[rows, columns], rule)
    for q, of_slice, (m, k) in zip(copies, of_slices, TILES, strict=True):
        cut = slice(rows.start // m, rows.stop // m), slice(columns.start // k, columns.stop // k)
        np.testing.assert_array_equal(
            np.asarray(of_slice.values).view(np.uint8),
            np.asarray(q.values)[rows, columns].view(np.uint8),
        )
        np.testing.assert_array_equal(scale_of(of_slice), scale_of(q)[cut])


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


# Rules and specs in turn: each meets each kind of mesh.
@pytest.mark.parametrize(
    ("kind", "spec", "rule"),
    [
        (AxisType.Auto, "both", "rceil"),
        slow(AxisType.Auto, "rows", "float32"),
        slow(AxisType.Auto, "columns", "power_of_two"),
        slow(AxisType.Auto, "both", "floor"),
        slow(AxisType.Explicit, "both", "rceil"),
        (AxisType.Explicit, "rows", "float32"),
        (AxisType.Explicit, "columns", "power_of_two"),
        slow(AxisType.Explicit, "both", "floor"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_sharded_array(kind, spec, rule):
    sharding = NamedSharding(mesh(kind), SPECS[spec])
    with jax.set_mesh(mesh(kind)):
        x = jax.device_put(whole(SHAPES[spec]), sharding)
        compiled = jax.jit(quantize, static_argnums=1).lower(x, rule).compile()
        copies = compiled(x)
    assert_equal(copies, SHAPES[spec], rule)
    for q in copies:
        assert q.values.sharding.is_equivalent_to(sharding, 2)
        assert q.scale.sharding.is_equivalent_to(sharding, 2), q.granularity
    assert not re.search(COLLECTIVE, compiled.as_text())


@pytest.mark.parametrize(
    ("check_vma", "spec", "rule"),
    [
        (True, "both", "rceil"),
        slow(True, "columns", "power_of_two"),
        slow(True, "rows", "float32"),
        slow(False, "both", "rceil"),
        slow(False, "columns", "power_of_two"),
        (False, "rows", "float32"),
    ],
)
def test_in_shard_map(check_vma, spec, rule):
    mapped = jax.shard_map(
        functools.partial(quantize, rule=rule),
        mesh=mesh(),
        in_specs=SPECS[spec],
        out_specs=SPECS[spec],
        check_vma=check_vma,
    )
    assert_equal(jax.jit(mapped)(whole(SHAPES[spec])), SHAPES[spec], rule)


@pytest.mark.parametrize("rule", ["float32", "rceil"])
def test_shards_that_cut_tiles(rule):
    # 40 rows and 48 columns a device: no border of a tile of 32 or 128.
    x = whole((160, 96))
    auto = jax.device_put(x, NamedSharding(mesh(), P("data", "tp")))
    for q, tile in zip(jax.jit(quantize, static_argnums=1)(auto, rule), TILES, strict=True):
        assert_equals_oracle(q, x, tile, rule, str(tile))


def test_shards_that_cut_tiles_of_an_explicit_mesh():
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        x = jax.device_put(whole((160, 96)), NamedSharding(explicit, P("data", "tp")))
        with pytest.raises(
            ValueError,
            match=mentions("[160, 96]", "'data', 4 devices", "tiles of 32", "cut shards on"),
        ):
            fp8.quantize(x, fp8.E4M3, fp8.PerBlock((32, 1)))
