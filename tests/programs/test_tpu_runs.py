"""TPU programs, written by hand: tiles in memory, convolutions, XLA's own custom calls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfp8.programs.on_cpu._layouts import read_array_type
from jaxfp8.programs.on_cpu._run import run_on_cpu


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(*lines, arguments, before="", **options):
    entry = "\n  ".join(["ENTRY %main {", *lines])
    text = f"HloModule m, is_scheduled=true\n{before}\n{entry}\n}}\n"
    return run_on_cpu(text, *arguments, **options)


# Bitcasts


def addresses(text):
    """The place in memory of each element, counted in elements."""
    array = read_array_type(text)
    found = np.empty(array.shape, int)
    for index in np.ndindex(*array.shape):
        places = [(index[d], array.shape[d]) for d in array.order]
        for tile in array.tiles:
            places = [(0, 1)] * (len(tile) - len(places)) + places
            major, minor = places[: -len(tile)], places[-len(tile) :]
            outer = [(i // t, -(-n // t)) for (i, n), t in zip(minor, tile, strict=True)]
            inner = [(i % t, t) for (i, _), t in zip(minor, tile, strict=True)]
            places = [*major, *outer, *inner]
        address = 0
        for i, n in places:
            address = address * n + i
        found[index] = address
    return found


BITCASTS = [
    # Another order, the same bytes.
    ("f32[16,96]{0,1:T(8,128)}", "f32[96,16]{1,0:T(8,128)S(1)}"),
    # Tiles become a dimension: a reshape of the logical array would be wrong.
    ("f32[8,1024]{1,0:T(8,128)}", "f32[8,8,128]{2,0,1:T(8,128)}"),
    ("f32[24,8]{1,0:T(8,128)}", "f32[3,8,8]{2,1,0:T(8,128)}"),
    # Pairs of rows are packed.
    ("bf16[16,256]{1,0:T(8,128)(2,1)}", "bf16[2,8,256]{2,1,0:T(8,128)(2,1)}"),
    ("u8[64,128]{1,0:T(32,128)(4,1)}", "f8e4m3fn[2,32,128]{2,1,0:T(32,128)(4,1)}"),
    ("f32[16,128]{1,0:T(8,128)}", "f32[2048]{0:T(1024)}"),
    ("f32[]{:T(128)}", "f32[1,1]{1,0:T(1,128)}"),
    # A slice whose elements do not move.
    ("f32[96,4]{0,1:T(8,128)}", "f32[64,4]{0,1:T(8,128)}"),
]


@pytest.mark.parametrize(("source", "result"), BITCASTS)
def test_bitcasts_of_tiles(source, result):
    before, after = read_array_type(source), read_array_type(result)
    x = np.arange(np.prod(before.shape, dtype=int)).reshape(before.shape) % 251
    dtype = {"f32": np.float32, "bf16": jnp.bfloat16, "u8": np.uint8}[before.dtype]
    x = x.astype(dtype)
    lines = f"%x = {source} parameter(0)", f"ROOT %y = {result} bitcast(%x)"
    (y,) = run(*lines, arguments=[x])
    memory = dict(zip(addresses(source).ravel(), x.ravel(), strict=True))
    wanted = [memory[address] for address in addresses(result).ravel()]
    assert y.shape == after.shape
    np.testing.assert_array_equal(np.asarray(y).view(dtype).ravel(), wanted)


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("f32[4,100]{1,0:T(8,128)}", "f32[4,128]{1,0:T(8,128)}"),
        ("f32[8,128]{1,0:T(8,128)}", "f32[8,256]{1,0:T(8,128)}"),
    ],
)
def test_padding_has_no_value(source, result):
    lines = f"%x = {source} parameter(0)", f"ROOT %y = {result} bitcast(%x)"
    with pytest.raises(ValueError, match="reads the padding of tiles"):
        run(*lines, arguments=[np.zeros(read_array_type(source).shape, np.float32)])


@pytest.mark.parametrize("layout", ["{1,0:T(*,128)}", "{1,0:T(8,128)SC(0:4)}", "{1,0:D(D,C)}"])
def test_other_layouts_are_refused(layout):
    with pytest.raises(ValueError, match="dense layout"):
        read_array_type(f"f32[8,128]{layout}")


# Convolutions

CONVOLUTIONS = {
    "matmul": ((6, 8), (8, 5), "bf_io->bf", {}),
    "transposed": ((8, 6), (5, 8), "fb_oi->bf", {}),
    "transposed result": ((6, 8), (8, 5), "bf_io->fb", {}),
    "batch": (
        (4, 6, 8),
        (4, 5, 8),
        "0bf_0oi->0bf",
        {"size": (4,), "stride": (3,), "lhs_dilate": (4,)},
    ),
    "rows in space": ((6, 8, 7), (8, 5, 1), "bf0_io0->b0f", {"size": (1,)}),
    "windows": (
        (2, 9, 7, 3),
        (3, 2, 3, 4),
        "b01f_01io->bf01",
        {"size": (3, 2), "stride": (2, 1), "pad": ((1, 2), (0, 1)), "rhs_dilate": (1, 2)},
    ),
    "reversed": (
        (2, 5, 3),
        (3, 4, 3),
        "b0f_0oi->b0f",
        {"size": (3,), "pad": ((-1, 2),), "rhs_reversal": (1,)},
    ),
    "features in groups": ((2, 9, 6), (3, 2, 9), "b0f_0io->b0f", {"size": (3,), "features": 3}),
    "batches in groups": ((6, 9, 2), (3, 2, 9), "b0f_0io->b0f", {"size": (3,), "batches": 3}),
}


def attributes_of(labels, size=(), features=1, batches=1, **window):
    def joined(name, pairs):
        texts = ["_".join(map(str, p)) if name == "pad" else str(p) for p in pairs]
        return f"{name}={'x'.join(texts)}"

    fields = [joined("size", size), *itertools.starmap(joined, window.items())] if size else []
    also = [f"window={{{' '.join(fields)}}}"] if fields else []
    also += [f"feature_group_count={features}"] if features > 1 else []
    also += [f"batch_group_count={batches}"] if batches > 1 else []
    return ", ".join([*also, f"dim_labels={labels}"])


def by_jax(lhs, rhs, labels, size=(), features=1, batches=1, **window):
    of_lhs, of_rhs, of_result = labels.replace("->", "_").split("_")
    spatial = [str(d) for d in range(len(of_lhs) - 2)]
    places = lambda text, *first: tuple(text.index(label) for label in (*first, *spatial))
    flipped = [of_rhs.index(d) for d in spatial if "rhs_reversal" in window]
    return lax.conv_general_dilated(
        lhs,
        np.flip(rhs, flipped),
        window.get("stride", (1,) * len(spatial)),
        window.get("pad", ((0, 0),) * len(spatial)),
        window.get("lhs_dilate"),
        window.get("rhs_dilate"),
        lax.ConvDimensionNumbers(
            places(of_lhs, "b", "f"), places(of_rhs, "o", "i"), places(of_result, "b", "f")
        ),
        features,
        batches,
        precision="highest",
    )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    lhs, rhs, labels, options = CONVOLUTIONS[name]
    a, b = values(*lhs), values(*rhs, seed=1)
    wanted = by_jax(a, b, labels, **options)
    text = lambda x: f"f32[{','.join(map(str, x.shape))}]"
    seen = []
    (y,) = run(
        f"%a = {text(a)} parameter(0)",
        f"%b = {text(b)} parameter(1)",
        f"ROOT %y = {text(wanted)} convolution(%a, %b), {attributes_of(labels, **options)}, "
        'operand_precision={highest,highest}, metadata={op_name="jaxfp8.fprop"}',
        arguments=[a, b],
        seen=lambda *shown: seen.append(shown),
    )
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    ((label, *operands, lhs_scale, rhs_scale),) = seen
    assert (label, lhs_scale, rhs_scale) == ("jaxfp8.fprop", None, None)
    for shown, given in zip(operands, (a, b), strict=True):
        np.testing.assert_array_equal(shown, given)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("", jnp.bfloat16), (", operand_precision={highest,highest}", np.float32)],
)
def test_float32_is_multiplied_as_bfloat16_at_the_default_precision(precision, dtype):
    a, b = values(6, 256), values(256, 5, seed=1)
    (y,) = run(
        "%a = f32[6,256]{1,0:T(8,128)} parameter(0)",
        "%b = f32[256,5]{0,1:T(8,128)} parameter(1)",
        f"ROOT %y = f32[6,5]{{1,0:T(8,128)}} convolution(%a, %b), dim_labels=bf_io->bf{precision}",
        arguments=[a, b],
    )
    wide = lambda x: x.astype(dtype).astype(np.float64)
    np.testing.assert_allclose(y, wide(a) @ wide(b), rtol=1e-5, atol=1e-5)


def test_fp8_operands_are_shown():
    a, b = (jnp.asarray(values(6, 8, seed=n)).astype(jnp.float8_e4m3fn) for n in (0, 1))
    seen = []
    (y,) = run(
        "%a = f8e4m3fn[6,8]{1,0:T(8,128)(4,1)S(1)} parameter(0)",
        "%b = f8e4m3fn[6,8]{1,0:T(8,128)(4,1)} parameter(1)",
        "ROOT %y = bf16[6,6]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_oi->bf",
        arguments=[a, b],
        seen=lambda label, *shown: seen.extend(shown[:2]),
    )
    wanted = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    assert np.asarray(y).tolist() == wanted.astype(jnp.bfloat16).tolist()
    assert [x.tobytes() for x in seen] == [np.asarray(x).tobytes() for x in (a, b)]
    assert [x.dtype for x in seen] == [jnp.float8_e4m3fn] * 2


IN_A_BRANCH = """%sliced (c: (f32[6,5])) -> f32[4,5] {
  %c = (f32[6,5]{0,1:T(8,128)}) parameter(0)
  %w = f32[6,5]{0,1:T(8,128)} get-tuple-element(%c), index=0
  ROOT %y = f32[4,5]{0,1:T(8,128)} bitcast(%w)
}
%multiplied (c: (f32[4,6], f32[6,5])) -> f32[4,5] {
  %c = (f32[4,6]{1,0:T(8,128)}, f32[6,5]{0,1:T(8,128)}) parameter(0)
  %x = f32[4,6]{1,0:T(8,128)} get-tuple-element(%c), index=0
  %w = f32[6,5]{0,1:T(8,128)} get-tuple-element(%c), index=1
  ROOT %y = f32[4,5]{0,1:T(8,128)} convolution(%x, %w), dim_labels=bf_io->bf, \
operand_precision={highest,highest}
}
"""


@pytest.mark.parametrize("taken", [0, 1])
def test_matmuls_in_branches(taken):
    """XLA for CPUs chooses layouts in branches. The callback must get rows all the same."""
    x, w = values(4, 6), values(6, 5, seed=1)
    (y,) = run(
        "%p = s32[] parameter(0)",
        "%x = f32[4,6]{1,0:T(8,128)} parameter(1)",
        "%w = f32[6,5]{0,1:T(8,128)} parameter(2)",
        "%t = (f32[6,5]{0,1:T(8,128)}) tuple(%w)",
        "%u = (f32[4,6]{1,0:T(8,128)}, f32[6,5]{0,1:T(8,128)}) tuple(%x, %w)",
        "ROOT %y = f32[4,5]{0,1:T(8,128)} conditional(%p, %t, %u), "
        "branch_computations={%sliced, %multiplied}",
        arguments=[jnp.int32(taken), x, w],
        before=IN_A_BRANCH,
    )
    np.testing.assert_allclose(y, x @ w if taken else w[:4], rtol=1e-5)


# Other operations


def test_bfloat16_and_float32_in_one_operation():
    x = jnp.asarray([0.1, 300, -7], jnp.bfloat16)
    low, high = np.float32(0.3), np.float32(200.3)
    y, z, equal, copied = run(
        "%x = bf16[3]{0:T(256)} parameter(0)",
        "%low = f32[] constant(0.3)",
        "%high = f32[] constant(200.3)",
        "%y = f32[3]{0:T(128)} clamp(%low, %x, %high)",
        "%z = bf16[3]{0:T(256)} multiply(%y, %x)",
        "%e = pred[3]{0:T(512)} compare(%y, %x), direction=EQ",
        "%c = bf16[3]{0:T(256)} copy(%y)",
        "ROOT %t = (f32[3]{0:T(128)}, bf16[3]{0:T(256)}, pred[3]{0:T(512)}, bf16[3]{0:T(256)}) "
        "tuple(%y, %z, %e, %c)",
        arguments=[x],
    )
    wide = np.asarray(x, np.float32)
    wanted = np.clip(wide, low, high)
    assert y.tolist() == wanted.tolist()
    assert z.tolist() == (wanted * wide).astype(jnp.bfloat16).tolist()
    assert equal.tolist() == (wanted == wide).tolist()
    assert copied.tolist() == wanted.astype(jnp.bfloat16).tolist()


def test_custom_calls_of_xla():
    x = jnp.arange(4, dtype=jnp.uint32) + jnp.uint32(2**31)
    wide, low, high, same, empty = run(
        "%x = u32[4]{0:T(128)} parameter(0)",
        '%w = u64[4]{0:T(128)} custom-call(%x, %x), custom_call_target="X64Combine"',
        '%l = u32[4]{0:T(128)} custom-call(%w), custom_call_target="X64SplitLow"',
        '%h = u32[4]{0:T(128)} custom-call(%w), custom_call_target="X64SplitHigh"',
        "%f = f32[4]{0:T(128)} convert(%w)",
        '%s = u32[4]{0} custom-call(%x), custom_call_target="AssumeGatherIndicesInBound"',
        '%e = (f32[2]{0:T(128)S(1)}, s32[]) custom-call(), custom_call_target="AllocateBuffer"',
        "%g = f32[2]{0:T(128)} get-tuple-element(%e), index=0",
        "ROOT %t = (f32[4]{0}, u32[4]{0}, u32[4]{0}, u32[4]{0}, f32[2]{0}) "
        "tuple(%f, %l, %h, %s, %g)",
        arguments=[x],
    )
    numbers = np.asarray(x, np.uint64)
    assert wide.tolist() == ((numbers << np.uint64(32)) | numbers).astype(np.float32).tolist()
    assert low.tolist() == high.tolist() == same.tolist() == x.tolist()
    assert empty.shape == (2,)


def test_operands_that_an_update_gives():
    before = """%add {
  %a = f32[4]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  ROOT %less = f32[4]{0} subtract(%a, %b)
}"""
    (y,) = run(
        "%x = f32[4]{0} parameter(0)",
        "%two = f32[4]{0} add(%x, %x)",
        '%s = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%add',
        "%u = ((f32[4]{0}, f32[4]{0}), f32[4]{0}) call-update(%s, %two, %x)",
        "ROOT %y = f32[4]{0} call-done(%u)",
        arguments=[jnp.arange(4.0)],
        before=before,
    )
    assert y.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("target", ["tpu_custom_call", "TopK"])
def test_kernels_are_refused_by_name(target):
    call = f'custom_call_target="{target}", metadata={{op_name="jit(f)/ragged_dot"}}'
    with pytest.raises(ValueError, match=rf"calls {target}, .*jit\(f\)/ragged_dot"):
        run(
            "%x = f32[4]{0:T(128)} parameter(0)",
            f"ROOT %y = f32[4]{{0:T(128)}} custom-call(%x), {call}",
            arguments=[jax.numpy.zeros(4)],
        )


def test_bits_of_the_chip_are_refused():
    with pytest.raises(ValueError, match="draws bits by the chip's own algorithm"):
        run(
            "%k = u64[2]{0} parameter(0)",
            "ROOT %y = (u64[2]{0}, u32[4]{0}) rng-bit-generator(%k), algorithm=rng_default",
            arguments=[np.zeros(2, np.uint64)],
        )
