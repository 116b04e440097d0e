"""A stack of transformer blocks with real attention, in plain JAX, for one H200 or for eight.

RMSNorm, grouped-query attention with softmax, SwiGLU, an embedding and a loss head in bfloat16, and
AdamW. Blocks are in a scan. On eight H200s weights and batch are split over "fsdp".

`B` sequences, `T` tokens, `D` model, `F` hidden features.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama import INPUT, PRODUCT
from targets import state_of, topology

import jaxfp8 as fp8
from jaxfp8.sharding import Shard

# Llama 3 8B (arXiv:2407.21783, table 3), with fewer layers and a smaller vocabulary.
D, F, QUERIES, KEYS, HEAD, VOCABULARY = 4096, 14336, 32, 8, 128, 32768
LAYERS, B, T = 8, 2, 4096
# Scores of this many queries of a sequence are in memory at once, and logits of as many tokens. All
# of them would be the peak of the step.
CHUNK = 512

# Weights [in, out] of a block, and how "fsdp" splits them.
WEIGHTS = {
    "qkv": ((D, (QUERIES + 2 * KEYS) * HEAD), P("fsdp", None)),
    "out": ((QUERIES * HEAD, D), P(None, "fsdp")),
    "gate_up": ((D, 2 * F), P("fsdp", None)),
    "down": ((F, D), P(None, "fsdp")),
}
NORMS = ("attention_norm", "mlp_norm")
# The table of the embedding and the head.
EDGES = {
    "embedding": ((VOCABULARY, D), P(None, "fsdp")),
    "head": ((D, VOCABULARY), P("fsdp", None)),
    "final_norm": ((D,), P()),
}


def rms_norm(h: Any, scale: Any) -> Any:
    wide = h.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return wide.astype(h.dtype) * scale


def attention(qkv: Any, how: str, queries: int = QUERIES, keys: int = KEYS) -> Any:
    """[B, T, heads] -> [B, T, query heads], causal. `keys` heads of keys and as many of values.

    `how`: "blocks" of queries one after the other, or an `implementation` of
    `jax.nn.dot_product_attention`.
    """
    heads = qkv.reshape(*qkv.shape[:2], queries + 2 * keys, -1)
    q, k, v = jnp.split(heads, [queries, queries + keys], axis=2)
    if how != "blocks":
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
        return y.reshape(*qkv.shape[:2], -1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(q: Any, first: Any) -> Any:
        here = first + lax.iota(jnp.int32, CHUNK)
        mask = (lax.iota(jnp.int32, T)[None] <= here[:, None])[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    q = jnp.moveaxis(q.reshape(q.shape[0], -1, CHUNK, *q.shape[2:]), 1, 0)
    firsts = lax.iota(jnp.int32, q.shape[0]) * CHUNK
    y = lax.map(lambda of: block(*of), (q, firsts))
    return jnp.moveaxis(y, 0, 1).reshape(*qkv.shape[:2], -1)


def gated(gate_up: Any) -> Any:
    """[B, T, 2 F] -> [B, T, F]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def nats(h: Any, head: Any, targets: Any) -> Any:
    """The cross entropy of `targets` [B, T], a chunk of each sequence after the other."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(h: Any, targets: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(h @ head, targets)
        return jnp.sum(each.astype(jnp.float32))

    def chunked(a: Any) -> Any:
        return jnp.moveaxis(a.reshape(a.shape[0], -1, CHUNK, *a.shape[2:]), 1, 0)

    return jnp.sum(lax.map(lambda of: chunk(*of), (chunked(h), chunked(targets)))) / targets.size


def block(
    recipe: fp8.Recipe, h: Any, weights: Any, state: Any,
    *, devices: int = 1, how: str = "cudnn", stored: bool = False,
    kernels: fp8.Kernels | None = None,
) -> Any:  # fmt: skip
    """h [B, T, D] through a block.

    `stored`: weights are read in the layout in which they are stored, as FP8 matmuls read theirs.
    """

    def dot(name: str, x: Any) -> Any:
        x, w = checkpoint_name(x, INPUT), weights[name]
        if stored:
            w = with_layout_constraint(w, Layout((0, 1)))
        shard = Shard(WEIGHTS[name][1].index("fsdp"), "fsdp") if devices > 1 else None
        y = fp8.dot(x, w, recipe=recipe, state=state[name], w_shard=shard, kernels=kernels)
        return checkpoint_name(y, PRODUCT)

    first, second = (weights[name] for name in NORMS)
    h = h + dot("out", attention(dot("qkv", rms_norm(h, first)), how))
    return h + dot("down", gated(dot("gate_up", rms_norm(h, second))))


def train_step(recipe: fp8.Recipe, remat: Any, devices: int, **how: Any) -> Callable[..., Any]:
    """`step(params, opt_state, state, tokens) -> (params, opt_state, state, loss)`.

    `remat` is a policy, or None.
    """
    one = functools.partial(block, recipe, devices=devices, **how)
    kept = one if remat is None else jax.checkpoint(one, policy=remat, prevent_cse=False)
    optimizer = optax.adamw(1e-4)

    def split(h: Any) -> Any:
        return h if devices == 1 else lax.with_sharding_constraint(h, P("fsdp"))

    def loss_fn(params: Any, state: Any, tokens: Any) -> Any:
        edges = params["edges"]
        h = split(edges["embedding"][tokens[:, :-1]])
        h, _ = lax.scan(lambda h, of: (split(kept(h, *of)), None), h, (params["blocks"], state))
        return nats(rms_norm(h, edges["final_norm"]), edges["head"], tokens[:, 1:])

    def step(params: Any, opt_state: Any, state: Any, tokens: Any) -> Any:
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, loss

    return step


def compile_step(
    recipe: fp8.Recipe, devices: int = 1, layers: int = LAYERS,
    *, remat: Any = None, chip: str = "h200", how: str = "cudnn", stored: bool = False,
    kernels: fp8.Kernels | None = None,
) -> jax.stages.Compiled:  # fmt: skip
    """A train step for that many devices, with B sequences of T tokens on each."""
    there = topology(chip, f"1x1x{devices}").devices
    mesh = Mesh(np.array(there).reshape(-1), ("fsdp",), axis_types=(AxisType.Auto,))

    def array(shape: tuple[int, ...], spec: P, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {name: array((layers, *of), P(None, *spec)) for name, (of, spec) in WEIGHTS.items()}
    params = {
        "blocks": weights | {name: array((layers, D), P()) for name in NORMS},
        "edges": {name: array(shape, spec) for name, (shape, spec) in EDGES.items()},
    }
    of_params = {(p.shape, p.dtype): p.sharding.spec for p in jax.tree.leaves(params)}
    opt_state, state = jax.tree.map(
        lambda s: array(s.shape, of_params.get((s.shape, s.dtype), P()), s.dtype),
        (jax.eval_shape(optax.adamw(1e-4).init, params), state_of(recipe, layers)),
    )
    carried = (params, opt_state, dict.fromkeys(WEIGHTS, state))
    out = jax.tree.map(lambda s: s.sharding, carried)
    step = train_step(recipe, remat, devices, how=how, stored=stored, kernels=kernels)
    step = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=(*out, None))
    with jax.set_mesh(mesh):
        lowered = step.lower(*carried, array((devices * B, T + 1), P("fsdp"), jnp.int32))
    return lowered.compile((kernels or fp8.Kernels(chip)).compiler_options(recipe))
