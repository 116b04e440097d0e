"""The work of grouped matmuls compiled for an H200: that of the rows, and nothing of E times T."""

import functools

import jax
import jax.numpy as jnp
import pytest
from experts import alone, grouped, in_pallas, work_of_experts, worst_rows
from interpreter import needs_mosaic
from program import SHAPE, Program
from targets import array, compile_for
from work import host_transfers, work_of

import jaxfp8 as fp8

pytestmark = pytest.mark.deviceless

K, N = 256, 512
RECIPES = ("identity", "current", "rowwise", "blockwise", "mxfp8")


BY_XLA = fp8.Kernels("h200", casts="xla", matmuls="xla")
H200 = fp8.Kernels("h200")


@pytest.mark.parametrize(("experts", "average"), [(8, 512), (64, 512), (8, 4096)])
@pytest.mark.parametrize("name", RECIPES)
def test_operations_are_those_of_the_rows(name, experts, average):
    mine = work_of(grouped(name, experts, average, K, N, BY_XLA))
    wanted = 6.0 * experts * average * K * N
    assert wanted <= mine.flops <= 1.3 * wanted
    assert work_of(alone(name, average, K, N, BY_XLA)).flops == pytest.approx(wanted / experts)


@pytest.mark.parametrize("name", RECIPES)
def test_no_array_of_experts_times_rows_and_no_word_of_the_host(name):
    experts, average = 64, 512
    program = grouped(name, experts, average, K, N, BY_XLA)
    assert not host_transfers(program)
    largest = max(experts * average * N, experts * K * N) * 1.3
    for computation in program.computations.values():
        for instruction in computation.values():
            for _, shape in SHAPE.findall(instruction.type):
                sizes = [int(size) for size in shape.split(",") if size]
                assert functools.reduce(lambda a, b: a * b, sizes, 1) <= largest, instruction


@needs_mosaic
@pytest.mark.parametrize(("experts", "average"), [(8, 512), (64, 512), (8, 4096)])
@pytest.mark.parametrize("name", ["current", "rowwise", "blockwise", "mxfp8"])
def test_hopper_s_kernels_move_little_more_than_each_expert_alone(name, experts, average):
    """benchmarks/programs/grouped_work.py has the table of larger layers."""
    found = work_of_experts(name, experts, average, 512, 1024, H200)
    assert found.flops <= 1.3
    assert found.bytes <= 1.3
    assert worst_rows(experts, average) <= 1.3
    program = grouped(name, experts, average, 512, 1024, H200)
    assert in_pallas(program) == (6 if name in ("blockwise", "mxfp8") else 3)
    assert not host_transfers(program)


def test_the_counter_sees_a_dense_product():
    """`jax.lax.ragged_dot` does the work of all experts for each row."""
    experts, average = 8, 512
    rows, sizes = experts * average, jax.ShapeDtypeStruct((experts,), jnp.int32)
    compiled = compile_for("h200", jax.lax.ragged_dot, array(rows, K), array(experts, K, N), sizes)
    found = work_of(Program(compiled.as_text()))
    assert found.flops >= 0.9 * experts * 2 * rows * K * N
