"""Matmuls that do not fit a mesh are refused with the name, the value and the cure.

Of specs and roles see tests/sharding, of collectives tests/comms.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from hard_inputs import mentions
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.linen import FP8Dense
from jaxfp8.sharding import Shard

CURRENT, DELAYED, MXFP8 = fp8.recipes.current(), fp8.recipes.delayed(), fp8.recipes.mxfp8()
X, W, STATE = jnp.ones((32, 32)), jnp.ones((32, 32)), fp8.init_state(DELAYED)
PARAMS = {"params": {"kernel": W}}
DENSE = FP8Dense(32, recipe=CURRENT, use_bias=False, w_shard=Shard(0, "fspd"))
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
FSDP = Shard(0, "fsdp")


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(kind,) * 2)


def dot(x, w, **arguments):
    return fp8.dot(x, w, **{"recipe": CURRENT, **arguments})


def under(kind, function, *args):
    """Whole arrays, given with their specs."""
    with jax.set_mesh(mesh(KINDS[kind])):
        args = [
            jax.device_put(value, NamedSharding(mesh(KINDS[kind]), spec)) for value, spec in args
        ]
        return jax.eval_shape(function, *args)


def inside(function, specs, *args, types, out):
    return jax.eval_shape(
        jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=types), *args
    )


def sum_of_tokens(kind, w, x):
    out = P("fsdp") if kind == "explicit" else None
    return dot(x, w, recipe=MXFP8, y_shard=FSDP, out_sharding=out).sum()


WHOLE = {
    "uneven shards": (
        lambda kind: under(
            kind,
            functools.partial(dot, w_shard=FSDP),
            (jnp.ones((32, 31)), P()),
            (jnp.ones((31, 32)), P()),
        ),
        (
            "w_shard=Shard(axis=0, axis_name='fsdp')",
            "[31, 32]",
            "2 equal parts",
            "pad it to a multiple of 2",
        ),
    ),
    "a shard that cuts a tile": (
        lambda kind: under(
            kind, functools.partial(dot, recipe=MXFP8, w_shard=FSDP), (X, P()), (W, P("fsdp"))
        ),
        ("shards of 16 along axis 0", "PerBlock(tile=(32, 1))", "at multiples of 32"),
    ),
    "an axis that the mesh does not have": (
        lambda kind: under(
            kind, functools.partial(dot, x_shard=Shard(0, "tensor")), (X, P()), (W, P())
        ),
        (
            "x_shard=Shard(axis=0, axis_name='tensor')",
            "no axis of the mesh here",
            "['data', 'fsdp']",
        ),
    ),
    "a layer, an axis that the mesh does not have": (
        lambda kind: under(kind, functools.partial(DENSE.apply, PARAMS), (X, P())),
        ("w_shard=Shard(axis=0, axis_name='fspd')", "no axis of the mesh here", "['data', 'fsdp']"),
    ),
    "an axis that the array does not have": (
        lambda kind: under(
            kind, functools.partial(dot, w_shard=Shard(2, "fsdp")), (X, P()), (W, P())
        ),
        ("w_shard=Shard(axis=2, axis_name='fsdp')", "out of range", "[32, 32]"),
    ),
    "uneven shards of the result": (
        lambda kind: under(
            kind, functools.partial(dot, y_shard=FSDP), (jnp.ones((31, 32)), P()), (W, P())
        ),
        ("y_shard=Shard(axis=0, axis_name='fsdp')", "y [31, 32]", "a multiple of 2"),
    ),
    "an axis that the result does not have": (
        lambda kind: under(
            kind, functools.partial(dot, y_shard=Shard(2, "fsdp")), (X, P()), (W, P())
        ),
        ("y_shard=Shard(axis=2, axis_name='fsdp')", "out of range", "[32, 32]"),
    ),
    "a result that is stored": (
        lambda kind: under(
            kind,
            functools.partial(dot, y_shard=Shard(0, "fsdp", reshard_after_forward=False)),
            (X, P()),
            (W, P()),
        ),
        ("y_shard=Shard(axis=0", "reshard_after_forward=False", "a result is not stored"),
    ),
    "an axis that the output of an einsum does not have": (
        lambda kind: under(
            kind,
            functools.partial(fp8.einsum, "ab,bc->ca", recipe=CURRENT, y_shard=Shard(2, "fsdp")),
            (X, P()),
            (W, P()),
        ),
        ("y_shard=Shard(axis=2, axis_name='fsdp')", "out of range", "[32, 32]"),
    ),
    "shards of the gradient that cut a tile": (
        lambda kind: under(
            kind,
            jax.grad(functools.partial(sum_of_tokens, kind)),
            (W, P()),
            (X, P()),
        ),
        ("shards of 16 along axis 0", "PerBlock(tile=(32, 1))", "at multiples of 32"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", WHOLE)
def test_whole_arrays(case, kind):
    call, parts = WHOLE[case]
    with pytest.raises(ValueError, match=mentions(*parts)):
        call(kind)


EXPLICIT = {
    "not split, by its type": (
        lambda: under("explicit", functools.partial(dot, w_shard=FSDP), (X, P()), (W, P("data"))),
        (
            "w_shard=Shard(axis=0, axis_name='fsdp')",
            "not split over ['fsdp']",
            "P('data', None)",
            "reshard the operand",
        ),
    ),
    "a result that is not split, by its type": (
        lambda: under("explicit", functools.partial(dot, y_shard=FSDP), (X, P()), (W, P())),
        ("y_shard= splits the result over ['fsdp']", "P(None, None)", "Pass out_sharding="),
    ),
    "tokens cut a tile of wgrad": (
        lambda: under(
            "explicit",
            jax.grad(lambda w, x: dot(x, w, recipe=MXFP8).sum()),
            (W, P()),
            (X, P("data")),
        ),
        (
            "an axis of 32",
            "split over 'data', 4 devices",
            "tiles of 32",
            "cut shards on the borders",
        ),
    ),
}


@pytest.mark.parametrize("case", EXPLICIT)
def test_what_types_of_an_explicit_mesh_tell(case):
    call, parts = EXPLICIT[case]
    with pytest.raises(ValueError, match=mentions(*parts)):
        call()


# Arguments of `dot`, specs of x and w, the error.
INSIDE = {
    "a shard that cuts a tile": (
        {"recipe": MXFP8, "w_shard": FSDP},
        (P("data"), P("fsdp")),
        ("shards of 16 along axis 0", "at multiples of 32"),
    ),
    "an axis that the mesh does not have": (
        {"w_shard": Shard(0, "tensor")},
        (P("data"), P("fsdp")),
        ("axis_name='tensor'", "['data', 'fsdp']"),
    ),
    "amaxes over an axis that the mesh does not have": (
        {"reduce_axes": ("batch",)},
        (P("data"), P()),
        ("reduce_axes=('batch',)", "no axes of the mesh", "'data', 'fsdp'"),
    ),
    # Types say so; without them what is gathered is twice as large as it should be, and the shapes
    # do not fit.
    "not split over that axis": (
        {"w_shard": FSDP},
        (P("data"), P()),
        ("w_shard=Shard(axis=0, axis_name='fsdp')",),
    ),
    "split along another axis": (
        {"w_shard": Shard(1, "fsdp")},
        (P("data"), P("fsdp")),
        ("contracted axes", "[8, 32]", "[16, 64]"),
    ),
}


@pytest.mark.parametrize("types", [True, False], ids=["types", "no types"])
@pytest.mark.parametrize("case", INSIDE)
def test_inside_shard_map(case, types):
    arguments, specs, parts = INSIDE[case]
    named = {} if types else {"reduce_axes": ("data", "fsdp")}
    with pytest.raises(ValueError, match=mentions(*parts)):
        inside(
            functools.partial(dot, **{**named, **arguments}),
            specs,
            X,
            W,
            types=types,
            out=P("data"),
        )


def test_a_result_that_is_no_sum():
    """Types say so: every device along the axis has the same x and w."""
    with pytest.raises(ValueError, match=mentions("y_shard=Shard(", "no sum", "leave the shard")):
        inside(
            functools.partial(dot, y_shard=FSDP), (P("data"), P()), X, W, types=True, out=P("data")
        )


def step(w, state, x, **named):
    loss = lambda w, state, x: jnp.sum(dot(x, w, recipe=DELAYED, state=state))
    return fp8.value_and_grad(loss, **named)(w, state, x)[2]


# Whether types tell, what is named, the error.
REDUCED = {
    "named where types tell": (
        True,
        {"reduce_axes": ("data",)},
        ("reduce_axes=('data',)", "types say", "Drop it"),
    ),
    "no axis of the mesh": (
        False,
        {"reduce_axes": ("batch",)},
        ("reduce_axes=('batch',)", "['batch'] are no axes", "fsdp"),
    ),
    "nobody tells": (
        False,
        {},
        ("check_vma=False", "('data', 'fsdp')", "reduce_axes=(...)", "all but those of pipeline"),
    ),
}


@pytest.mark.parametrize("case", REDUCED)
def test_amaxes_of_a_state(case):
    types, named, parts = REDUCED[case]
    with pytest.raises(ValueError, match=mentions(*parts)) as raised:
        inside(
            functools.partial(step, **named),
            (P(), P(), P("data")),
            W,
            STATE,
            X,
            types=types,
            out=P(),
        )
    assert types or raised.type is fp8.FP8StateError
