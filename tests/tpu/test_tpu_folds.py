"""XLA for TPUs keeps each rounding to FP8, which XLA for GPUs drops where it widens it again.

Payloads that leave a program are in FP8. Whether the numbers that it computes with were rounded to
FP8, is seen in two ways: the conversions of the optimized program are counted, and it is run.
"""

import re

import cells
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_targets import compile_for, topology

import jaxfp8 as fp8
from jaxfp8.programs import run_on_cpu
from jaxfp8.programs._hlo import read_program

pytestmark = pytest.mark.tpu

CHIPS = pytest.mark.parametrize(
    "chip", ["tpu7x", *(pytest.param(c, marks=pytest.mark.slow) for c in ("v6e", "v5p", "v5e"))]
)
SCALE = jnp.float32(0.013)
X, W, _ = cells.arrays()


def quantize(x, scale, format=fp8.E4M3):
    return fp8.quantize(x, format, scale=scale)


def fake_quantize(x):
    return fp8.fake_quantize(x, fp8.E4M3)


def dequantize_before_a_matmul(x, w, scale):
    return quantize(x, scale).dequantize() @ w


def saved_and_read_again(x, scale):
    """The payload leaves the program, and another operation of it reads the payload."""
    q = quantize(x, scale)
    return q.values, jnp.tanh(q.dequantize())


def matmul_of_fp8(x, w, scale):
    return lax.dot(
        quantize(x, scale, fp8.E5M2).values,
        quantize(w, scale).values,
        preferred_element_type=jnp.float32,
    )


def rows_of_fp8(x, rows, scale):
    return quantize(x, scale).values[rows].astype(jnp.float32)


ROWS = jnp.asarray([3, 5, 400], jnp.int32)
# A function, its arguments, the conversions to FP8 and from FP8 that it needs.
FUNCTIONS = {
    "fake_quantize": (fake_quantize, (X,), 1, 1),
    "dequantize": (dequantize_before_a_matmul, (X, W, SCALE), 1, 1),
    "saved": (saved_and_read_again, (X, SCALE), 1, 1),
    "matmul": (matmul_of_fp8, (X, W, SCALE), 2, 0),
    "rows": (rows_of_fp8, (X, ROWS, SCALE), 1, 1),
}


def conversions(text):
    """How many instructions convert to FP8, and how many from FP8."""
    program = read_program(text)
    to_fp8 = from_fp8 = 0
    for computation in program.computations.values():
        for instruction in computation.values():
            if instruction.opcode == "convert":
                (operand,) = instruction.operands
                to_fp8 += instruction.type.startswith("f8")
                from_fp8 += computation[operand].type.startswith("f8")
    return to_fp8, from_fp8


@CHIPS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_conversions_stay(chip, name):
    function, arguments, *wanted = FUNCTIONS[name]
    compiled = compile_for(chip, function, *arguments)
    assert conversions(compiled.as_text()) == tuple(wanted)
    operands = []
    found = run_on_cpu(compiled, *arguments, seen=lambda label, *shown: operands.append(shown[:2]))
    expected = jax.jit(function)(*arguments)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        ours, theirs = (np.asarray(v, np.float32) for v in (ours, theirs))
        if operands:  # sums have another order
            assert np.linalg.norm(ours - theirs) < 2**-8 * np.linalg.norm(theirs)
        else:
            np.testing.assert_array_equal(ours, theirs)
    if name == "matmul":
        assert [x.dtype for x in operands[0]] == [jnp.float8_e5m2, jnp.float8_e4m3fn]
    if name == "dequantize":
        assert has_few_magnitudes(operands[0][0])


def has_few_magnitudes(x):
    """Whether x can be FP8 times one scale."""
    return len(np.unique(np.abs(np.asarray(x, np.float32)))) <= 127


_PAIR = re.compile(r"(= \w+\[[^=]*? convert\()%([\w.\-]+)\)")


def folded(text):
    """The text with each conversion from FP8 reading what was converted to FP8."""
    narrowed = dict(re.findall(r"%([\w.\-]+) = f8\w+\[[^=]*? convert\(%([\w.\-]+)\)", text))
    return _PAIR.sub(lambda m: f"{m[1]}%{narrowed.get(m[2], m[2])})", text)


def test_a_fold_would_be_seen():
    compiled = compile_for("tpu7x", fake_quantize, X)
    text = folded(compiled.as_text())
    assert conversions(text) == (1, 0)
    (found,) = run_on_cpu(text, X)
    assert not has_few_magnitudes(found)
    assert has_few_magnitudes(run_on_cpu(compiled, X))


@CHIPS
def test_the_wire_carries_fp8(chip):
    """An all-gather of payloads moves bytes, and is not moved behind a conversion."""
    mesh = Mesh(np.array(topology(chip).devices[:4]), ("d",), axis_types=(AxisType.Auto,))

    def function(x, scale):
        gathered = fp8.comms.all_gather(quantize(x, scale), "d", common_scale=True)
        return gathered.dequantize()

    specs = {"in_specs": (P("d"), P()), "out_specs": P()}
    mapped = jax.shard_map(function, mesh=mesh, check_vma=False, **specs)
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    text = jax.jit(mapped).lower(place(X, P("d")), place(SCALE, P())).compile().as_text()
    gathered = [
        computation[instruction.operands[0]].type
        for computation in read_program(text).computations.values()
        for instruction in computation.values()
        if instruction.opcode in ("all-gather", "all-gather-start")
        and len(re.findall(r"\[\d+,\d+\]", instruction.type))
    ]
    assert gathered
    assert all(type.startswith(("f8e4m3fn", "u8", "s8")) for type in gathered)
