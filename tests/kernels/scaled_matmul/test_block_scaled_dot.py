"""Blackwell's matmul on meshes and under vmap, with a plain product in place of the chip's.

What is computed where.
"""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfp8.kernels.scaled_matmul._cudnn import _CELLS, _TILE
from jaxfp8.kernels.scaled_matmul._partitioned import check_mesh, mapped, partition_matmul

B, M, N = 2, 16, 8


def local(a, b, a_scale, b_scale):
    """The product of one device, which holds whole tiles or fails."""
    a, b = (
        v.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), _TILE, axis=-1)
        for v, s in ((a, a_scale), (b, b_scale))
    )
    return jnp.einsum("bmk,bnk->bmn", a, b, precision="highest")


def product(a, b, a_scale, b_scale):
    """`local` in NumPy."""
    a, b = (
        np.asarray(v).astype(np.float64) * np.repeat(np.asarray(s).astype(np.float64), _TILE, -1)
        for v, s in ((a, a_scale), (b, b_scale))
    )
    return np.einsum("...mk,...nk->...mn", a, b).astype(np.float32)


def operands(k, *leading):
    """Small integers, and powers of two as scales: every sum is exact."""
    rng = np.random.default_rng(k)
    values = [rng.integers(-4, 5, (*leading, B, rows, k)) for rows in (M, N)]
    scales = [2.0 ** rng.integers(-2, 3, (*leading, B, rows, k // _TILE)) for rows in (M, N)]
    return [v.astype(jnp.float8_e4m3fn) for v in values] + [
        s.astype(jnp.float8_e8m0fnu) for s in scales
    ]


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


# Where lhs [B, M, K] and rhs [B, N, K] lie, and whether K stays split if its tiles allow.
LAYOUTS = {
    "nowhere": ((None, None, None), (None, None, None), False),
    "rows": ((None, "data", None), (None, None, None), False),
    "rows and columns": ((None, "data", None), (None, "model", None), False),
    "rows and columns by the same axis": ((None, "data", None), (None, "data", None), False),
    "contracted": ((None, None, "data"), (None, None, "data"), True),
    "contracted by both": ((None, None, ("data", "model")), (None, None, ("data", "model")), True),
    "contracted, and columns": ((None, None, "data"), (None, "model", "data"), True),
    "contracted, and rows": ((None, "model", "data"), (None, None, "data"), True),
    "contracted on one side": ((None, "data", None), (None, None, "data"), False),
    "contracted apart": ((None, None, "data"), (None, None, "model"), False),
    "batch": (("model", "data", None), ("model", None, None), False),
    "batch on one side": (("model", None, None), (None, None, "data"), False),
    "batch and contracted": (("model", None, "data"), ("model", None, "data"), True),
}


def table():
    """By default each layout with one size, and a contracted axis that is split with two.

    One of the two has whole tiles on each device, and the other has not.
    """
    sizes = (32, 96, 128, 288, 512)
    for i, (layout, (_, _, split)) in enumerate(LAYOUTS.items()):
        chosen = {512, (96, 288)[i % 2]} if split else {sizes[i % 5]}
        for k in sizes:
            marks = () if k in chosen else pytest.mark.slow
            yield pytest.param(layout, k, id=f"{layout}-K={k}", marks=marks)


@pytest.mark.parametrize(("layout", "k"), list(table()))
def test_partitioned(layout, k):
    lhs_spec, rhs_spec, split = LAYOUTS[layout]
    arguments = operands(k)
    expected = product(*arguments)

    def dot(*arguments):
        # With more devices than tiles, each is asked to hold part of one.
        values = [
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(*spec)))
            for x, spec in zip(arguments[:2], (lhs_spec, rhs_spec), strict=True)
        ]
        return partition_matmul(local, _CELLS)(*values, *arguments[2:])

    compiled = jax.jit(dot).lower(*arguments).compile()
    np.testing.assert_array_equal(compiled(*arguments), expected)
    devices = {"data": 4, ("data", "model"): 8}.get(lhs_spec[2], 1)
    if split and (k // _TILE) % devices == 0:
        # Partial sums are added, and no operand is gathered.
        assert "all-reduce" in compiled.as_text()
        assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    arguments = operands(64)
    dot = jax.shard_map(
        mapped(
            local,
            lambda *_: pytest.fail("inside shard_map each device has its own arrays"),
            _CELLS,
        ),
        mesh=mesh(),
        in_specs=(P(None, "data"), P(), P(None, "data"), P()),
        out_specs=P(None, "data"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(dot)(*arguments), product(*arguments))


@pytest.mark.parametrize(
    "is_mapped", [m for m in itertools.product([True, False], repeat=4) if any(m)], ids=str
)
def test_vmap(is_mapped):
    shapes = []

    def seen(*arguments):
        shapes.append([x.shape for x in arguments])
        return local(*arguments)

    stacked = operands(64, 3)
    arguments = [x if m else x[0] for x, m in zip(stacked, is_mapped, strict=True)]
    axes = [0 if m else None for m in is_mapped]
    expected = [
        product(*(x[i] if m else x for x, m in zip(arguments, is_mapped, strict=True)))
        for i in range(3)
    ]
    found = jax.jit(jax.vmap(mapped(seen, seen, _CELLS), axes))(*arguments)
    np.testing.assert_array_equal(found, np.stack(expected))
    both = (is_mapped[0] or is_mapped[2]) and (is_mapped[1] or is_mapped[3])
    (lhs, rhs, *_) = shapes[-1]
    assert lhs[0] == rhs[0] == (3 * B if both else B)
    # Of an operand that is not mapped there is one copy.
    assert (lhs[1], rhs[1]) == (
        (M, N) if both else (3 * M, N) if is_mapped[0] or is_mapped[2] else (M, 3 * N)
    )


def test_vmap_twice():
    arguments = operands(64, 3, 2)
    found = jax.jit(jax.vmap(jax.vmap(mapped(local, local, _CELLS))))(*arguments)
    np.testing.assert_array_equal(found, product(*arguments))


@pytest.mark.parametrize(
    ("types", "taken"),
    [
        ((AxisType.Auto, AxisType.Auto), True),
        ((AxisType.Manual, AxisType.Manual), True),
        ((AxisType.Explicit, AxisType.Explicit), True),
        ((AxisType.Manual, AxisType.Auto), False),
        ((AxisType.Auto, AxisType.Explicit), True),
        ((AxisType.Manual, AxisType.Explicit), False),
    ],
)
def test_meshes(types, taken):
    refused = pytest.raises(NotImplementedError, match="all axes manual")
    with contextlib.nullcontext() if taken else refused:
        check_mesh(jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=types))
    check_mesh(jax.sharding.get_abstract_mesh())  # none
