"""Hopper's block-scaled matmul of tiles of 128, interpreted.

A float64 product of what the operands stand for, and no races.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.test_scaled_matmul_backends import distance, product
from contracts.test_scaled_matmul_tiles import MATRICES, made, tensor, tensors
from interpreter import LOADS_TRANSPOSED, interpreted, needs_mosaic

import jaxfp8 as fp8
from jaxfp8._geometry import Geometry
from jaxfp8.kernels.scaled_matmul._call import MatmulCall

CLOSE = 2e-6  # the interpreter adds in float32; of a GPU the numerics page wants 1e-3
ROUNDED = 3e-3  # of a result in bfloat16
M, K, N = 136, 272, 200  # ragged in tiles of 128

mosaic = functools.partial(fp8.scaled_matmul, kernels=fp8.Kernels(matmuls="mosaic"))


def run(lhs, rhs, dimension_numbers=MATRICES, out=jnp.float32):
    options = {"dimension_numbers": dimension_numbers, "preferred_element_type": out}
    return interpreted(jax.jit(lambda lhs, rhs: mosaic(lhs, rhs, **options)), lhs, rhs)


# shapes, tiles, dimension numbers: the three matmuls of [M, K] @ [K, N], and what else is a matrix
FORMS = {
    "fprop": ((M, K), (K, N), (1, 128), (128, 128), MATRICES),
    "dgrad": ((M, N), (K, N), (1, 128), (128, 128), (((1,), (1,)), ((), ()))),
    "wgrad": ((M, K), (M, N), (128, 1), (128, 1), (((0,), (0,)), ((), ()))),
    "2D @ 1D": ((M, K), (K, N), (128, 128), (128, 1), MATRICES),
    "whole tiles": ((128, 256), (256, 128), (1, 128), (128, 128), MATRICES),
    "few rows": ((3, 70), (70, 40), (1, 128), (128, 128), MATRICES),
    "vectors": ((100,), (100,), (128,), (128,), (((0,), (0,)), ((), ()))),
    "experts": ((2, 40, 130), (2, 130, 72), (1, 128), (128, 128), (((2,), (1,)), ((0,), (0,)))),
    "batch in the middle": (
        (40, 2, 130),
        (130, 72, 2),
        (1, 1, 128),
        (128, 128, 1),
        (((2,), (0,)), ((1,), (2,))),
    ),
    "two contracted": (
        (3, 150, 40),
        (3, 150, 72),
        (128, 1),
        (128, 1),
        (((1, 0), (1, 0)), ((), ())),
    ),
    "two kept": ((40, 130), (130, 3, 24), (1, 128), (128, 1, 1), MATRICES),
}


@needs_mosaic
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "scales", ["float32", pytest.param("power of two", marks=pytest.mark.slow)]
)
def test_forms(form, scales):
    *parts, dimension_numbers = FORMS[form]
    lhs, rhs = tensors(parts[:2], parts[2:], scales)
    y = run(lhs, rhs, dimension_numbers)
    exact = product(lhs, rhs, dimension_numbers)
    assert (y.shape, y.dtype) == (exact.shape, jnp.float32)
    assert distance(y, exact) <= CLOSE


@needs_mosaic
@pytest.mark.parametrize(
    ("formats", "out", "scales"),
    [
        ((fp8.E4M3, fp8.E5M2), jnp.bfloat16, "float32"),
        ((fp8.E5M2, fp8.E4M3), jnp.float32, "power of two"),
        ((fp8.E4M3, fp8.E4M3), jnp.bfloat16, "power of two"),
    ],
)
def test_formats_and_results(formats, out, scales):
    shapes, tiles = ((40, 200), (200, 72)), (fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128)))
    lhs, rhs = (tensor(i, shapes[i], tiles[i], scales, format=formats[i]) for i in (0, 1))
    y = run(lhs, rhs, out=out)
    assert y.dtype == out
    assert distance(y, product(lhs, rhs)) <= (CLOSE if out == jnp.float32 else ROUNDED)


def integers(seed, shape, tile):
    """Whose products are exact in float32, and their sums."""
    random = np.random.default_rng(seed)
    granularity = fp8.PerBlock(tile)
    scale = np.ldexp(np.float32(1), random.integers(-2, 3, granularity.scale_shape(shape)))
    return made(random.integers(-8, 9, shape), scale, granularity, True)


def tilings():
    """Those of the table and others, with so few blocks that each takes several tiles, and a ring
    shorter than K.
    """
    from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES, Tiling

    few = {
        name: dataclasses.replace(choice, blocks=2, stages=2, group=2)
        for name, choice in CHOICES.items()
    }
    broad = Tiling(rows=128, columns=32, beside=True, stages=3, blocks=2, cluster=2)
    return few | {"high": Tiling(rows=128, columns=64, stages=2, blocks=3, group=1), "broad": broad}


def tiled(name, fast=False):
    """The matmul of two matrices with one of `tilings`, which the door does not take."""
    from jaxfp8.kernels.scaled_matmul.hopper._door import scaled_matmul

    call = MatmulCall(
        geometry=Geometry.of(MATRICES, 2, 2),
        out_dtype=jnp.dtype(jnp.float32),
        fast_accumulation=fast,
    )
    return jax.jit(functools.partial(scaled_matmul, call=call, tiling=tilings()[name]))


@needs_mosaic
@pytest.mark.parametrize("rhs_tile", [(128, 128), (128, 1)], ids=["square", "columns"])
@pytest.mark.parametrize(
    "name",
    [  # tests/silicon has the bits of those of the table
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("high", "broad")))
        for name in tilings()
        if name != "wide"
    ],
)
def test_every_tiling_has_the_exact_bits(name, rhs_tile):
    lhs, rhs = integers(0, (264, 384), (1, 128)), integers(1, (384, 200), rhs_tile)
    np.testing.assert_array_equal(interpreted(tiled(name), lhs, rhs), product(lhs, rhs))


@needs_mosaic
@pytest.mark.slow  # tests/silicon has faults of all kinds
@pytest.mark.parametrize("side", [0, 1])
def test_a_wrong_scale_shows(side):
    operands = tensors(((M, K), (K, N)), ((1, 128), (128, 128)), "float32")
    wrong = list(operands)
    wrong[side] = dataclasses.replace(
        operands[side], scale=jnp.roll(operands[side].scale, 1, axis=1 - side)
    )
    assert distance(run(*wrong), product(*operands)) > 0.1


@needs_mosaic
def test_what_is_not_finite_shows_where_it_is():
    lhs, rhs = tensors(((40, 200), (200, 72)), ((1, 128), (128, 128)), "float32")
    spoilt = np.asarray(lhs.values).copy(), np.asarray(rhs.values).copy()
    spoilt[0][3, 190], spoilt[1][5, 60] = np.nan, np.nan
    y = run(
        *(
            dataclasses.replace(q, values=jnp.asarray(v))
            for q, v in zip((lhs, rhs), spoilt, strict=True)
        )
    )
    want = np.ones((40, 72), bool)
    want[3], want[:, 60] = False, False
    np.testing.assert_array_equal(np.isfinite(y), want)


@needs_mosaic
@pytest.mark.parametrize("tile", [(128, 1), (128, 128)], ids=["columns", "square"])
def test_huge_scales_times_zero_are_zero(tile):
    lhs = made(
        np.zeros((8, 128)), np.full((8, 1), 2.0**119, np.float32), fp8.PerBlock((1, 128)), True
    )
    scale = np.full(fp8.PerBlock(tile).scale_shape((128, 16)), 2.0**119, np.float32)
    np.testing.assert_array_equal(
        run(lhs, made(np.ones((128, 16)), scale, fp8.PerBlock(tile), True)), 0.0
    )


@needs_mosaic
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap(axes):
    kinds = (((9, 150), fp8.PerBlock((1, 128))), ((150, 40), fp8.PerBlock((128, 128))))
    experts = [
        [tensor(2 * i + side, *kind, "float32") for side, kind in enumerate(kinds)]
        for i in range(2)
    ]
    stacked = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_side) if axis == 0 else of_side[0]
        for of_side, axis in zip(zip(*experts, strict=True), axes, strict=True)
    ]
    mapped = interpreted(jax.jit(jax.vmap(mosaic, in_axes=axes)), *stacked)
    for i, y in enumerate(mapped):
        lhs, rhs = (experts[i if axis == 0 else 0][side] for side, axis in enumerate(axes))
        assert distance(y, product(lhs, rhs)) <= CLOSE


@needs_mosaic
def test_a_layer_forward_and_backward():
    """Quantizer and matmuls.

    The bits of FP8 are those of XLA's quantizer, so products differ by their sums only.
    """
    x, w, g = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(((160, 256), (256, 96), (160, 96)))
    )

    def step(name):
        dot = functools.partial(
            fp8.dot,
            recipe=fp8.recipes.blockwise(),
            state=(),
            kernels=fp8.Kernels(casts=name, matmuls=name),
        )
        y, pullback = jax.vjp(dot, x, w)
        return y, *pullback(g)

    for mine, theirs in zip(interpreted(jax.jit(lambda: step("mosaic"))), step("xla"), strict=True):
        assert distance(mine, np.asarray(theirs, np.float64)) <= CLOSE


def rows(shape=(8, 128), scales="float32"):
    return tensor(0, shape, fp8.PerBlock((1, 128)), scales)


def columns(shape=(128, 16), tile=(128, 128), scales="float32"):
    return tensor(1, shape, fp8.PerBlock(tile), scales)


CANNOT = {
    "tiles of 16": (
        (tensor(0, (8, 64), fp8.PerBlock((1, 16)), "float32"), columns((64, 16), (16, 16))),
        {},
        "[16]",
    ),
    "rows in E8M0": (
        (tensor(0, (8, 128), fp8.PerAxis(0), "E8M0"), tensor(1, (128, 16), fp8.PerAxis(1), "E8M0")),
        {},
        "float8_e8m0fnu",
    ),
    "per tensor": ((rows(), tensor(1, (128, 16), fp8.PerTensor(), "float32")), {}, "PerTensor()"),
    "empty": ((rows((0, 128)), columns()), {}, "[0, 128]"),
    "out_sharding": ((rows(), columns()), {"out_sharding": jax.P("data", None)}, "Explicit"),
}


@needs_mosaic
@pytest.mark.parametrize("case", CANNOT)
def test_what_it_cannot_do_fails_loudly(case):
    operands, options, mentions = CANNOT[case]
    with pytest.raises(NotImplementedError, match=re.escape(mentions)):
        mosaic(*operands, **options)


@pytest.mark.parametrize("chip", ["b200", "a100", "l4"])
def test_another_chip_is_refused(chip):
    with pytest.raises(ValueError, match=f"'mosaic' is made for Hopper, but chip='{chip}'"):
        mosaic(rows(), columns(), kernels=fp8.Kernels(chip, matmuls="mosaic"))


@needs_mosaic
def test_a_tiling_without_room_is_refused():
    from jaxfp8.kernels.scaled_matmul.hopper._matmul import Matmul
    from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling
    from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES, Tiling

    def check(tiling, scaling, itemsize, added=0):
        dtypes = {0: None, 2: jnp.dtype(jnp.bfloat16), 4: jnp.dtype(jnp.float32)}
        formats = (jnp.dtype(fp8.E4M3.dtype),) * 2
        of_c = {"out_dtype": dtypes[itemsize], "add_to": dtypes[added]}
        Matmul(batch=1, m=8, n=8, k=128, formats=formats, tiling=tiling, scaling=scaling, **of_c)

    scalings = [Scaling(), Scaling(square=True), Scaling(at_end=True), Scaling(tile=32)]
    scalings += [Scaling(tile=32, square=True), Scaling(at_end=True, fast=True)]
    for name, choice in CHOICES.items():
        for scaling in scalings[-1:] if name == "wide" else scalings:
            for itemsize in (2, 4):
                for added in (0,) if name == "wide" else (0, 2, 4):
                    check(choice, scaling, itemsize, added)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        check(dataclasses.replace(CHOICES["large"], stages=7), Scaling(), 2)
    with pytest.raises(ValueError, match="registers a thread"):
        check(CHOICES["wide"], Scaling(at_end=True), 2)
    with pytest.raises(ValueError, match="registers a thread"):
        check(CHOICES["wide"], Scaling(at_end=True, fast=True), 4, 4)
    with pytest.raises(ValueError, match="is scaled at the end can be fast"):
        Scaling(fast=True)
    with pytest.raises(ValueError, match="have scales in bytes"):
        Scaling(tile=32, square=True, in_bytes=(True, True))
    with pytest.raises(ValueError, match="rows are 64 or 128"):
        Tiling(rows=96, columns=128)


@needs_mosaic
def test_a_tiling_is_chosen_by_the_shape_and_by_what_has_registers():
    from jaxfp8.kernels.scaled_matmul.hopper._door import _choose
    from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling
    from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES

    fast = Scaling(at_end=True, fast=True)
    shapes = {
        "decode": (1, 64, 4096),
        "few": (1, 128, 4096),
        "small": (1, 1024, 1024),
        "large": (8, 1024, 1024),
    }
    for name, shape in shapes.items():
        assert _choose(*shape, Scaling()) is CHOICES[name]
    assert _choose(1, 8192, 8192, fast) is CHOICES["wide"]
    assert _choose(1, 8192, 8192, fast, added=True) is CHOICES["large"]


@pytest.mark.skipif(LOADS_TRANSPOSED, reason="jax 0.11 and later have the kernel")
def test_an_old_jax_says_so():
    with pytest.raises(NotImplementedError, match=r"jax before 0\.11"):
        mosaic(rows(), columns())
