"""The layers of a Llama-3-70B in plain JAX.

Fully sharded, tensor and sequence parallel, in an Auto mesh or inside `shard_map`.

`B` sequences, `T` tokens, `D` model, `F` hidden features. Attention is a stand-in without matmuls:
on the wire it is silent.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import state_of, topology

import jaxfp8 as fp8
from jaxfp8.programs import WireReport
from jaxfp8.sharding import Shard
from jaxfp8.sharding._amax import manual_axes

# Llama 3 (arXiv:2407.21783, table 3): 8 groups of 8 query heads, one key and one value head, of 128
# features each.
D, F, GROUPS, QUERIES, HEAD = 8192, 28672, 8, 8, 128
LAYERS, TOKENS = 80, 4096

# Weights [in, out] and where they lie: "tensor" splits the columns of the first of a pair and the
# rows of the second.
COLUMNS, ROWS = P("fsdp", "tensor"), P("tensor", "fsdp")
WEIGHTS = {
    "qkv": ((D, GROUPS * (QUERIES + 2) * HEAD), COLUMNS),
    "out": ((GROUPS * QUERIES * HEAD, D), ROWS),
    "gate_up": ((D, 2 * F), COLUMNS),
    "down": ((F, D), ROWS),
}
MLP = ("gate_up", "down")
# Activations [B, T, features] inside a pair and, sequence parallel, between pairs.
FEATURES, SEQUENCE = P("fsdp", None, "tensor"), P("fsdp", "tensor")

# Results of matmuls are kept, so that only what lies between matmuls is computed again, and no
# weight gathered a third time.
PRODUCT = "product"
KEEP_PRODUCTS = jax.checkpoint_policies.save_only_these_names(PRODUCT)
# The inputs of matmuls, for bf16 policies that save what FP8 residuals are a copy of.
INPUT = "input"
KEEP_INPUTS = jax.checkpoint_policies.save_only_these_names(INPUT)
# And FP8 residuals, so that nothing is cast again.
KEEP_RESIDUALS = jax.checkpoint_policies.save_from_both_policies(
    fp8.save_fp8_residuals(), KEEP_PRODUCTS
)

RECIPES = {
    "bf16": fp8.recipes.identity(),
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
}


def normalized(h: Any) -> Any:
    h = h.astype(jnp.float32)
    return (h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)


def attention(qkv: Any) -> Any:
    """[B, T, heads] -> [B, T, query heads], elementwise, each group by itself as attention
    would.
    """
    q, k, v = jnp.split(in_groups(qkv), [QUERIES * HEAD, (QUERIES + 1) * HEAD], axis=-1)
    k, v = (jnp.tile(t, QUERIES) for t in (k, v))
    return (jnp.tanh(q * k) * v).reshape(*qkv.shape[:2], -1)


def gated(gate_up: Any) -> Any:
    """[B, T, 2 F] -> [B, T, F]."""
    gate, up = jnp.split(in_groups(gate_up), 2, axis=-1)
    return (jax.nn.silu(gate) * up).reshape(*gate_up.shape[:2], -1)


def in_groups(x: Any) -> Any:
    """[B, T, features] -> [B, T, GROUPS, features of a group].

    So lie the columns of fused weights, which "tensor" splits.
    """
    groups = GROUPS // lax.axis_size("tensor") if manual_axes() else GROUPS
    return x.reshape(*x.shape[:2], groups, -1)


def constrained(x: Any, spec: P) -> Any:
    return x if manual_axes() else lax.with_sharding_constraint(x, spec)


def layer(recipe: fp8.Recipe, h: Any, weights: Any, state: Any, *, stored: bool = False) -> Any:
    """h [B, T, D] through a layer.

    Each matmul gathers its weight over "fsdp"; the first of a pair its tokens over "tensor".
    `stored`: weights are read in the layout in which they are stored, as FP8 matmuls read theirs.
    """

    def dot(name: str, x: Any) -> Any:
        spec = WEIGHTS[name][1]
        tokens = Shard(1, "tensor")
        weight = Shard(spec.index("fsdp"), "fsdp")
        x = checkpoint_name(constrained(x, SEQUENCE if spec == COLUMNS else FEATURES), INPUT)
        w = with_layout_constraint(weights[name], Layout((0, 1))) if stored else weights[name]
        y = fp8.dot(
            x, w, recipe=recipe, state=state[name],
            x_shard=tokens if spec == COLUMNS else None, w_shard=weight,
            y_shard=None if spec == COLUMNS else tokens,
        )  # fmt: skip
        return checkpoint_name(constrained(y, FEATURES if spec == COLUMNS else SEQUENCE), PRODUCT)

    if "qkv" in weights:
        h = h + dot("out", attention(dot("qkv", normalized(h))))
    return h + dot("down", gated(dot("gate_up", normalized(h))))


def train_step(recipe: fp8.Recipe, remat: Any, *, stored: bool = False) -> Callable[..., Any]:
    """`step(weights, state, h) -> (weights, state, loss)`: one step of SGD.

    `weights` and `state` are stacked, and layers scanned; or lists with an entry for each layer.
    `remat` is a policy, or None. `stored`: see `layer`.
    """
    one = functools.partial(layer, recipe, stored=stored)

    def block(h: Any, *of: Any, scanned: bool) -> Any:
        # The documentation of JAX advises `prevent_cse=False` inside a scan, where nothing can undo
        # the remat. With barriers, the backward loop copies each residual before it is read.
        kept = one if remat is None else jax.checkpoint(one, policy=remat, prevent_cse=not scanned)
        return kept(h, *of)

    def loss_fn(weights: Any, state: Any, h: Any) -> Any:
        if isinstance(weights, list):
            for of in zip(weights, state, strict=True):
                h = block(h, *of, scanned=False)
        else:
            h, _ = lax.scan(lambda h, of: (block(h, *of, scanned=True), None), h, (weights, state))
        loss = jnp.mean(h.astype(jnp.float32) ** 2)
        return lax.pmean(loss, manual_axes()) if manual_axes() else loss

    def step(weights: Any, state: Any, h: Any) -> Any:
        loss, grads, state = fp8.value_and_grad(loss_fn)(weights, state, h)
        return jax.tree.map(lambda w, g: w - jnp.bfloat16(1e-4) * g, weights, grads), state, loss

    return step


def traced_step(
    recipe: fp8.Recipe, fsdp: int, tensor: int, layers: int = LAYERS,
    *, scanned: bool = True, remat: Any = KEEP_RESIDUALS, names: tuple[str, ...] = tuple(WEIGHTS),
    settled: bool = True, manual: bool = False, stored: bool = False,
) -> jax.stages.Traced:  # fmt: skip
    """A train step for fsdp x tensor H200, eight a host, with a sequence of TOKENS for each group
    of tensor devices.

    `names`: the weights of a layer; MLP compiles in half the time. `manual`: inside `shard_map`.
    `stored`: see `layer`.
    """
    devices = np.array(topology("h200", f"1x{fsdp * tensor // 8}x8").devices).reshape(fsdp, tensor)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def array(shape: tuple[int, ...], spec: P, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def of_layers(*stacked: int) -> tuple[Any, Any]:
        weights = {
            name: array((*stacked, *WEIGHTS[name][0]), P(*[None] * len(stacked), *WEIGHTS[name][1]))
            for name in names
        }
        state = jax.tree.map(
            lambda s: array(s.shape, P(), s.dtype), state_of(recipe, *stacked, settled=settled)
        )
        return weights, dict.fromkeys(names, state)

    weights, state = of_layers(layers) if scanned else ([one] * layers for one in of_layers())
    h = array((fsdp, TOKENS, D), SEQUENCE)
    out = jax.tree.map(lambda s: s.sharding, (weights, state))
    step = train_step(recipe, remat, stored=stored)
    if manual:
        specs = jax.tree.map(lambda sharding: sharding.spec, out)
        step = jax.shard_map(step, mesh=mesh, in_specs=(*specs, SEQUENCE), out_specs=(*specs, P()))
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*out, None))
    with jax.set_mesh(mesh):
        return step.trace(weights, state, h)


def compile_step(recipe: fp8.Recipe, *sizes: int, **options: Any) -> jax.stages.Compiled:
    """`traced_step` with the same arguments, compiled."""
    lowered = traced_step(recipe, *sizes, **options).lower()
    return lowered.compile(fp8.Kernels("h200").compiler_options(recipe))


def shards(fsdp: int, tensor: int) -> list[tuple[int, int]]:
    """What one device holds of each weight of a layer."""
    sizes = {"fsdp": fsdp, "tensor": tensor}
    return [
        tuple(n // sizes[axis] for n, axis in zip(shape, spec, strict=True))
        for shape, spec in WEIGHTS.values()
    ]


def gathers(report: WireReport, fsdp: int, tensor: int) -> dict[str, WireReport]:
    """The all-gathers of weights, of activations, and of the scales of both, told apart by shape,
    however transposed.
    """
    weights = {tuple(sorted(shape)) for shape in shards(fsdp, tensor)}
    activations = {tuple(sorted((TOKENS // tensor, D)))}
    found: dict[str, list[Any]] = {"weights": [], "activations": [], "scales": []}
    for transfer in report.only(kind="all-gather").transfers:
        shape = tuple(sorted(n for n in transfer.shape if n > 1))
        found[
            "weights" if shape in weights else "activations" if shape in activations else "scales"
        ].append(transfer)
    return {kind: WireReport(tuple(of)) for kind, of in found.items()}
