"""Reports of collectives: what is selected, printed and refused."""

import jax.numpy as jnp
import pytest
from wire_text import ADD, G4, GATHER, IDLE, REDUCE, call, gather, loop, program

import jaxfp8 as fp8
from jaxfp8.programs import WireReport, assert_wire_dtype, wire_report


def test_only_and_print():
    report = wire_report(
        program(loop(5), REDUCE, body=[GATHER, gather("[4,2]<=[8]", "y", "h")], **IDLE, **ADD)
    )
    assert str(report) == (
        "kind        dtype          group  tensors  operand bytes  wire bytes\n"
        "all-gather  bfloat16           2        5          5,120       5,120\n"
        "all-gather  float8_e4m3fn      4        5          2,560       7,680\n"
        "all-reduce  float32            4        1              4           6\n"
        "total                                  11          7,684      12,806"
    )
    assert str(WireReport(())).endswith("  0              0           0")
    assert report.only() == report
    assert report.only(kind="all-gather").operand_bytes == 7680
    assert (
        report.only(dtype=fp8.E4M3)
        == report.only(dtype="float8_e4m3fn")
        == report.only(group_size=4, at_least=5)
    )
    assert (
        report.only(kind="all-gather", dtype=jnp.bfloat16, group_size=2, at_least=1024).count == 5
    )
    assert report.only(at_least=1025).transfers == ()


def test_assert_wire_dtype():
    both = program(
        f"%g = (f8e4m3fn[64,32]{{1,0}}, f32[4]{{0}}) all-gather(%x, %s), {G4}, dimensions={{0}}",
        REDUCE,
        **ADD,
    )
    assert_wire_dtype(both, "all-gather", fp8.E4M3, at_least=5)
    assert_wire_dtype(both, "all-gather", fp8.E4M3, jnp.float32)
    with pytest.raises(
        AssertionError,
        match=r"another dtype than float8_e4m3fn:\n  float32\[\], 4 bytes, among 4 devices: g\nNam",
    ):
        assert_wire_dtype(both, "all-gather", fp8.E4M3)
    with pytest.raises(
        AssertionError, match="no all-gather of at least 5 bytes carries float8_e5m2"
    ):
        assert_wire_dtype(both, "all-gather", fp8.E4M3, fp8.E5M2, at_least=5)


def test_what_stays_on_its_device_does_not_travel():
    text = program(
        GATHER,
        gather("[8,1]<=[8]", "y", "h"),
        "%z = f32[0]{0} constant({})",
        gather("[1,8]<=[8]", "z", "k"),
    )
    assert wire_report(text).only(dtype=jnp.bfloat16).wire_bytes == 0
    assert_wire_dtype(text, "all-gather", fp8.E4M3)
    with pytest.raises(AssertionError, match="no all-gather carries bfloat16"):
        assert_wire_dtype(text, "all-gather", jnp.bfloat16, fp8.E4M3)


def test_a_silent_gather_is_found_wherever_it_is():
    silent = gather("[2,4]<=[8]", "y", "h")
    cheap = call("conditional", "branch_computations={%dear, %cheap}")
    places = [
        program(GATHER, silent),
        program(GATHER, loop(None), body=silent, **IDLE),
        program(cheap, dear=[gather("[2,4]<=[8]", name=n) for n in "abc"], cheap=silent),
        program(GATHER, call("async-start", "calls=%inner"), inner=silent),
    ]
    for text in places:
        with pytest.raises(
            AssertionError,
            match=r"float8_e4m3fn:\n  bfloat16\[16,32\], 1,024 bytes, among 4 devices: "
            r"jit\(f\)/all_g",
        ):
            assert_wire_dtype(text, "all-gather", fp8.E4M3)
