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


def large(devices, method, **how):
    """(kind, dtype) of every transfer of more than a kilobyte that is not the small gradient's."""
    report = wire_report(compiled(devices, method, **how))
    return sorted((t.kind, t.dtype) for t in report.transfers if t.bytes > 1024 and t.shape != (1024,))


@pytest.mark.parametrize("devices", TOPOLOGIES)
@pytest.mark.parametrize(
    ("method", "bytes_share"),
    [
        (BFloat16Sum(), 0.5),
        (TwoPhaseFP8(), 0.25 * (1 + 4 / 128)),
        (TwoPhaseFP8(scale=fp8.ScaleRule(scale_format=fp8.E8M0)), 0.25 * (1 + 1 / 128)),
        (AutoScaledFP8(), 0.25),
        (AutoScaledFP8(reduction="all_reduce"), None),
    ],
    ids=["bfloat16", "two phases", "two phases, E8M0", "auto", "auto, all_reduce"],
)
def test_bytes(devices, method, bytes_share):
    found = share(devices, method)
    if bytes_share is not None:
        assert found == pytest.approx(bytes_share, rel=0.02)
    if not isinstance(method, BFloat16Sum):
        assert found <= 0.40 or bytes_share is None
    print(devices, method, found)
    print(wire_report(compiled(devices, method)))


@pytest.mark.parametrize("devices", TOPOLOGIES)
def test_xla_keeps_an_all_reduce_of_fp8(devices):
    """It is neither widened nor split. The exchange in the other branch runs on overflow only."""
    program = compiled(devices, AutoScaledFP8(reduction="all_reduce"))
    reduces = [
        t for t in wire_report(program).transfers if t.kind == "all-reduce" and t.bytes > 100_000
    ]
    print(reduces)
    assert [(t.dtype, t.bytes) for t in reduces] == [("float8_e4m3fn", VALUES)]


@pytest.mark.parametrize("devices", TOPOLOGIES)
def test_a_reduce_scatter_sends_half(devices):
    for method, bytes_share in ((BFloat16Sum(), 0.25), (TwoPhaseFP8(), 0.125 * (1 + 4 / 128))):
        found = share(devices, method, scatter=True)
        print(devices, method, found); print(wire_report(compiled(devices, method, scatter=True)))
        assert found == pytest.approx(bytes_share, rel=0.02)
