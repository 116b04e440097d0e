"""A model of two layers, y = relu(x @ w1) @ w2, on every mesh.

Where its tensors lie, and who moves them.

x, w1, w2 and c, the gradient of y, are [N, N]; the loss is sum(y * c). A step takes `((x, w1, w2),
states, c)` and gives the loss, the gradients of x, w1 and w2, and the new states of the two layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

N = 16
# Whole arrays in Auto and Explicit meshes, without and with `x_shard=`, `w_shard=` and `y_shard=`.
# shard_map with check_vma=True ("types") and False, and with types and named axes of amaxes. In the
# modes of shard_map the user scatters y. In "result" the matmul does, by `y_shard=`.
MODES = (
    *("auto", "explicit", "auto, shards", "explicit, shards"),
    *("types", "no types", "types, axes", "types, result", "no types, result"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where x (c and y, too), w1 and w2 lie.

    `read_*`: where an Explicit mesh has to have what its matmuls read.
    """

    mesh: dict[str, int]
    x: P
    w: tuple[P, P] = (P(), P())
    read_x: P
    read_w: tuple[P, P] = (P(), P())
    shards: tuple[dict, dict] = ({}, {})  # what the two matmuls gather
    partial: str | None = None  # the axis over which y is a sum,
    summed: tuple[str, ...] = ()  # and the axes over which the gradients of w are

    @property
    def stages(self) -> bool:
        return "pipe" in self.mesh

    @property
    def result(self) -> dict:
        """What scatters y in the second matmul."""
        return RESULT if self.partial else {}


FSDP, TOKENS = {"w_shard": Shard(0, "fsdp")}, {"x_shard": Shard(0, "tensor")}
RESULT = {"y_shard": Shard(0, "tensor")}
LAYOUTS = {
    "data": Layout(mesh={"data": 8}, x=P("data"), read_x=P("data"), summed=("data",)),
    "fsdp": Layout(
        mesh={"fsdp": 8},
        x=P("fsdp"),
        read_x=P("fsdp"),
        w=(P("fsdp"), P("fsdp")),
        shards=(FSDP, FSDP),
    ),
    "tensor and sequence": Layout(
        mesh={"data": 4, "tensor": 2},
        x=P(("data", "tensor")),
        w=(P(None, "tensor"), P("tensor")),
        read_x=P("data"),
        read_w=(P(None, "tensor"), P("tensor")),
        shards=(TOKENS, {}),
        partial="tensor",
        summed=("data",),
    ),
    "data, fsdp and tensor": Layout(
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        x=P(("data", "fsdp", "tensor")),
        w=(P("fsdp", "tensor"), P("tensor", "fsdp")),
        read_x=P(("data", "fsdp")),
        read_w=(P(None, "tensor"), P("tensor")),
        shards=(TOKENS | FSDP, {"w_shard": Shard(1, "fsdp")}),
        partial="tensor",
        summed=("data",),
    ),
    "pipeline": Layout(mesh={"pipe": 2}, x=P(), read_x=P()),
    "data and pipeline": Layout(
        mesh={"data": 4, "pipe": 2}, x=P("data"), read_x=P("data"), summed=("data",)
    ),
}


@functools.cache
def on_one_device(recipe: fp8.Recipe) -> Callable:
    def loss(params, states, c):
        x, *ws = params
        h = jax.nn.relu(fp8.dot(x, ws[0], recipe=recipe, state=states[0]))
        return jnp.sum(fp8.dot(h, ws[1], recipe=recipe, state=states[1]) * c)

    step = jax.jit(fp8.value_and_grad(loss))
    return lambda *args: jax.device_get(step(*args))


def on_mesh(layout: Layout, mode: str, recipe: fp8.Recipe) -> Callable:
    """The same step; the weights and states of pipeline stages are stacked on the way in."""
    mesh, specs = make_mesh(layout, mode), specs_of(layout)
    types = mode.startswith("types")
    if "types" not in mode:
        loss = pipeline(layout, recipe, mode) if layout.stages else layers(layout, recipe, mode)
        step = fp8.value_and_grad(loss)
    else:
        step = jax.shard_map(
            inside(layout, recipe, mode),
            mesh=mesh, in_specs=specs, out_specs=(P(), *specs[:2]), check_vma=types,
        )  # fmt: skip
    step = jax.jit(step)

    def call(params, states, c):
        x, ws = params[0], params[1:]
        if layout.stages:
            ws, states = stack(ws), stack(states)
        shardings = jax.tree.map(functools.partial(jax.NamedSharding, mesh), specs)
        with jax.set_mesh(mesh):
            loss, (dx, dws), new = jax.device_get(
                step(*jax.device_put(((x, ws), states, c), shardings))
            )
        return loss, (dx, *dws), unstack(new) if layout.stages else new

    return call


def specs_of(layout: Layout):
    """Of ((x, weights), states, c)."""
    states = P("pipe") if layout.stages else P()
    return (layout.x, states if layout.stages else layout.w), states, layout.x


def make_mesh(layout: Layout, mode: str) -> jax.sharding.Mesh:
    kind = AxisType.Explicit if mode.startswith("explicit") else AxisType.Auto
    sizes = tuple(layout.mesh.values())
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(
        sizes, tuple(layout.mesh), axis_types=(kind,) * len(sizes), devices=devices
    )


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def unstack(tree):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(2)]


def layers(layout: Layout, recipe: fp8.Recipe, mode: str) -> Callable:
    """Whole arrays.

    In an Explicit mesh the user moves what types refuse, unless the matmul gathers it.
    """
    explicit, (of_first, of_second) = mode.startswith("explicit"), ({}, {})
    of_y = layout.read_x
    if mode.endswith("shards"):
        (of_first, of_second), of_y = layout.shards, layout.x if layout.partial else of_y
        of_second = of_second | layout.result
    move = jax.sharding.reshard if explicit else lambda value, spec: value
    ready = move if mode == "explicit" else lambda value, spec: value
    dot = functools.partial(fp8.dot, recipe=recipe)

    def loss(params, states, c):
        x, ws = params
        first, second = map(ready, ws, layout.read_w)
        x = ready(x, layout.read_x)
        h = jax.nn.relu(dot(x, first, state=states[0], **of_first))
        y = dot(
            h,
            second,
            state=states[1],
            out_sharding=of_y if explicit else None,
            **of_second,
        )
        return jnp.sum(y * move(c, of_y))

    return loss


def pipeline(layout: Layout, recipe: fp8.Recipe, mode: str) -> Callable:
    """Two ticks of all stages at once, a shift between them; a stage without work gets zeros."""
    move = jax.sharding.reshard if mode == "explicit" else lambda value, spec: value
    dots = jax.vmap(lambda x, w, state: fp8.dot(x, w, recipe=recipe, state=state))

    def at(stage, value):
        both = [value, jnp.zeros_like(value)]
        return move(jnp.stack(both if stage == 0 else both[::-1]), P("pipe", *layout.x))

    def shift(value):
        return move(jnp.roll(move(value, P(None, *layout.x)), 1, axis=0), P("pipe", *layout.x))

    def loss(params, states, c):
        x, w = params
        now, later = fp8.fork(states)
        h = jax.nn.relu(dots(at(0, x), w, now))
        return jnp.sum(dots(shift(h), w, later) * at(1, c))

    return loss


def by_row(recipe: fp8.Recipe) -> bool:
    quantizers = (q for tensor in ("x", "w", "g") for _, q in recipe.uses(tensor))
    return any(q.granularity == fp8.quantizers.PerRow() for q in quantizers)


def inside(layout: Layout, recipe: fp8.Recipe, mode: str) -> Callable:
    """Of one device.

    The axes of amaxes may be named; without types they are, and the user sums the gradients.
    """
    types, named = mode.startswith("types"), mode not in ("types", "types, result")
    result = layout.result if mode.endswith("result") else {}
    axes = tuple(axis for axis in layout.mesh if axis != "pipe")
    # Without types recipes with amaxes of rows refuse the axes, and keep each amax on its device.
    stateless = (
        {"reduce_axes": axes} if named and not recipe.rows and (types or not by_row(recipe)) else {}
    )
    dot = functools.partial(fp8.dot, recipe=recipe, **stateless)

    def layers(params, states, c):
        x, (first, second) = params
        h = jax.nn.relu(dot(x, first, state=states[0], **layout.shards[0]))
        y = dot(h, second, state=states[1], **layout.shards[1], **result)
        if layout.partial and not result:
            y = lax.psum_scatter(y, layout.partial, scatter_dimension=0, tiled=True)
        return jnp.sum(y * c)

    def stage(params, states, c):
        """Two ticks; a stage without work gets zeros."""
        (x, w), at = params, lax.axis_index("pipe")
        now, later = fp8.fork(jax.tree.map(lambda leaf: leaf[0], states))
        h = jax.nn.relu(dot(jnp.where(at == 0, x, 0), w[0], state=now))
        y = dot(lax.ppermute(h, "pipe", [(0, 1)]), w[0], state=later)
        return jnp.sum(jnp.where(at == 1, y, 0) * c)

    def step(params, states, c):
        loss = stage if layout.stages else layers
        stateful = {} if types else {"reduce_axes": axes}
        value, (dx, dws), new = fp8.value_and_grad(loss, **stateful)(params, states, c)
        if not types and layout.summed:
            dws = lax.psum(dws, layout.summed)
        if not types and layout.stages:
            dx = lax.psum(dx, "pipe")
        return lax.psum(value, tuple(layout.mesh)), (dx, dws), new

    return step
