"""Types and instructions as XLA prints them."""

import jax.numpy as jnp
import pytest
from wire_text import program

from jaxfp8.programs._hlo import read_program, tensors_of

# Dtype, shape, bytes, and bytes in the memory of the device.
TENSORS = {
    "f8e5m2[2,3]{1,0}": [("float8_e5m2", (2, 3), 6, 6)],
    "f8e8m0fnu[8]": [("float8_e8m0fnu", (8,), 8, 8)],
    "bf16[]": [("bfloat16", (), 2, 2)],
    "pred[7]{0}": [("bool", (7,), 7, 7)],
    "c64[2]{0}": [("complex64", (2,), 16, 16)],
    "s4[10]{0:E(4)}": [("int4", (10,), 5, 5)],
    "s4[3,3]{1,0:T(8,128)E(4)}": [("int4", (3, 3), 5, 8 * 128 // 2)],
    "s4[10]{0}": [("int4", (10,), 10, 10)],
    "f4e2m1fn[32]{0:E(4)S(1)}": [("float4_e2m1fn", (32,), 16, 16)],
    "f32[<=8,16]{1,0}": [("float32", (8, 16), 512, 512)],
    "((f32[2]{0}, u32[]), token[], /*index=3*/s8[0]{0}, opaque[])": [
        ("float32", (2,), 8, 8), ("uint32", (), 4, 4), ("int8", (0,), 0, 0),
    ],
    # As programs for TPUs print them.
    "f32[]{:T(128)}": [("float32", (), 4, 512)],
    "bf16[5,130,9]{1,2,0:T(8,128)(2,1)}": [("bfloat16", (5, 130, 9), 11700, 5 * 256 * 16 * 2)],
    "(f8e4m3fn[64,128]{1,0:T(32,128)(4,1)S(1)}, f8e4m3fn[64,128]{1,0:T(32,128)(4,1)S(0)})": [
        ("float8_e4m3fn", (64, 128), 8192, 0), ("float8_e4m3fn", (64, 128), 8192, 8192),
    ],
    "f32[8,128]{1,0:T(8,128)S(5)}": [("float32", (8, 128), 4096, 0)],
}  # fmt: skip


@pytest.mark.parametrize("type", TENSORS)
def test_types(type):
    assert list(tensors_of(type)) == TENSORS[type]
    for tensor in tensors_of(type):
        assert jnp.dtype(tensor.dtype).name == tensor.dtype


def test_the_reader_knows_what_other_readers_need():
    text = program(
        "%m = (bf16[64,64]{1,0}, s8[33]{0}) custom-call(%x, %y, %s), "
        'custom_call_target="__cublas$lt$matmul$f8", '
        'metadata={op_name="jit(step)/dot_general" stack_frame_id=1}',
        "ROOT %k = f32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })",
    )
    read = read_program(text)
    matmul = read.computations[read.entry]["m"]
    assert (matmul.opcode, matmul.operands, matmul.label) == (
        "custom-call",
        ("x", "y", "s"),
        "jit(step)/dot_general",
    )
    assert 'custom_call_target="__cublas$lt$matmul$f8"' in matmul.attributes
    assert read.computations[read.entry]["k"].opcode == "constant"
    assert (read.replicas, read.partitions) == (1, 8)
