"""The bytes that an optimizer's update moves on an H200, compiled.

The floor is one read of the gradient, and one read and one write of each state and weight.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from program import BYTES, FREE, SHAPE, Program
from targets import array, topology
from triton_code import call_of
from triton_code import compiled as compiled_kernel
from triton_code import moved as moved_by
from triton_interpreter import needs_triton

from jaxfp8.optim import (
    FP8,
    BFloat16,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    adamw,
    fused_adamw,
    with_master_weights,
)
from jaxfp8.programs import wire_report

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]
N = 2048
WHOLE = P()


def compiled(tx, weight, gradient, shape="1x1x1", spec=WHOLE):
    devices = np.array(topology("h200", shape).devices)
    mesh = Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,))

    def step(grads, state, params):
        # In the order of the arguments: JAX pairs donated arrays with results of their type.
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    def place(x):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec if x.ndim else WHOLE)
        )

    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, weight)
        given = jax.tree.map(place, (gradient, state, weight))
        return given, jax.jit(step, donate_argnums=(1, 2)).lower(*given).compile()


def size(text):
    return sum(
        BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in SHAPE.findall(text)
    )


def moved(program):
    """Bytes that the kernels of the entry read and write."""
    entry = program.computations[program.entry]
    return sum(
        size(each.type) + sum(size(entry[name].type) for name in each.operands if name in entry)
        for each in entry.values()
        if each.op not in FREE and each.op != "copy-start"
    )


def floor(given):
    gradient, state, weight = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in given
    )
    return gradient + 2 * (state + weight)


WIDE, NARROW = array(N, N, dtype=jnp.float32), array(N, N)
EIGHT = BFloat16Plus(bits=8)
AT_THE_FLOOR = {
    "optax": (optax.adamw(1e-3), WIDE, WIDE),
    "bfloat16": (adamw(1e-3, mu=BFloat16(), nu=BFloat16()), WIDE, WIDE),
    "int8": (fused_adamw(1e-3), WIDE, WIDE),
    "int8 + 8": (fused_adamw(1e-3, master=EIGHT), NARROW, NARROW),
    "int8 + 16": (fused_adamw(1e-3, master=BFloat16Plus()), NARROW, WIDE),
    "expanded": (fused_adamw(1e-3, moments=ExpandedFP8()), WIDE, WIDE),
    "expanded + 8": (fused_adamw(1e-3, moments=ExpandedFP8(), master=EIGHT), NARROW, NARROW),
}
BY_XLA = {  # bytes over the floor, at most
    "int8": (adamw(1e-3), WIDE, WIDE, 1.7),
    "int8 + 8": (with_master_weights(adamw(1e-3), master=EIGHT), NARROW, NARROW, 1.6),
    "expanded": (adamw(1e-3, mu=ExpandedFP8(), nu=ExpandedFP8()), WIDE, WIDE, 2.6),
    "fp8-lm": (
        with_master_weights(adamw(1e-3, mu=FP8(), nu=Float16()), master=Float16()),
        NARROW,
        NARROW,
        1.9,
    ),
}


@pytest.mark.parametrize("name", AT_THE_FLOOR)
def test_an_update_moves_the_bytes_of_the_floor(name):
    needs_triton()
    given, program = compiled(*AT_THE_FLOOR[name])
    ratio = moved(Program(program.as_text())) / floor(given)
    assert 1 <= ratio < 1.01, ratio
    # The thresholds of one row are an array.
    assert program.memory_analysis().temp_size_in_bytes < 4 * N + 4096


@pytest.mark.parametrize("name", BY_XLA)
def test_what_xla_makes_of_other_updates(name):
    *what, most = BY_XLA[name]
    given, program = compiled(*what)
    ratio = moved(Program(program.as_text())) / floor(given)
    assert 1.1 < ratio < most, ratio


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp")], ids=str)
def test_on_a_mesh_each_device_updates_its_shard(spec):
    needs_triton()
    _, program = compiled(fused_adamw(1e-3, master=EIGHT), NARROW, NARROW, "1x1x8", spec)
    assert not wire_report(program).transfers, wire_report(program)
    assert len(re.findall(r'custom_call_target="triton_kernel_call', program.as_text())) == 1
    # The thresholds of one row are an array.
    assert program.memory_analysis().temp_size_in_bytes < 4 * N + 4096


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["int8", "int8 + 8", "expanded", "expanded + 8"])
def test_the_kernel_spills_nothing_and_reads_once(name, arch, tmp_path, monkeypatch):
    needs_triton()
    tx, weight, gradient = AT_THE_FLOOR[name]
    state = jax.eval_shape(tx.init, weight)
    call = call_of(monkeypatch, "jaxfp8.kernels.adamw._triton", tx.update, gradient, state, weight)
    _, opcodes, used = compiled_kernel(call, arch, tmp_path, monkeypatch)
    assert re.search(r"STACK:0 .*LOCAL:0\b", used), used
    assert not [opcode for opcode in opcodes if opcode.startswith(("LDL", "STL"))]
    block, threads = N * N // call["grid"], 32 * call["warps"]
    values = [x for x in call["arrays"] if x.size == N * N]  # without the scales of groups
    read, written = (
        {width: amount for width, amount in moved_by(opcodes, kind, threads).items() if width > 4}
        for kind in ("LDG", "STG")
    )
    assert sum(read.values()) == block * sum(x.dtype.itemsize for x in values), (read, values)
    assert sum(written.values()) == block * sum(x.dtype.itemsize for x in values[:-1]), written
