"""Tiles as a granularity.

What numbers they give is in tests/contracts/test_quantize_backends.py.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import mentions

from jaxfp8.numerics._granularity import PerAxis
from jaxfp8.numerics._per_block import PerBlock

# granularity, shape of the values, shape of the scale
SHAPES = [
    ((1, 128), (8, 300), (8, 3)),
    ((128, 1), (300, 8), (3, 8)),
    ((128, 128), (300, 272), (3, 3)),
    ((1, 32), (1, 32), (1, 1)),
    ((32, 32), (31, 33), (1, 2)),
    ((128,), (256,), (2,)),
    ((1, 128), (2, 3, 129), (2, 3, 2)),
    ((128, 128), (2, 3, 129), (2, 1, 2)),
    ((4, 1, 8), (5, 9, 8), (2, 9, 1)),
    ((1, 128), (0, 256), (0, 2)),
    ((128, 128), (256, 0), (2, 0)),
]


@pytest.mark.parametrize(("tile", "shape", "scale"), SHAPES, ids=str)
def test_shapes(tile, shape, scale):
    granularity = PerBlock(tile)
    assert granularity.scale_shape(shape) == scale
    x = np.random.default_rng(0).uniform(1, 2, shape).astype(np.float32)

    @jax.jit
    def run(x):
        largest = granularity.maximum(x)
        return largest, granularity.expand(largest, shape)

    largest, expanded = run(x)
    np.testing.assert_array_equal(largest, oracle.tile_amax(x, tile), strict=True)
    np.testing.assert_array_equal(
        np.broadcast_to(expanded, shape), oracle.spread(np.asarray(largest), shape, tile)
    )


@pytest.mark.parametrize("ndim", [0, 1])
def test_a_tile_that_is_longer_than_the_rank(ndim):
    shape = (4,) * ndim
    for use in (
        lambda g: g.scale_shape(shape),
        lambda g: g.maximum(jnp.zeros(shape)),
        lambda g: g.expand(jnp.zeros(shape), shape),
        lambda g: g.transpose(tuple(range(ndim))),
    ):
        with pytest.raises(
            ValueError,
            match=mentions(
                "PerBlock(tile=(1, 128))", f"{ndim} axes", "2 sides", "each trailing axis"
            ),
        ):
            use(PerBlock((1, 128)))


@pytest.mark.parametrize(
    "tile", [128, [1, 128], (1, 0), (1, -1), (1, 128.0), (1, True), ("1", 128), (1, None)], ids=str
)
def test_what_is_no_tile(tile):
    with pytest.raises(
        ValueError, match=mentions(f"tile={tile!r}", "tuple of positive integers", "(1, 128)")
    ):
        PerBlock(tile)


@pytest.mark.parametrize("tile", [(1,), (1, 1)], ids=str)
def test_a_tile_of_one_value(tile):
    with pytest.raises(
        ValueError,
        match=mentions(f"tile={tile!r}", "scale of its own", "make one of its sides longer"),
    ):
        PerBlock(tile)


def test_hashable_and_equal():
    assert (
        len(
            {
                PerBlock((1, 128)),
                PerBlock((1, 128)),
                PerBlock((128, 1)),
                PerBlock((1, 32)),
                PerAxis(0),
            }
        )
        == 4
    )
    assert eval(repr(PerBlock((1, 128)))) == PerBlock((1, 128))


# How a matmul reads it: (tile along kept, along contracted) -> tile of the array


@pytest.mark.parametrize(
    ("kept", "ndim", "one", "two"),
    [
        ((0,), 2, (1, 128), (128, 128)),
        ((1,), 2, (128, 1), (128, 128)),
        ((0, 1), 3, (1, 128), (128, 128)),
        ((0, 2), 3, (128, 1), (128, 128)),
        ((1, 2), 3, (128, 1, 1), (128, 1, 128)),
    ],
    ids=str,
)
def test_for_matmul(kept, ndim, one, two):
    assert PerBlock((1, 128)).for_matmul(kept, ndim) == PerBlock(one)
    assert PerBlock((128, 128)).for_matmul(kept, ndim) == PerBlock(two)


# Transposing

SIZES = (3, 4, 5)


@pytest.mark.parametrize("permutation", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize(
    "tile",
    [(2, 2), (2, 3), (2, 1, 2), (2, 2, 1), (2, 2, 2), (2, 1, 1), (1, 2), (2, 1), (2,)],
    ids=str,
)
def test_transpose(tile, permutation):
    granularity = PerBlock(tile)
    moved = [granularity.along(3)[axis] for axis in permutation]
    if len(granularity.tiled_axes) == 1 and moved != [*granularity.along(3)]:
        with pytest.raises(
            ValueError,
            match=mentions(str(tile), str(permutation), "both directions", "two equal sides"),
        ):
            granularity.transpose(permutation)
        return
    transposed = granularity.transpose(permutation)
    assert [*transposed.along(3)] == moved
    scale = granularity.scale_shape(SIZES)
    assert transposed.scale_shape(tuple(SIZES[a] for a in permutation)) == tuple(
        scale[a] for a in permutation
    )
    back = tuple(int(axis) for axis in np.argsort(permutation))
    assert transposed.transpose(back).along(3) == granularity.along(3)


def test_what_is_transposed_twice_is_the_same_granularity():
    # Or two tensors that are alike differ in their tree structure.
    for tile, permutation in (
        ((128, 128), (2, 1, 0)),
        ((128, 128), (1, 0, 2)),
        ((1, 128), (1, 0, 2)),
        ((128, 128), (0, 2, 1)),
    ):
        granularity = PerBlock(tile)
        back = tuple(int(axis) for axis in np.argsort(permutation))
        assert granularity.transpose(permutation).transpose(back) == granularity


def test_tiled_axes():
    for tile, axes in (
        ((1, 128), (-1,)),
        ((128, 1), (-2,)),
        ((128, 128), (-2, -1)),
        ((4, 1, 8), (-3, -1)),
    ):
        assert PerBlock(tile).tiled_axes == axes
        assert math.prod(tile[axis] for axis in axes) == math.prod(tile)
