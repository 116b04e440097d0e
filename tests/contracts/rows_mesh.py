"""Rows of the transform matrix on a mesh of 4 ('data') x 2 ('tp', or 'pipe') devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from contracts.rows_local import (
    E,
    K,
    L,
    Row,
    at,
    chain,
    data,
    examples_reference,
    in_turn,
    scanned,
    single,
    unwatched,
    weights,
)
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def mesh(kind, second="tp"):
    return jax.make_mesh((4, 2), ("data", second), axis_types=(kind, kind))


def whole(kind, w_spec, x_spec, c_spec):
    """Global arrays, the compiler (Auto) or their types (Explicit) say where."""

    def row(face, layer, plain):
        loss, reference = single(layer, plain)
        return Row(
            face.value_and_grad(loss), reference, weights(), data(),
            mesh=mesh(kind), specs=(w_spec, x_spec, c_spec),
        )  # fmt: skip

    return row


def named(name, row):
    row.__name__ = name
    return row


AUTO_OR_EXPLICIT = [
    named(f"{kind.name.lower()}_{name}", whole(kind, *specs))
    for kind in (AxisType.Auto, AxisType.Explicit)
    for name, specs in {
        "data": (P(), P("data"), P("data")),
        "data_tensor": (P(None, "tp"), P("data"), P("data", "tp")),
    }.items()
]


def explicit_scan(face, layer, plain):
    return Row(
        face.value_and_grad(scanned(layer)), chain(unwatched(plain)), weights(L), data(), (L,),
        mesh=mesh(AxisType.Explicit), specs=(P(), P("data"), P("data")),
    )  # fmt: skip


def inputs_amax(w, x, c):
    """[*lead, 3]: of a single matmul, whose output gradient is c.

    JAX's callbacks cannot run under a sharded vmap.
    """
    largest = [np.max(np.abs(t), axis=(-2, -1)) for t in (x, w, c)]
    return np.stack(np.broadcast_arrays(*largest), -1)


def explicit_examples(face, layer, plain):
    """vmap over an axis that is sharded."""
    loss, _ = single(face.apply, plain)
    over = lambda w, s, x, c: jnp.sum(
        jax.vmap(loss, in_axes=(None, None, 0, 0))(w, s, x[:, None], c[:, None])
    )
    w, batch = weights(), data()
    return Row(
        face.value_and_grad(over),
        examples_reference(plain, bool(jax.tree.leaves(face.init()))),
        w,
        batch,
        mesh=mesh(AxisType.Explicit),
        specs=(P(), P("data"), P("data")),
        truth=inputs_amax(w, *batch),
    )


def explicit_experts(face, layer, plain):
    """Experts, and their states, along a mesh axis."""

    def loss(w, s, x, c):
        return jnp.sum(jax.vmap(face.apply)(w, s, x) * c)

    w, batch = weights(E), data(E)
    return Row(
        face.value_and_grad(loss),
        in_turn(plain, lead=E),
        w,
        batch,
        (E,),
        mesh=mesh(AxisType.Explicit),
        specs=(P("tp"), P("tp", "data"), P("tp", "data")),
        state_spec=P("tp"),
        truth=inputs_amax(w, *batch),
    )


def inside(
    face, loss, specs, out_specs, *, vma, axes, summed, second="tp", kind=AxisType.Auto, manual=None
):
    """The gradient taken inside shard_map.

    Without types the user names `axes` and sums the gradient over `summed`.
    """

    def local(w, s, *batch):
        run = face.value_and_grad(loss) if vma else face.value_and_grad(loss, reduce_axes=axes)
        value, grads, new = run(w, s, *batch)
        if not vma:
            grads = lax.psum(grads, summed)
        return lax.psum(value, out_specs[0]), grads, new

    return jax.shard_map(
        local,
        mesh=mesh(kind, second),
        in_specs=specs,
        out_specs=(P(), *out_specs[1:]),
        check_vma=vma,
        **({} if manual is None else {"axis_names": manual}),
    )


def outside(face, loss, specs, *, vma, axes, summed, second="tp"):
    """The gradient of a shard_map."""

    def whole(w, s, *batch):
        local = lambda *a: lax.psum(loss(*a), summed)
        return jax.shard_map(
            local, mesh=mesh(AxisType.Auto, second), in_specs=specs, out_specs=P(), check_vma=vma
        )(w, s, *batch)

    return face.value_and_grad(whole) if vma else face.value_and_grad(whole, reduce_axes=axes)


DATA = P(), P(), P("data"), P("data")


def shard_map_inside(face, layer, plain, *, vma):
    loss, reference = single(layer, plain)
    step = inside(
        face, loss, DATA, (("data",), P(), P()), vma=vma, axes=("data",), summed=("data",)
    )
    return Row(step, reference, weights(), data())


def shard_map_outside(face, layer, plain, *, vma):
    """Over both axes.

    Without types JAX divides g by the size of an axis over which nothing is split.
    """
    loss, reference = single(layer, plain)
    axes = ("data", "tp")
    step = outside(face, loss, (P(), P(), P(axes), P(axes)), vma=vma, axes=axes, summed=axes)
    return Row(step, reference, weights(), data())


def shard_map_partly_manual(face, layer, plain, *, vma):
    """Manual over 'data' only; the rest is the compiler's."""
    loss, reference = single(layer, plain)
    step = inside(
        face,
        loss,
        DATA,
        (("data",), P(), P()),
        vma=vma,
        axes=("data",),
        summed=("data",),
        manual={"data"},
    )
    return Row(step, reference, weights(), data())


def shard_map_tensor(face, layer, plain, *, vma):
    """Columns of w over 'tp': amaxes of w and g span both axes, and dx is a sum over 'tp'."""
    loss, reference = single(layer, plain)
    specs = P(None, "tp"), P(), P("data"), P("data", "tp")
    step = inside(
        face,
        loss,
        specs,
        (("data", "tp"), P(None, "tp"), P()),
        vma=vma,
        axes=("data", "tp"),
        summed=("data",),
    )
    return Row(step, reference, weights(), data())


def shard_map_contracted(face, layer, plain, *, vma):
    """Rows of w over 'tp': y is a sum over devices, made by the user."""
    _, reference = single(layer, plain)
    return contracted(face, layer, reference, vma=vma)


def shard_map_contracted_by_row(face, layer, plain, *, vma):
    """A device sees half of each row that fprop contracts.

    That half has a scale of its own (docs/limits.md).
    """

    def halves(w, s, x):
        return sum(plain(w[half], s, x[:, half]) for half in (slice(K // 2), slice(K // 2, K)))

    _, reference = single(layer, halves)
    return contracted(face, layer, reference, vma=vma)


def contracted(face, layer, reference, *, vma):

    def loss(w, s, x, c):
        y = layer(w, s, x)
        # Without types the transpose of psum is a psum: give its cotangent to one device only.
        return jnp.sum(lax.psum(y, "tp") * c)

    specs = P("tp"), P(), P("data", "tp"), P("data")
    step = inside(
        face, loss, specs, (("data",), P("tp"), P()), vma=vma, axes=("data", "tp"), summed=("data",)
    )
    return Row(step, reference, weights(), data())


def shard_map_scan(face, layer, plain, *, vma):
    step = inside(
        face, scanned(layer), DATA, (("data",), P(), P()), vma=vma, axes=("data",), summed=("data",)
    )
    return Row(step, chain(unwatched(plain)), weights(L), data(), (L,))


STAGES = P("pipe"), P("pipe"), P("pipe", "data"), P("pipe", "data")


def stage(layer):
    def loss(w, s, x, c):
        return jnp.sum(layer(w[0], at(s, 0), x[0], lax.axis_index("pipe")) * c[0])

    return loss


def stages_inside(face, layer, plain, *, vma):
    """A state for each pipeline stage: combined over 'data', never over 'pipe'."""
    step = inside(
        face,
        stage(layer),
        STAGES,
        (("data", "pipe"), P("pipe"), P("pipe")),
        vma=vma,
        axes=("data",),
        summed=("data",),
        second="pipe",
    )
    return Row(step, in_turn(plain, lead=2), weights(2), data(2), (2,))


def stages_outside(face, layer, plain, *, vma):
    step = outside(
        face, stage(layer), STAGES, vma=vma, axes=("data",), summed=("data", "pipe"), second="pipe"
    )
    return Row(step, in_turn(plain, lead=2), weights(2), data(2), (2,))


def with_types(row, vma):
    return named(f"{row.__name__}_{'vma' if vma else 'no_vma'}", functools.partial(row, vma=vma))


EXPLICIT = [explicit_scan, explicit_examples, explicit_experts]
MANUAL = [
    *(
        with_types(row, vma)
        for row in (shard_map_inside, shard_map_tensor, shard_map_scan, stages_inside)
        for vma in (True, False)
    ),
    with_types(shard_map_outside, True),
    with_types(stages_outside, True),
    with_types(shard_map_partly_manual, True),
    with_types(shard_map_contracted, True),
    with_types(shard_map_contracted_by_row, True),
]
EXACT = [*AUTO_OR_EXPLICIT, *EXPLICIT, *MANUAL]
# transposes sum over devices
BOUNDED = [with_types(shard_map_outside, False), with_types(stages_outside, False)]
