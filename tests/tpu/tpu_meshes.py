"""Features for `tpu_program.py`: meshes of one host, with all of its devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_matmuls import Feature, Rows, array, preset, size_of, state_of

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

# Each of 8 devices has whole tiles of 128.
B, D, F = 1024, 1024, 2048


def mesh_of(devices: list[Any], *names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """One axis with all devices, or two of which the last has two."""
    shape = (len(devices),) if len(names) == 1 else (len(devices) // 2, 2)
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(kind,) * len(names))


def on(mesh: Mesh, spec: P, tree: Any) -> Any:
    """The types of a tree, with this sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
    )


def fsdp(name: str, kind: AxisType, devices: list[Any]) -> Feature:
    """Two layers whose weights are split, and gathered in FP8."""
    recipe, mesh, axis = preset(name), mesh_of(devices, "fsdp", kind=kind), "fsdp"
    split = P("fsdp")
    dot = functools.partial(fp8.dot, recipe=recipe, w_shard=Shard(0, axis))

    def step(params: Any, states: Any, x: Any) -> Any:
        def loss(params: Any, states: Any) -> Any:
            h = jax.nn.relu(dot(x, params[0], state=states[0]))
            value = size_of(dot(h, params[1], state=states[1]))
            return lax.pmean(value, axis) if kind == AxisType.Manual else value

        return fp8.value_and_grad(loss)(params, states)

    if kind == AxisType.Manual:
        mesh = mesh_of(devices, "fsdp")
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(split, P(), split), out_specs=(P(), split, P())
        )
    params = on(mesh, split, (array(D, F), array(F, D)))
    states = on(mesh, P(), (state_of(recipe),) * 2)
    return Feature(step, (params, states, on(mesh, split, array(B, D))), mesh)


def tensor_parallel(name: str, devices: list[Any], *, marked: bool) -> Feature:
    """A pair of matmuls that "tensor" splits. `marked`: tokens are gathered in FP8."""
    recipe, mesh = preset(name), mesh_of(devices, "data", "tensor")
    x_shard, y_shard = (Shard(1, "tensor"),) * 2 if marked else (None, None)

    def step(params: Any, states: Any, x: Any) -> Any:
        def loss(params: Any, states: Any) -> Any:
            h = fp8.dot(x, params[0], recipe=recipe, state=states[0], x_shard=x_shard)
            y = fp8.dot(jax.nn.gelu(h), params[1], recipe=recipe, state=states[1], y_shard=y_shard)
            return size_of(y)

        return fp8.value_and_grad(loss)(params, states)

    params = on(mesh, P(None, "tensor"), array(D, F)), on(mesh, P("tensor"), array(F, D))
    states = on(mesh, P(), (state_of(recipe),) * 2)
    x = on(mesh, P("data", "tensor" if marked else None), array(4, B, D))
    return Feature(step, (params, states, x), mesh)


def summed(method: Any, devices: list[Any]) -> Feature:
    """The mean of gradients over all devices."""
    mesh = mesh_of(devices, "data")
    grads = array(len(devices), D, D, dtype=jnp.float32)
    state = jax.eval_shape(lambda: fp8.comms.init_gradient_sums(jnp.zeros((D, D)), method))

    def local(grads: Any, state: Any) -> Any:
        return fp8.comms.all_reduce_gradients(grads[0], "data", method=method, state=state)

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    return Feature(step, (on(mesh, P("data"), grads), on(mesh, P(), state)), mesh)


def scattered(method: Any, devices: list[Any]) -> Feature:
    mesh = mesh_of(devices, "data")
    grads = array(len(devices), D, D, dtype=jnp.float32)
    local = lambda grads: fp8.comms.reduce_scatter_gradients(grads[0], "data", method=method)
    step = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return Feature(step, (on(mesh, P("data"), grads),), mesh)


def collective(kind: str, devices: list[Any]) -> Feature:
    """A collective of a quantized tensor."""
    mesh, n = mesh_of(devices, "data"), len(devices)

    def local(x: Any) -> Any:
        q = fp8.quantize(x, fp8.E4M3, fp8.PerBlock((1, 128)))
        if kind == "all_gather":
            q = fp8.comms.all_gather(q, "data")
        elif kind == "all_to_all":
            q = fp8.comms.all_to_all(q, "data", split_axis=0, concat_axis=0)
        else:
            q = fp8.comms.ppermute(q, "data", [(i, (i + 1) % n) for i in range(n)])
        return q.dequantize(jnp.float32)

    step = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return Feature(step, (on(mesh, P("data"), array(B, D)),), mesh)


def experts(name: str, devices: list[Any], **options: Any) -> Feature:
    """Experts that devices share. Tokens are sent to them in FP8."""
    recipe, mesh = preset(name), mesh_of(devices, "expert")
    count, hidden, choices, split = 2 * len(devices), 256, 2, P("expert")
    parallel = fp8.moe.ExpertParallel(axis="expert", capacity_factor=2.0, **options)

    def step(params: Any, states: Any, chosen: Any) -> Any:
        def loss(params: Any, states: Any) -> Any:
            x, gates, w_in, w_out = params
            made = fp8.moe.swiglu_experts(
                x, gates, chosen, w_in, w_out, recipe=recipe, states=states, parallel=parallel
            )
            return size_of(made.y)

        return fp8.value_and_grad(loss)(params, states)

    params = (
        array(B, D), array(B, choices, dtype=jnp.float32),
        array(count, D, 2 * hidden), array(count, hidden, D),
    )  # fmt: skip
    states = on(mesh, P(), (state_of(recipe),) * 2)
    chosen = on(mesh, split, array(B, choices, dtype=jnp.int32))
    return Feature(step, (on(mesh, split, params), states, chosen), mesh)


METHODS = {
    "BFloat16Sum()": fp8.comms.BFloat16Sum(),
    "TwoPhaseFP8()": fp8.comms.TwoPhaseFP8(),
    "TwoPhaseFP8(E8M0)": fp8.comms.TwoPhaseFP8(scale=fp8.ScaleRule(scale_format=fp8.E8M0)),
    "AutoScaledFP8()": fp8.comms.AutoScaledFP8(),
    "AutoScaledFP8(reduction='all_reduce')": fp8.comms.AutoScaledFP8(reduction="all_reduce"),
    "AutoScaledFP8(scaling='pre')": fp8.comms.AutoScaledFP8(scaling="pre"),
}


def meshes() -> Rows:
    rows: Rows = {}
    for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8"):
        rows[f"mesh: FSDP, Auto, {name}"] = functools.partial(fsdp, name, AxisType.Auto)
    for name in ("delayed", "mxfp8"):
        for kind, words in ((AxisType.Explicit, "Explicit"), (AxisType.Manual, "shard_map")):
            rows[f"mesh: FSDP, {words}, {name}"] = functools.partial(fsdp, name, kind)
        for marked in (False, True):
            words = ", x_shard, y_shard" if marked else ""
            rows[f"mesh: tensor parallel{words}, {name}"] = functools.partial(
                tensor_parallel, name, marked=marked
            )
    for words, method in METHODS.items():
        rows[f"comms: all_reduce_gradients, {words}"] = functools.partial(summed, method)
        if not words.startswith("Auto"):
            rows[f"comms: reduce_scatter_gradients, {words}"] = functools.partial(scattered, method)
    for kind in ("all_gather", "all_to_all", "ppermute"):
        rows[f"comms: {kind}"] = functools.partial(collective, kind)
    for name in ("delayed", "blockwise"):
        rows[f"mesh: experts, {name}"] = functools.partial(experts, name)
    rows["mesh: experts, gradient_sent_in_fp8, blockwise"] = functools.partial(
        experts, "blockwise", gradient_sent_in_fp8=True
    )
    return rows
