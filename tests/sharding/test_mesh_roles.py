"""MeshRoles: a model written in roles, on meshes that have some of them."""

import re

import jax
import pytest

from jaxfp8.sharding import MeshRoles, Shard

P = jax.P


@pytest.mark.parametrize(
    ("roles", "activations", "weight"),
    [
        (MeshRoles(), P(None, None, None), P(None, None)),
        (MeshRoles(data="d"), P("d", None, None), P(None, None)),
        (MeshRoles(fsdp="f", tensor="t"), P("f", None, None), P("f", "t")),
        (
            MeshRoles(data="d", fsdp="f", tensor="t", sequence="t"),
            P(("d", "f"), "t", None),
            P("f", "t"),
        ),
        # weights over all that the batch is over
        (MeshRoles(data="x", fsdp="x"), P("x", None, None), P("x", None)),
    ],
)
def test_roles_without_an_axis_drop_out(roles, activations, weight):
    assert roles.spec(("data", "fsdp"), "sequence", None) == activations
    assert roles.spec("fsdp", "tensor") == weight
    assert roles.shard(0, "fsdp") == (Shard(0, roles.fsdp) if roles.fsdp else None)


def test_every_axis_but_pipeline_is_reduced():
    roles = MeshRoles(data="d", tensor="t", sequence="t", expert="e", pipeline="p")
    assert roles.reduce_axes == ("d", "t", "e")


@pytest.mark.parametrize(
    ("wrong", "error", "mentions"),
    [
        (lambda: MeshRoles(data=0), TypeError, ["data=0", "name of a mesh axis"]),
        (lambda: MeshRoles(fsdp="x", pipeline="x"), ValueError, ["'x'", "fsdp", "pipeline"]),
        (lambda: MeshRoles(data="d").spec("model"), ValueError, ["'model'", "tensor"]),
        (
            lambda: MeshRoles(tensor="t", sequence="t").spec("sequence", "tensor"),
            ValueError,
            ["two array axes", "['t']"],
        ),
        (
            lambda: MeshRoles(data="a", fsdp="b").check(mesh(data=2)),
            ValueError,
            ["['data']", "'data': 'a'", "'b'"],
        ),
        (
            lambda: MeshRoles(data="data").check(mesh(data=2, spare=2)),
            ValueError,
            ["['spare']", "no role"],
        ),
    ],
)
def test_wrong(wrong, error, mentions):
    with pytest.raises(error, match=".*".join(map(re.escape, mentions))):
        wrong()


def test_check_gives_the_roles_back():
    roles = MeshRoles(data="data")
    assert roles.check(mesh(data=2, one=1)) is roles


def mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes))
