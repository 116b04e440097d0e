"""Amaxes of rows and columns of a tensor on eight H200 that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import program_for, topology

import jaxfp8 as fp8
from jaxfp8.numerics._amax import amaxes
from jaxfp8.programs import wire_report

pytestmark = pytest.mark.deviceless

SHAPES = [(8192, 13824), (5120, 13824), (2, 4096, 5120)]


def of_rows_and_columns(x):
    last = x.ndim - 1
    return [*amaxes(x, [fp8.PerAxis(*range(last)), fp8.PerAxis(last)]).values()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_read(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    program = program_for("h200", of_rows_and_columns, x)
    assert program.traffic(program.entry) < 1.3 * 2 * np.prod(shape)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a")], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_only_amaxes_go_over_the_wire(shape, spec):
    devices = np.array(topology("h200", "1x1x8").devices)
    mesh = Mesh(devices, ("a",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    transfers = wire_report(jax.jit(of_rows_and_columns).lower(x).compile()).transfers
    assert [each.kind for each in transfers] == ["all-reduce"]
    assert sum(each.bytes for each in transfers) <= 2 * max(shape)
