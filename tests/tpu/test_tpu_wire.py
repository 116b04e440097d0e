"""`wire_report` on programs for eight cores of TPU 7x: each form of a collective, by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import compile_on, counts, gather, scan
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_targets import topology

import jaxfp8 as fp8
from jaxfp8.programs import assert_wire_dtype, wire_report
from jaxfp8.sharding import Shard

pytestmark = pytest.mark.tpu

ROWS = P("fsdp")
LAYERS, K, N = 6, 512, 1024


def compiled(f, *arguments, into, out=ROWS):
    """`f` on 4 x 2 cores; arguments are (shape, dtype)."""
    devices = np.array(topology("tpu7x").devices).reshape(4, 2)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return compile_on(mesh, f, *arguments, into=into, out=out)


# A shard of [64, 1024] over "fsdp" is [16, 1024].
ONE = (((64, 1024), jnp.float8_e4m3fn),)
TWO = (((64, 1024), jnp.bfloat16), ((64, 1024), jnp.float8_e4m3fn))
LARGE = (((4096, 4096), jnp.bfloat16),)  # a shard is 8 MiB
FORMS = {
    "two dtypes": (
        lambda x, y: (gather(x), gather(y)),
        TWO,
        {
            ("all-gather", "bfloat16", 4): (1, 32768, 3 * 32768),
            ("all-gather", "float8_e4m3fn", 4): (1, 16384, 3 * 16384),
        },
    ),
    # A small one becomes an all-reduce, and each device takes its part.
    "a small reduce-scatter": (
        lambda x: lax.psum_scatter(x, "fsdp", tiled=True),
        TWO[:1],
        {("all-reduce", "bfloat16", 4): (1, 32768, 32768 * 3 / 2)},
    ),
    "a large reduce-scatter": (
        lambda x: lax.psum_scatter(x, "fsdp", tiled=True),
        LARGE,
        {("reduce-scatter", "bfloat16", 4): (1, 2**23, 2**23 * 3 / 4)},
    ),
    "a large all-reduce": (
        lambda x: lax.psum(x, "fsdp"),
        LARGE,
        {("all-reduce", "bfloat16", 4): (1, 2**23, 2**23 * 3 / 2)},
    ),
    "all-to-all": (
        lambda x: lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
        ONE,
        {("all-to-all", "float8_e4m3fn", 4): (1, 16384, 16384 * 3 / 4)},
    ),
    "ring": (
        lambda x: lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
        ONE,
        {("collective-permute", "float8_e4m3fn", 4): (1, 16384, 16384)},
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
}


@pytest.mark.parametrize("row", FORMS)
def test_counts(row):
    function, arguments, expected = FORMS[row]
    assert (
        counts(wire_report(compiled(function, *arguments, into=(ROWS,) * len(arguments))))
        == expected
    )


@pytest.mark.parametrize("quantized_before_it_travels", [True, False])
def test_weights_gathered_in_a_scan(quantized_before_it_travels):
    def layer(h, w):
        w = gather(w.astype(fp8.E4M3.dtype)) if quantized_before_it_travels else gather(w)
        y = jnp.dot(h, w.astype(jnp.bfloat16)).astype(jnp.bfloat16)
        return jnp.tanh(y[:, :K]), None

    program = compiled(
        lambda w, h: lax.scan(layer, h, w)[0],
        ((LAYERS, K, N), jnp.bfloat16),
        ((256, K), jnp.bfloat16),
        into=(P(None, "fsdp"), P(("fsdp", "tensor"))),
        out=P(("fsdp", "tensor")),
    )
    values = LAYERS * K // 4 * N
    if quantized_before_it_travels:
        assert_wire_dtype(program, "all-gather", fp8.E4M3)
        expected = {("all-gather", "float8_e4m3fn", 4): (LAYERS, values, 3 * values)}
    else:
        with pytest.raises(AssertionError, match="another dtype than float8_e4m3fn"):
            assert_wire_dtype(program, "all-gather", fp8.E4M3)
        expected = {("all-gather", "bfloat16", 4): (LAYERS, 2 * values, 6 * values)}
    assert counts(wire_report(program)) == expected


def test_a_weight_is_gathered_as_fp8():
    """XLA would copy bytes that fprop and dgrad both read as FP8."""

    def gradients(w, x):
        dot = functools.partial(fp8.dot, recipe=fp8.recipes.current(), w_shard=Shard(0, "fsdp"))
        loss = lambda w, x: jnp.sum(jnp.tanh(dot(x, w)).astype(jnp.float32))
        return jax.value_and_grad(loss, argnums=(0, 1))(w, x)

    devices = np.array(topology("tpu7x").devices)
    split = NamedSharding(Mesh(devices, ("fsdp",), axis_types=(AxisType.Auto,)), ROWS)
    w, x = (jax.ShapeDtypeStruct((n, K), jnp.bfloat16, sharding=split) for n in (K, 4096))
    assert_wire_dtype(jax.jit(gradients).lower(w, x).compile(), "all-gather", fp8.E4M3)
