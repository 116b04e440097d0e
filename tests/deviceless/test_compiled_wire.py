"""What eight H200 put on the wire.

Asynchronous collectives, FP8 as FP8, and the gather that silently is not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import compile_on, counts, gather, scan
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.programs import assert_wire_dtype, wire_report

pytestmark = pytest.mark.deviceless

# Weights [LAYERS, K, N], a shard of each over "fsdp" is [64, 128]: 8192 values.
LAYERS, K, N = 6, 256, 128
VALUES = K // 4 * N
ROWS = P("fsdp")


def mesh_of(shape, fsdp, tensor):
    devices = np.array(topology("h200", shape).devices).reshape(fsdp, tensor)
    return Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def compiled(f, *arguments, into, out):
    """`f` on 4 x 2 GPUs; arguments are (shape, dtype)."""
    return compile_on(mesh_of("1x1x8", 4, 2), f, *arguments, into=into, out=out)


def layers(quantized_before_it_travels):
    def layer(h, w):
        if quantized_before_it_travels:
            w = gather((w / lax.pmax(jnp.max(jnp.abs(w)), "fsdp")).astype(jnp.float8_e4m3fn))
        else:  # the amax of the whole weight, which asks for the whole weight
            w = gather(w)
            w = (w / jnp.max(jnp.abs(w))).astype(jnp.float8_e4m3fn)
        return jnp.tanh(h @ w.astype(jnp.bfloat16) @ jnp.ones((N, K), jnp.bfloat16)), None

    arguments = ((LAYERS, K, N), jnp.bfloat16), ((64, K), jnp.bfloat16)
    return compiled(
        lambda w, h: lax.scan(layer, h, w)[0],
        *arguments,
        into=(P(None, "fsdp"), P("tensor")),
        out=P("tensor"),
    )


def test_weights_gathered_in_a_scan():
    program = layers(quantized_before_it_travels=True)
    assert_wire_dtype(program, "all-gather", fp8.E4M3)
    report = wire_report(program)
    assert counts(report) == {
        ("all-gather", "float8_e4m3fn", 4): (LAYERS, LAYERS * VALUES, 3 * LAYERS * VALUES),
        ("all-reduce", "bfloat16", 4): (LAYERS, LAYERS * 2, LAYERS * 3),
    }


def test_a_silent_gather_of_bfloat16_is_found():
    program = layers(quantized_before_it_travels=False)
    report = wire_report(program)
    assert counts(report) == {
        ("all-gather", "bfloat16", 4): (LAYERS, 2 * LAYERS * VALUES, 6 * LAYERS * VALUES)
    }
    with pytest.raises(
        AssertionError, match=r"another dtype than float8_e4m3fn:\n  bfloat16\[.*all_gather"
    ):
        assert_wire_dtype(program, "all-gather", fp8.E4M3, at_least=1024)


# function of shards, arguments, expected. A shard of x [64, 32] over "fsdp" is [16, 32].
ONE = (((64, 32), jnp.float8_e4m3fn),)
TWO = (((64, 32), jnp.bfloat16), ((64, 32), jnp.float8_e4m3fn))
PROGRAMS = {
    "tuple of two dtypes": (
        lambda x, y: (gather(x), gather(y)),
        TWO,
        {
            ("all-gather", "bfloat16", 4): (1, 1024, 3072),
            ("all-gather", "float8_e4m3fn", 4): (1, 512, 1536),
        },
    ),
    # Two four-bit values share a byte, and travel as one.
    "four bits": (gather, (((64, 32), jnp.int4),), {("all-gather", "int8", 4): (1, 256, 768)}),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "fsdp", tiled=True),
        TWO[:1],
        {("reduce-scatter", "bfloat16", 4): (1, 1024, 768)},
    ),
    "all-to-all": (
        lambda x: lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
        ONE,
        {("all-to-all", "float8_e4m3fn", 4): (1, 512, 384)},
    ),
    "ring": (
        lambda x: lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
        ONE,
        {("collective-permute", "float8_e4m3fn", 4): (1, 512, 512)},
    ),
    "nested scan": (
        scan(scan(lambda x: lax.psum(x, "tensor") / 2, 3), 5),
        (((64, 32), jnp.float32),),
        {("all-reduce", "float32", 2): (15, 15 * 2048, 15 * 2048)},
    ),
    "cond": (
        lambda x: lax.cond(
            x[0, 0] > 0, lambda x: lax.psum(x, "fsdp"), lambda x: lax.psum(x, "tensor"), x
        ),
        (((64, 32), jnp.float32),),
        {("all-reduce", "float32", 4): (1, 2048, 3072)},
    ),
    "ragged all-to-all": (
        lambda x, y, *sizes: lax.ragged_all_to_all(x, y, *sizes, axis_name="fsdp"),
        (*TWO[:1] * 2, *(((32,), jnp.int32),) * 4),
        {("ragged-all-to-all", "bfloat16", 4): (1, 1024, 1024)},
    ),
}


@pytest.mark.parametrize("row", PROGRAMS)
def test_counts(row):
    function, arguments, expected = PROGRAMS[row]
    program = compiled(function, *arguments, into=(ROWS,) * len(arguments), out=ROWS)
    assert counts(wire_report(program)) == expected


def test_asynchronous_halves_count_once():
    program = compiled(
        scan(lambda x: lax.psum(x, "tensor") / 2, 5),
        ((64, 32), jnp.float32),
        into=(ROWS,),
        out=ROWS,
    )
    assert " all-reduce-start(" in program.as_text()
    assert " all-reduce-done(" in program.as_text()
    assert counts(wire_report(program)) == {("all-reduce", "float32", 2): (5, 5 * 2048, 5 * 2048)}


@pytest.mark.parametrize(("shape", "fsdp", "tensor"), [("1x1x8", 2, 4), ("1x64x8", 64, 8)])
def test_eighty_layers_of_a_large_model(shape, fsdp, tensor):
    """Auto mesh, remat, 80 layers of two weights [8192, 28672].

    Each is gathered twice, forward and backward.
    """
    depth, model, hidden = 80, 8192, 28672
    mesh = mesh_of(shape, fsdp, tensor)

    def at(*spec):
        return NamedSharding(mesh, P(*spec))

    def array(sizes, *spec):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=at(*spec))

    def in_fp8(w, *spec):
        return lax.with_sharding_constraint(w.astype(jnp.float8_e4m3fn), at(*spec)).astype(
            jnp.bfloat16
        )

    @jax.checkpoint
    def layer(h, weights):
        up, down = in_fp8(weights[0], None, "tensor"), in_fp8(weights[1], "tensor", None)
        return lax.with_sharding_constraint(h + jnp.tanh(h @ up) @ down, at("fsdp")), None

    def loss(weights, h):
        return lax.scan(layer, h, weights)[0].astype(jnp.float32).sum()

    weights = (
        array((depth, model, hidden), None, "fsdp", "tensor"),
        array((depth, hidden, model), None, "tensor", "fsdp"),
    )
    program = jax.jit(jax.grad(loss)).lower(weights, array((512 * fsdp, model), "fsdp")).compile()
    assert_wire_dtype(program, "all-gather", fp8.E4M3)
    gathers = wire_report(program).only(kind="all-gather")
    shards = 2 * 2 * depth * model * hidden // (fsdp * tensor)
    assert (gathers.count, gathers.operand_bytes, gathers.wire_bytes) == (
        4 * depth,
        shards,
        shards * (fsdp - 1),
    )
