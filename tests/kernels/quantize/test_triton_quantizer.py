"""The Triton quantizer, interpreted.

The bits of the reference, and no write outside of its results.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from casts import cast_in
from hard_tiles import hard_tiles, uneven
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from triton_interpreter import interpreted, needs_triton

import jaxfp8 as fp8
from jaxfp8.kernels.cast._api import cast_copies
from jaxfp8.numerics._scale import ScaleRule

RULES = {
    "float32": ScaleRule(),
    "power_of_two": ScaleRule(power_of_two=True),
    "rceil": ScaleRule(scale_format=fp8.E8M0),
    "floor": ScaleRule(scale_format=fp8.E8M0, scale_rounding="floor"),
}
ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
ROWS_32, COLUMNS_32, SQUARES_32 = (fp8.PerBlock(tile) for tile in ((1, 32), (32, 1), (32, 32)))


def quantized(backend, x, format, granularities, rule):
    """Leaves of the results, one after the other."""
    cast = cast_in(format, *granularities, rule=rule, backends=(backend,))
    return jax.tree.leaves(cast_copies(x, cast))


def assert_same_bits(mine, theirs):
    for ours, leaf in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(ours, np.asarray(leaf).view(np.uint8), strict=True)


def reference(x, *case):
    """In one program: step by step each of its operations is compiled for itself."""
    return jax.jit(lambda x: quantized("reference", x, *case))(x)


CASES = {
    "both": ((2, 256, 384), "bfloat16", fp8.E4M3, (ROWS, COLUMNS), "power_of_two"),
    "all, ragged, columns end with an example": (
        (2, 250, 390),
        "float32",
        fp8.E5M2,
        (COLUMNS, ROWS, SQUARES),
        "float32",
    ),
    "columns": ((257, 300), "float16", fp8.E4M3, (COLUMNS,), "float32"),
    "squares": ((3, 128, 201), "bfloat16", fp8.E5M2, (SQUARES,), "power_of_two"),
    "rows, less than a tile high": ((3, 7, 257), "float16", fp8.E4M3, (ROWS,), "rceil"),
    "both, 32": ((96, 192), "float32", fp8.E5M2, (ROWS_32, COLUMNS_32), "floor"),
    "all, 32, ragged": (
        (2, 70, 137),
        "bfloat16",
        fp8.E4M3,
        (SQUARES_32, ROWS_32, COLUMNS_32),
        "rceil",
    ),
    "squares, 32": ((65, 105), "float16", fp8.E5M2, (SQUARES_32,), "float32"),
    "32 by two names": (
        (40, 110),
        "bfloat16",
        fp8.E4M3,
        (ROWS_32, fp8.PerBlock((32,)), ROWS_32),
        "power_of_two",
    ),
    "whole rows": ((2, 37, 300), "float32", fp8.E4M3, (fp8.PerAxis(0, 1),), "float32"),
    "whole rows, a power of two": (
        (6, 4096),
        "bfloat16",
        fp8.E5M2,
        (fp8.PerAxis(-2),),
        "power_of_two",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_reference(case):
    shape, dtype, *how, rule = CASES[case]
    x = np.asarray(jnp.asarray(uneven(shape, 32 if "32" in case else 128), dtype))
    assert_same_bits(
        interpreted(quantized, "triton", x, *how, RULES[rule]), reference(x, *how, RULES[rule])
    )


@pytest.mark.parametrize(
    ("rule", "format"),
    [("float32", fp8.E4M3), ("power_of_two", fp8.E5M2), ("rceil", fp8.E4M3), ("floor", fp8.E5M2)],
    ids=str,
)
def test_at_every_amax_where_a_scale_changes(rule, format):
    """Against NumPy.

    Where float32 divisions are exact in their last bit, and powers of two step.
    """
    x = hard_tiles((1, 128), np.float32, 150)
    values, scale = interpreted(quantized, "triton", x, format, (ROWS,), RULES[rule])
    codes, scales = oracle.quantize_tiles(x, format.name, (1, 128), rule)
    np.testing.assert_array_equal(values, codes)
    np.testing.assert_array_equal(scale, scales.view(np.uint8))


def test_one_axis():
    x = uneven((6, 300))[3].astype(np.float32)
    case = fp8.E4M3, (fp8.PerBlock((128,)),), RULES["float32"]
    assert_same_bits(interpreted(quantized, "triton", x, *case), reference(x, *case))


def mapped(backend, x, *case):
    return jax.vmap(lambda x: quantized(backend, x, *case), in_axes=1, out_axes=0)(x)


@pytest.mark.parametrize("granularities", [(ROWS_32, COLUMNS_32), (fp8.PerAxis(0),)], ids=str)
def test_under_vmap(granularities):
    x = uneven((2, 40, 106), 32).swapaxes(0, 1).astype(np.float32)
    case = fp8.E4M3, granularities, RULES["power_of_two"]
    assert_same_bits(
        interpreted(mapped, "triton", x, *case), jax.jit(lambda x: mapped("xla", x, *case))(x)
    )


def on_a_mesh(backend, kind, spec, x, *case):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    run = lambda x: quantized(backend, x, *case)
    with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)):
        if kind == "shard_map":
            run = jax.shard_map(run, in_specs=spec, out_specs=spec)
        return jax.jit(run)(jax.device_put(x, spec))


# XLA:CPU crashes on a callback inside of custom_partitioning: tests/deviceless has the Auto mesh.
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
@pytest.mark.parametrize(
    ("shape", "spec", "granularities"),
    [
        ((128, 128), P("a", "b"), (ROWS_32, COLUMNS_32, SQUARES_32)),
        ((4, 37, 110), P("a"), (COLUMNS_32, ROWS_32)),
        ((24, 300), P(("a", "b")), (fp8.PerAxis(0),)),
    ],
    ids=["parts of whole tiles", "ragged axes are whole", "rows"],
)
def test_on_a_mesh(kind, shape, spec, granularities):
    x = np.asarray(jnp.asarray(uneven(shape, 32), jnp.bfloat16))
    case = fp8.E4M3, granularities, RULES["float32"]
    assert_same_bits(interpreted(on_a_mesh, "triton", kind, spec, x, *case), reference(x, *case))


TRITON = fp8.Kernels(casts="triton")
WHOLE = jnp.ones((128, 128), jnp.bfloat16)
CANNOT = {
    "1x64": (WHOLE, fp8.PerBlock((1, 64)), {}, "(1, 64)"),
    "tiles of two sizes": (WHOLE, (ROWS, ROWS_32), {}, "of one T"),
    "tiles of three axes": (jnp.ones((32, 32, 32)), fp8.PerBlock((32, 1, 32)), {}, "3 axes"),
    "per column": (WHOLE, fp8.PerAxis(1), {}, "PerAxis(1)"),
    "rows beside tiles": (jnp.ones((4, 256)), (fp8.PerAxis(0), ROWS), {}, "PerAxis(0)"),
    "a long row": (jnp.ones((1, 32769), jnp.bfloat16), fp8.PerAxis(0), {}, "up to 32768"),
    "the whole": (WHOLE, fp8.PerTensor(), {}, "PerTensor()"),
    "stochastic": (
        WHOLE,
        ROWS,
        {"rounding": "stochastic", "key": jax.random.key(0)},
        "'stochastic'",
    ),
    "empty": (jnp.ones((0, 128)), ROWS, {}, "[0, 128]"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_it_cannot_do_fails_loudly(case):
    needs_triton()
    x, granularity, how, mentions = CANNOT[case]
    with pytest.raises(NotImplementedError, match=re.escape(mentions)):
        fp8.quantize(x, fp8.E4M3, granularity, kernels=TRITON, **how)


def test_without_a_gpu_xla_casts():
    needs_triton()
    x = jnp.asarray(uneven((2, 40, 110), 32), jnp.bfloat16)
    case = fp8.E5M2, (COLUMNS_32, ROWS_32), RULES["rceil"]
    run = jax.jit(lambda x: quantized("triton", x, *case))
    assert_same_bits([np.asarray(leaf).view(np.uint8) for leaf in run(x)], reference(x, *case))
    assert "triton" not in run.lower(x).as_text()


@pytest.mark.deviceless
def test_a_gpu_runs_the_kernel():
    needs_triton()
    x = jax.ShapeDtypeStruct((2, 40, 110), jnp.bfloat16)
    run = jax.jit(lambda x: fp8.quantize(x, fp8.E4M3, ROWS_32, kernels=TRITON))
    h200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
        lowered = run.trace(x).lower(lowering_platforms=("cuda",))
    assert "triton_kernel_call" in lowered.as_text()


def test_without_the_package_it_names_the_extra(monkeypatch):
    from jaxfp8.kernels import quantize

    for module in ("jaxfp8.kernels._triton_call", "jaxfp8.kernels.quantize._triton"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(quantize, "_triton", raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(NotImplementedError, match=re.escape("pip install 'jaxfp8[triton]'")):
        fp8.quantize(WHOLE, fp8.E4M3, ROWS, kernels=TRITON)
