"""What `tpu_steps.py` compiles: train steps of blocks of Llama 3, with AdamW."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import _tpu_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_targets import topology

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

CONTENDERS = ("bfloat16", *(["qwix"] if cases.QWIX else []), "delayed", "current", "rowwise")
LOOPS = ("scan", "unrolled")
KEPT = ("by jax", "inputs", "nothing")  # what the backward pass keeps of a block


class Model(NamedTuple):
    """Blocks on `batch` sequences for each core. With several cores weights are split (FSDP)."""

    blocks: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int = 2048
    slice: str | None = None  # chips of a slice; None is one core


MODELS = {
    "8B": Model(4, 4096, 14336, 32, 8, 4),
    "12 blocks": Model(12, 2048, 5632, 16, 4, 4),
    "70B": Model(4, 8192, 28672, 64, 8, 1, slice="2x4x4"),
}


def mesh_of(model: Model) -> jax.sharding.Mesh:
    devices = topology("tpu7x", model.slice).devices
    devices = devices if model.slice else devices[:1]
    return jax.sharding.Mesh(np.array(devices), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


def attention(mesh: jax.sharding.Mesh) -> Callable[..., jax.Array]:
    """Causal attention of q, k, v [batch, tokens, heads, features], by a Pallas kernel of JAX.

    Attention in XLA would fill the memory with weights of attention, for all contenders.
    """

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        tokens, heads, size = q.shape[1:]
        masks = [splash_attention.CausalMask((tokens, tokens))] * heads
        kernel = splash_attention.make_splash_mha_single_device(
            splash_attention.MultiHeadMask(masks)
        )
        q, k, v = (each.swapaxes(1, 2) for each in (q * size**-0.5, k, v))
        return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)

    if mesh.size == 1:
        return attend
    return jax.shard_map(
        attend, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
    )


def block_of(model: Model, contender: str, mesh: jax.sharding.Mesh, kept: str) -> Any:
    """A flax module. All cores split the weights of FP8 layers, which gather them in FP8."""
    dense = cases.dense_of(contender)
    if contender in cases.RECIPES and mesh.size > 1:
        shard = Shard(0, "fsdp", reshard_after_forward=kept == "by jax")
        dense = functools.partial(dense, w_shard=shard)
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "hidden": model.hidden}
    module = cases.Block(dense, **sizes, attend=attention(mesh))
    return cases.quantized_by_qwix(module) if contender == "qwix" else module


def lowering(name: str, loop: str, kept: str, contender: str) -> tuple[Any, tuple[Any, ...]]:
    """A train step as `jax.jit` returns it, and the types of its arguments."""
    model = MODELS[name]
    mesh = mesh_of(model)
    block, tx = block_of(model, contender, mesh, kept), optax.adamw(1e-4)
    ours = contender in cases.RECIPES

    def on(spec: P, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    batch = model.batch * mesh.size
    x = on(P("fsdp"), jax.ShapeDtypeStruct((batch, model.tokens, model.width), jnp.bfloat16))
    variables = dict(jax.eval_shape(block.init, jax.random.key(0), x))
    params = variables.pop("params")
    state = {key: fp8.settle(of) for key, of in variables.items()} if ours else {}

    def split(leaf: Any) -> Any:
        """Weights are split over all cores, along the axis of their inputs."""
        return on(P("fsdp") if leaf.ndim == 2 else P(), leaf)

    def whole(leaf: Any) -> Any:
        return on(P(), leaf)

    def stacked(leaf: Any) -> Any:
        spec = P(None, *leaf.sharding.spec)
        return on(spec, jax.ShapeDtypeStruct((model.blocks, *leaf.shape), leaf.dtype))

    one = jax.tree.map(split, params), jax.tree.map(whole, state)
    both = jax.tree.map(stacked, one) if loop == "scan" else [one] * model.blocks
    params, state = both if loop == "scan" else zip(*both, strict=True)

    def apply(x: jax.Array, variables: Any) -> tuple[jax.Array, None]:
        if mesh.size > 1:  # otherwise XLA may split the features of activations
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))
        params, state = variables
        return block.apply({"params": params, **state}, x), None

    body = rematerialized(apply, kept, ours)

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        if loop == "scan":
            x, _ = jax.lax.scan(body, x, (params, state))
        else:
            for each in zip(params, state, strict=True):
                x, _ = body(x, each)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(params: Any, moments: Any, state: Any, x: jax.Array) -> Any:
        if ours:
            value, grads, state = fp8.value_and_grad(loss)(params, state, x)
        else:
            value, grads = jax.value_and_grad(loss)(params, state, x)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, state, value

    moments = jax.eval_shape(tx.init, params)
    moments = optax.tree_utils.tree_map_params(
        tx, lambda leaf, param: on(param.sharding.spec, leaf), moments, params,
        transform_non_params=whole,
    )  # fmt: skip
    donated = {"donate_argnums": (0, 1, 2)}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, moments, state))
    jitted = jax.jit(step, **donated, out_shardings=(*shardings, None))
    return jitted, (params, moments, state, x)


def rematerialized(apply: Callable[..., Any], kept: str, ours: bool) -> Callable[..., Any]:
    """The block with a policy: the inputs of matmuls are kept in FP8, or in bfloat16."""
    if kept == "by jax":
        return apply
    policy = jax.checkpoint_policies.nothing_saveable
    if kept == "inputs":
        names = jax.checkpoint_policies.save_only_these_names("input")
        policy = fp8.save_fp8_residuals() if ours else names
    return jax.checkpoint(apply, policy=policy)
