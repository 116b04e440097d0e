"""Fully sharded weights on eight H200: what travels is FP8, and the gradient is scattered."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import BLACKWELL
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import dense_step, state_of, topology

import jaxfp8 as fp8
from jaxfp8.programs import assert_wire_dtype, wire_report
from jaxfp8.sharding import Shard

pytestmark = pytest.mark.deviceless

M, K, N, DEVICES = 2048, 1024, 1024, 8
B = 8  # of M tokens, as sequences
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 32x32 weights": fp8.recipes.mxfp8(w_tile_dim=2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_weights_travel_in_fp8(name):
    recipe = RECIPES[name]
    mesh = Mesh(np.array(topology("h200", "1x1x8").devices), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = P("fsdp"), P("fsdp"), P("fsdp"), P()
    state = state_of(recipe)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N), (M, N))]
    arrays = [
        jax.tree.map(
            lambda s, spec=spec: jax.ShapeDtypeStruct(
                s.shape, s.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
        )
        for tree, spec in zip((*shapes, state), specs, strict=True)
    ]

    def dot(x, w, state):
        return fp8.dot(x, w, recipe=recipe, state=state, w_shard=Shard(0, "fsdp"))

    def local(*arguments):
        loss, grads, new = dense_step(recipe, dot)(*arguments)
        return jax.lax.psum(loss, "fsdp"), grads, new

    step = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(P(), (P("fsdp"), P("fsdp")), P())
    )
    report = wire_report(
        jax.jit(step).lower(*arrays).compile(fp8.Kernels("h200").compiler_options(recipe))
    )

    values = K * N // DEVICES
    gathers = report.only(kind="all-gather", at_least=values)
    # Another copy in each direction, or one copy, whose second gather XLA shares with the first in
    # a program this small.
    copies = 2 if name in ("rowwise", "mxfp8") else 1
    assert [(t.dtype, t.times * t.bytes) for t in gathers.transfers] == [
        ("uint8", values)
    ] * copies, report
    # Scales: none for a whole tensor, else a float32 or a byte a cell.
    scales = (
        sum(t.times * t.bytes for t in report.only(kind="all-gather").transfers) - copies * values
    )
    assert scales <= {"rowwise": 4 * K}.get(
        name, values // 16 if "mxfp8" in name else values // 1024
    ), report
    scattered = report.only(kind="reduce-scatter")
    assert sum(t.times * t.bytes for t in scattered.transfers) == 2 * K * N, report
    # Amaxes cross the mesh as vectors at most; recipes in tiles have none.
    for transfer in report.only(kind="all-reduce").transfers:
        assert transfer.bytes <= 4 * 2 * (K + N), report
    if recipe.tile is not None:
        assert sum(t.bytes for t in report.only(kind="all-reduce").transfers) <= 4, report


def compile_in(mesh, chip, recipe, dot, specs):
    """A step on x [B, T, K], w [K, N], whose output gradient is [B, T, N].

    Gradients lie where x and w do.
    """
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((B, M // B, K), (K, N), (B, M // B, N)), specs, strict=True)
    ]
    whole = NamedSharding(mesh, P())
    state = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), state_of(recipe)
    )
    with jax.set_mesh(mesh):
        step = jax.jit(
            dense_step(recipe, dot),
            out_shardings=(None, tuple(a.sharding for a in arrays[:2]), None),
        )
        return step.lower(*arrays, state).compile(fp8.Kernels(chip).compiler_options(recipe))


# Where x, w and g lie on 4 ('fsdp') x 2 ('tensor') devices, what is gathered, and how large a part
# and a gradient are.
LAYOUTS = {
    "rows of w": (
        (P("fsdp"), P("fsdp", "tensor"), P("fsdp", None, "tensor")),
        {"w_shard": Shard(0, "fsdp")},
        K * N // 8,
    ),
    "rows of w over both": (
        (P(("fsdp", "tensor")),) * 3,
        {"w_shard": Shard(0, ("fsdp", "tensor"))},
        K * N // 8,
    ),
    "columns of w": (
        (P("fsdp", None, "tensor"), P("tensor", "fsdp"), P("fsdp")),
        {"w_shard": Shard(1, "fsdp")},
        K * N // 8,
    ),
    "tokens": (
        (P("fsdp", "tensor"), P(None, "tensor"), P("fsdp", None, "tensor")),
        {"x_shard": Shard(1, "tensor")},
        M * K // 8,
    ),
    "tokens of the result": (
        (P("fsdp", None, "tensor"), P("tensor"), P("fsdp", "tensor")),
        {"y_shard": Shard(1, "tensor")},
        M * N // 8,
    ),
}
# Matmuls of the gradients with equal scales read one copy of the gradient.
ONE_COPY = {"delayed", "current"}


MARKED = [
    *[("rows of w", name, kind) for name in RECIPES for kind in (AxisType.Auto, AxisType.Explicit)],
    *[
        (layout, name, AxisType.Auto)
        for layout in ("columns of w", "tokens", "tokens of the result")
        for name in ("delayed", "blockwise")
    ],
    *[
        (layout, name, AxisType.Explicit)
        for layout in ("columns of w", "tokens", "tokens of the result")
        for name in ("rowwise", "mxfp8")
    ],
    ("tokens of the result", "current", AxisType.Explicit),
    ("rows of w over both", "blockwise", AxisType.Auto),
    ("rows of w over both", "mxfp8", AxisType.Explicit),
    # The chip's own matmul of tiles: Auto meshes only (docs/gpu.md).
    *[(layout, "mxfp8, b200", AxisType.Auto) for layout in ("rows of w", "columns of w", "tokens")],
]


@pytest.mark.parametrize(("layout", "name", "kind"), MARKED)
def test_what_is_marked_travels_in_fp8(layout, name, kind):
    recipe = RECIPES[name.removesuffix(", b200")]
    kernels = BLACKWELL if name.endswith(", b200") else None
    chip = "h200" if kernels is None else kernels.chip
    mesh = Mesh(
        np.array(topology(chip, "1x1x8").devices).reshape(4, 2),
        ("fsdp", "tensor"),
        axis_types=(kind,) * 2,
    )
    specs, how, part = LAYOUTS[layout]

    def dot(x, w, state):
        sharding = {"out_sharding": specs[2]} if kind is AxisType.Explicit else {}
        return fp8.dot(x, w, recipe=recipe, state=state, kernels=kernels, **how, **sharding)

    compiled = compile_in(mesh, chip, recipe, dot, specs)
    assert_wire_dtype(compiled, "all-gather", jnp.uint8, at_least=part)
    report = wire_report(compiled)
    copies = sum(t.times for t in report.only(kind="all-gather", at_least=part).transfers)
    if layout == "tokens of the result":
        assert copies == (1 if name in ONE_COPY else 2), report
    assert 1 <= copies <= 2, report
    # The gradient is scattered where the part lies: no device gets the whole sum.
    devices = math.prod(mesh.shape[name] for name in next(iter(how.values())).axis_names)
    over = {
        kind: [
            t.bytes
            for t in report.only(kind=kind, at_least=part).transfers
            if t.group_size == devices
        ]
        for kind in ("reduce-scatter", "all-reduce")
    }
    want = {"reduce-scatter": [2 * devices * part], "all-reduce": []}
    if layout == "tokens" and kernels is BLACKWELL:
        # It makes one axis of B and T, whose inner one XLA does not scatter along (docs/limits.md).
        want = {"reduce-scatter": [], "all-reduce": [2 * devices * part]}
    assert over == want, report


def test_weights_of_experts_under_vmap_travel_in_fp8():
    """JAX's rule for a constraint under vmap forgets which axes it says are whole."""
    recipe = RECIPES["mxfp8"]
    mesh = Mesh(np.array(topology("h200", "1x1x8").devices), ("fsdp",), axis_types=(AxisType.Auto,))
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "fsdp")))
        for shape in ((4, M, K), (4, K, N))
    )

    def loss(w, x):
        dot = lambda w, x: fp8.dot(x, w, recipe=recipe, w_shard=Shard(0, "fsdp"))
        return jnp.sum(jax.vmap(dot)(w, x).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x).compile()
    assert_wire_dtype(compiled, "all-gather", jnp.uint8, at_least=4 * K * N // 8)
    assert not wire_report(compiled).only(kind="all-reduce", at_least=4 * K * N // 8).transfers


# What an Auto mesh gathers of sharded weights that nobody marked (docs/sharding.md).
AUTO = {
    "delayed": (fp8.recipes.delayed(), None, "float8_e4m3fn"),
    "current": (fp8.recipes.current(), None, "float8_e4m3fn"),
    "rowwise": (fp8.recipes.rowwise(), None, "float8_e4m3fn"),
    "blockwise": (fp8.recipes.blockwise(), None, "bfloat16"),
    "mxfp8": (fp8.recipes.mxfp8(), None, "bfloat16"),
    "mxfp8, b200": (fp8.recipes.mxfp8(), BLACKWELL, "float8_e4m3fn"),
}


@pytest.mark.parametrize("name", AUTO)
def test_what_an_auto_mesh_gathers(name):
    recipe, kernels, dtype = AUTO[name]
    chip = "h200" if kernels is None else kernels.chip
    mesh = Mesh(np.array(topology(chip, "1x1x8").devices), ("fsdp",), axis_types=(AxisType.Auto,))
    dot = lambda x, w, state: fp8.dot(x, w, recipe=recipe, state=state, kernels=kernels)
    compiled = compile_in(mesh, chip, recipe, dot, (P("fsdp"),) * 3)
    assert_wire_dtype(compiled, "all-gather", dtype, at_least=K * N // DEVICES)


class Converted(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1536, K, dtype=jnp.bfloat16, name="embed")(tokens)
        return nn.Dense(1536, dtype=jnp.bfloat16, name="head")(
            nn.gelu(nn.Dense(N, dtype=jnp.bfloat16, name="up")(x))
        )


@pytest.mark.parametrize("marked", [True, False])
def test_a_converted_model_passes_the_check_if_it_is_marked(marked):
    """docs/fsdp.md: the embedding and the head travel in bfloat16, in one gather with FP8.

    There are more tokens than rows of the embedding. For fewer XLA would gather tokens.
    """
    mesh = Mesh(np.array(topology("h200", "1x1x8").devices), ("fsdp",), axis_types=(AxisType.Auto,))
    how = {"w_shard": Shard(0, "fsdp")} if marked else {}
    tokens = jax.ShapeDtypeStruct((B, M // B), jnp.int32)
    model, _ = fp8.convert(Converted(), RECIPES["blockwise"], inputs=(tokens,), **how)

    def loss(params, tokens):
        return jnp.mean(model.apply({"params": params}, tokens).astype(jnp.float32) ** 2)

    def split(array):
        spec = P("fsdp") if array.ndim > 1 else P()
        return array.update(sharding=NamedSharding(mesh, spec))

    params, tokens = jax.tree.map(
        split, (jax.eval_shape(model.init, jax.random.key(0), tokens)["params"], tokens)
    )
    shardings = jax.tree.map(lambda array: array.sharding, params)
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, tokens).compile()
    check = functools.partial(assert_wire_dtype, compiled, "all-gather", jnp.uint8)
    kept = params["embed"], params["head"]
    if marked:
        check(at_least=K * N // DEVICES, kept=kept)
    with pytest.raises(AssertionError, match=r"(?s)dtype than uint8:\n  bfloat16\[.*by kept=\.$"):
        check(at_least=K * N // DEVICES, kept=() if marked else kept)
