"""The bytes that 8 and 64 H200 send for a sum of gradients, by each method."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.comms import AutoScaledFP8, BFloat16Sum, TwoPhaseFP8
from jaxfp8.programs import assert_wire_dtype, wire_report

E8M0 = fp8.ScaleRule(scale_format=fp8.E8M0)
pytestmark = pytest.mark.deviceless

SHAPE = (1024, 1030)  # groups of 128 cut neither rows nor 64 slices evenly
VALUES = 1024 * 1030
TOPOLOGIES = {8: "1x1x8", 64: "1x8x8"}


@functools.cache
def compiled(devices, method, *, scatter=False):
    """A sum of one large and one small gradient; by `lax.psum` if `method` is None."""
    mesh = Mesh(np.array(topology("h200", TOPOLOGIES[devices]).devices), ("d",), (AxisType.Auto,))
    grads = {"large": SHAPE, "small": (1024,)}

    def grads_of():
        return {name: jnp.zeros(shape) for name, shape in grads.items()}

    state = method and jax.eval_shape(lambda: fp8.comms.init_gradient_sums(grads_of(), method))

    def local(grads, state):
        grads = jax.tree.map(lambda g: g[0], grads)
        if method is None:
            return lax.psum(grads, "d"), state
        if scatter:
            return fp8.comms.reduce_scatter_gradients(grads, "d", method=method), state
        return fp8.comms.all_reduce_gradients(grads, "d", method=method, state=state)

    def argument(spec, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    each = {name: argument(P("d"), jnp.zeros((devices, *shape))) for name, shape in grads.items()}
    state = jax.tree.map(functools.partial(argument, P()), state)
    out = P("d") if scatter else P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=(out, P()))
    return jax.jit(mapped).lower(each, state).compile()


def share(devices, method, **how):
    """Wire bytes as a share of those of a float32 all-reduce of the same gradients."""
    mine, whole = (wire_report(compiled(devices, m, **k)) for m, k in ((method, how), (None, {})))
    return mine.wire_bytes / whole.wire_bytes


@pytest.mark.parametrize("devices", TOPOLOGIES)
@pytest.mark.parametrize(
    ("method", "bytes_share"),
    {
        "bfloat16": (BFloat16Sum(), 0.5),
        "two phases": (TwoPhaseFP8(), 0.25 * (1 + 4 / 128)),
        "two phases, E8M0": (TwoPhaseFP8(scale=E8M0), 0.25 * (1 + 1 / 128)),
        "auto": (AutoScaledFP8(), 0.25),
    }.values(),
    ids=["bfloat16", "two phases", "two phases, E8M0", "auto"],
)
def test_bytes_of_a_sum(devices, method, bytes_share):
    assert share(devices, method) == pytest.approx(bytes_share, rel=0.02)  # padding
    assert share(devices, method) <= (0.51 if isinstance(method, BFloat16Sum) else 0.40)


@pytest.mark.parametrize("devices", TOPOLOGIES)
def test_xla_keeps_an_all_reduce_of_fp8(devices):
    """It is neither widened nor split. The exchange runs only if a sum overflows."""
    program = compiled(devices, AutoScaledFP8(reduction="all_reduce"))
    # The small gradient is sent twice, in float32.
    assert_wire_dtype(program, "all-reduce", fp8.E4M3, at_least=10_000)
    report = wire_report(program)
    (whole,) = report.only(kind="all-reduce", dtype=fp8.E4M3).transfers
    assert whole.bytes == VALUES
    rare = report.only(kind="all-to-all").wire_bytes + report.only(kind="all-gather").wire_bytes
    all_bytes = wire_report(compiled(devices, None)).wire_bytes
    assert whole.wire_bytes / all_bytes == pytest.approx(0.25, rel=0.02)
    assert rare / all_bytes == pytest.approx(0.25, rel=0.02)
    assert program.as_text().count(" conditional(") == 1


@pytest.mark.parametrize("devices", TOPOLOGIES)
@pytest.mark.parametrize(
    ("method", "bytes_share"),
    [(BFloat16Sum(), 0.25), (TwoPhaseFP8(), 0.125 * (1 + 4 / 128))],
    ids=["bfloat16", "two phases"],
)
def test_a_reduce_scatter_sends_half_of_a_sum(devices, method, bytes_share):
    assert share(devices, method, scatter=True) == pytest.approx(bytes_share, rel=0.02)


def test_bytes_are_sent_and_64_slices_are_added_without_a_loop():
    for method in (TwoPhaseFP8(), AutoScaledFP8()):
        assert " while(" not in compiled(64, method).as_text()
        for kind in ("all-to-all", "all-gather"):
            assert_wire_dtype(compiled(8, method), kind, jnp.uint8, at_least=100_000)
