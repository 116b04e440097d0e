import itertools

import jax.numpy as jnp
import pytest
from hard_inputs import mentions

from jaxfp8.numerics._granularity import PerAxis, PerRow, PerTensor

SHAPE = (2, 3, 5)
GRANULARITIES = [
    PerTensor(),
    *(PerAxis(*axes) for n in (1, 2, 3) for axes in itertools.combinations(range(3), n)),
    PerAxis(-1),
    PerAxis(2, -3),
]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_scale_shape_broadcasts_and_matches_the_reduction(granularity):
    x = jnp.zeros(SHAPE)
    shape = granularity.scale_shape(SHAPE)
    assert jnp.broadcast_shapes(shape, SHAPE) == SHAPE
    assert granularity.maximum(x).shape == shape
    assert jnp.broadcast_shapes(granularity.expand(jnp.zeros(shape), SHAPE).shape, SHAPE) == SHAPE


@pytest.mark.parametrize("permutation", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_transpose(granularity, permutation):
    shape = granularity.scale_shape(SHAPE)
    transposed = granularity.transpose(permutation).scale_shape(
        tuple(SHAPE[a] for a in permutation)
    )
    assert transposed == (tuple(shape[a] for a in permutation) if shape else ())


def test_for_matmul():
    assert PerRow().for_matmul((1, 2), ndim=3) == PerAxis(1, 2)
    assert PerRow().for_matmul((), ndim=1) == PerTensor()
    assert PerTensor().for_matmul((0,), ndim=2) == PerTensor()
    assert PerAxis(1).for_matmul((0,), ndim=2) == PerAxis(1)


@pytest.mark.parametrize(
    ("axes", "ndim"),
    [((2,), 2), ((-3,), 2), ((0, 0), 2), ((0, -2), 2), ((0,), 0)],
    ids=["high", "low", "twice", "mixed", "0d"],
)
def test_axes_that_do_not_fit(axes, ndim):
    for use in (
        lambda g: g.scale_shape((4,) * ndim),
        lambda g: g.maximum(jnp.zeros((4,) * ndim)),
        lambda g: g.transpose(tuple(range(ndim))),
    ):
        with pytest.raises(
            ValueError,
            match=mentions(
                "granularity", repr(PerAxis(*axes)), f"{ndim} axes", "name each axis to keep once"
            ),
        ):
            use(PerAxis(*axes))


@pytest.mark.parametrize("axes", [(), ((0, 1),), (1.0,), ("0",)], ids=str)
def test_axes_that_are_none(axes):
    with pytest.raises(ValueError, match=mentions("PerAxis", str(axes), "integers", "PerTensor()")):
        PerAxis(*axes)


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.scale_shape((2,)),
        lambda g: g.maximum(jnp.zeros(2)),
        lambda g: g.expand(jnp.zeros(2), (2,)),
        lambda g: g.transpose((0,)),
    ],
    ids=["shape", "maximum", "expand", "transpose"],
)
def test_rows_of_an_array(use):
    with pytest.raises(ValueError, match=mentions("granularity", "PerRow()", "use PerAxis(")):
        use(PerRow())


def test_hashable_and_equal():
    assert (
        len({PerTensor(), PerTensor(), PerAxis(0), PerAxis(0), PerRow(), PerRow(), PerAxis(0, 1)})
        == 4
    )
    assert [repr(g) for g in (PerTensor(), PerAxis(0), PerAxis(0, 2))] == [
        "PerTensor()",
        "PerAxis(0)",
        "PerAxis(0, 2)",
    ]
