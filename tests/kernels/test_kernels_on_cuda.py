"""A kernel in a program for every platform: CUDA runs the kernel, a CPU XLA's backend."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import cast_in, known
from hard_tiles import uneven
from interpreter import interpreted, needs_mosaic
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from platforms import mesh_of, text_for, types
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.kernels.cast._api import cast_copies
from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES
from jaxfp8.numerics._amax import amax

MOSAIC = fp8.Kernels(casts="mosaic", matmuls="mosaic")
XLA = fp8.Kernels(casts="xla", matmuls="xla")
CALL = re.compile(r"custom_call @mosaic_gpu\w*\(")
ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
MX_ROWS, MX_COLUMNS = fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1))
QUANTIZED = {
    "tiles": ((ROWS, COLUMNS), {"power_of_two": True}),
    "squares": ((SQUARES,), {}),
    "mx": ((MX_COLUMNS, MX_ROWS), {"scale_format": fp8.E8M0}),
    "rows and the whole": ((fp8.PerAxis(0, 1), fp8.PerTensor()), {}),
    "a known scale": (fp8.PerAxis(-1), {"scale": np.full((1, 1, 224), 0.3, np.float32)}),
}


def kernels_in(function, *arguments):
    """How many kernels a GPU's program has; a CPU's has none."""
    assert not CALL.findall(text_for("cpu", function, *arguments))
    return len(CALL.findall(text_for("cuda", function, *arguments)))


@needs_mosaic
@pytest.mark.parametrize("case", QUANTIZED)
def test_a_quantizer(case):
    granularities, how = QUANTIZED[case]
    x = jnp.asarray(uneven((2, 160, 224)), jnp.bfloat16)
    run = lambda kernels: fp8.quantize(x, fp8.E4M3, granularities, kernels=kernels, **how)
    assert_same_bits(run(MOSAIC), run(XLA))
    assert_same_bits(jax.jit(lambda: run(MOSAIC))(), jax.jit(lambda: run(XLA))())


@needs_mosaic
@pytest.mark.parametrize("name", ["swiglu", "rms_norm"])
def test_a_quantizer_with_a_prologue(name):
    x = jnp.asarray(uneven((2, 160, 224)), jnp.bfloat16)
    prologue, other = fp8.prologues.SwiGLU(), 2 * x
    if name == "rms_norm":
        prologue, other = fp8.prologues.RMSNorm(), jnp.arange(224.0)
    run = lambda kernels, x, other: fp8.quantize(
        (x, other), fp8.E4M3, (ROWS, COLUMNS), prologue=prologue, kernels=kernels
    )
    mine, theirs = (jax.jit(functools.partial(run, kernels))(x, other) for kernels in (MOSAIC, XLA))
    assert_same_bits(mine, theirs)


@needs_mosaic
@pytest.mark.parametrize("shape", [(2, 160, 224), (64, 160)], ids=str)
@pytest.mark.parametrize("known_scale", [True, False], ids=["cast", "quantizer"])
def test_extras_have_the_shapes_of_the_kernel(known_scale, shape):
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 10, shape), jnp.bfloat16)

    def run(backend):
        how = {"column_sums": True, "backends": (backend,)}
        if known_scale:
            cast = cast_in(fp8.E4M3, fp8.PerTensor(), **how)
            return cast_copies(x, cast, known(jnp.float32(3.0)))
        return cast_copies(x, cast_in(fp8.E4M3, MX_ROWS, **how))

    copies, extras = run("mosaic")
    of_kernel_copies, of_kernel = interpreted(run, "mosaic")
    assert types(extras) == types(of_kernel)
    assert extras.column_sums is not None
    assert_same_bits(copies, of_kernel_copies)
    assert_same_bits(copies, run("xla")[0])
    for each in (extras, of_kernel):
        np.testing.assert_array_equal(each.column_sums.sum(-2), np.asarray(x, np.float32).sum(-2))
        if known_scale:
            np.testing.assert_array_equal(each.largest.max(), amax(x, fp8.PerTensor()))


@needs_mosaic
@pytest.mark.parametrize("add_to", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "granularities",
    [(ROWS, SQUARES), (MX_ROWS, MX_COLUMNS), (fp8.PerAxis(0), fp8.PerAxis(1))],
    ids=["tiles", "mx", "rows"],
)
def test_a_matmul(granularities, add_to):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, c = (
        jax.random.normal(k, s) for k, s in zip(keys, ((40, 200), (200, 72), (40, 72)), strict=True)
    )
    lhs, rhs = (
        fp8.quantize(each, fp8.E4M3, granularity)
        for each, granularity in zip((x, w), granularities, strict=True)
    )
    c = None if add_to is None else c.astype(add_to)
    run = lambda kernels, *all: fp8.scaled_matmul(*all[:2], add_to=all[2], kernels=kernels)
    mine, theirs = (jax.jit(functools.partial(run, k))(lhs, rhs, c) for k in (MOSAIC, XLA))
    assert_same_bits(mine, theirs)


@needs_mosaic
def test_a_tiling_of_timings_is_the_kernels_alone():
    """Timings choose a tiling. XLA's matmul has none."""
    lhs, rhs = (
        fp8.quantize(jnp.asarray(uneven(shape), jnp.float32), fp8.E4M3, each)
        for shape, each in (((40, 256), ROWS), ((256, 72), SQUARES))
    )

    class Timings:
        def choose(self, lhs, rhs, call, *, add_to=None):
            return [("mosaic", {"tiling": CHOICES["large"]})]

    timed = fp8.Kernels("h200", timings=Timings())
    mine, theirs = (
        jax.jit(functools.partial(fp8.scaled_matmul, kernels=kernels))(lhs, rhs)
        for kernels in (timed, XLA)
    )
    assert_same_bits(mine, theirs)


RECIPES = {"blockwise": fp8.recipes.blockwise(), "delayed": fp8.recipes.delayed()}
TOKENS, D, F = 512, 256, 128


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (TOKENS, D), (D, F), (F,), (TOKENS, F)
    x, w, b, c = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    return x, w, jnp.round(4 * b), jnp.round(4 * c)  # sums of integers are exact


def step(recipe, kernels, x, w, b, c, state, *, dot=fp8.dot):
    """Result, gradients and state of a layer."""

    def loss(params, state):
        x, w, b = params
        y = dot(x, w, recipe=recipe, state=state, bias=b, kernels=kernels)
        return jnp.sum(y * c), y

    (_, y), gradients, state = fp8.value_and_grad(loss, has_aux=True)((x, w, b), state)
    return y, gradients, state


def mapped(run, x, w, b, c, state):
    """Each with tokens of its own."""
    split = lambda each: each.reshape(2, -1, each.shape[-1])
    return jax.vmap(run, in_axes=(0, None, None, 0, None))(split(x), w, b, split(c), state)


def checkpointed(x, w, **how):
    policy = fp8.save_fp8_residuals()
    bound = lambda x, w, state, bias: fp8.dot(x, w, **how | {"state": state, "bias": bias})
    return jax.checkpoint(bound, policy=policy)(x, w, how["state"], how["bias"])


def scanned(x, w, **how):
    _, y = jax.lax.scan(
        lambda carry, x: (carry, checkpointed(x, w, **how)), None, x.reshape(2, -1, D)
    )
    return y.reshape(-1, F)


def on_shards(check_vma, run, x, w, b, c, state):
    mesh = mesh_of(AxisType.Auto)
    specs = P("a"), P(), P(), P("a"), P()
    outputs = P("a"), (P("a"), P(), P()), P()
    wrapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=check_vma)
    return wrapped(x, w, b, c, state)


TRANSFORMED = {
    "jit": lambda run: run,
    "vmap": lambda run: functools.partial(mapped, run),
    "checkpoint": lambda run: functools.partial(run, dot=checkpointed),
    "scan over checkpoint": lambda run: functools.partial(run, dot=scanned),
    "shard_map": lambda run: functools.partial(on_shards, True, run),
    "shard_map, check_vma=False": lambda run: functools.partial(on_shards, False, run),
}
"""Of the step of a layer, what is done with it."""


def cases():
    for name in RECIPES:
        for transformed in TRANSFORMED:
            # Amaxes of shards need types.
            if (name, transformed) != ("delayed", "shard_map, check_vma=False"):
                yield pytest.param(name, transformed, id=f"{name}-{transformed}")


def program_of(name, transformed, kernels):
    return TRANSFORMED[transformed](functools.partial(step, RECIPES[name], kernels))


@needs_mosaic
@pytest.mark.parametrize(("name", "transformed"), list(cases()))
def test_a_layer(name, transformed):
    given = (*arrays(), fp8.init_state(RECIPES[name]))
    for _ in range(2 if RECIPES[name].rows and transformed != "vmap" else 1):
        mine, theirs = (
            jax.jit(program_of(name, transformed, kernels))(*given) for kernels in (MOSAIC, XLA)
        )
        assert_same_bits(mine, theirs)
        given = (*given[:-1], mine[2])


@needs_mosaic
@pytest.mark.deviceless
@pytest.mark.parametrize(("name", "transformed"), list(cases()))
def test_a_layer_on_a_gpu_has_the_kernels(name, transformed):
    given = (*arrays(), fp8.init_state(RECIPES[name]))
    # Three casts and three matmuls, and for the backward pass of a scan what is done again.
    assert kernels_in(program_of(name, transformed, MOSAIC), *given) >= 6
    assert kernels_in(program_of(name, transformed, XLA), *given) == 0


@needs_mosaic
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_on_a_mesh(name, kind):
    mesh = mesh_of(kind)
    specs = P("a"), P(None, None), P(), P("a")
    with jax.set_mesh(mesh):
        given = [
            jax.device_put(each, NamedSharding(mesh, spec))
            for each, spec in zip(arrays(), specs, strict=True)
        ]
        state = jax.device_put(fp8.init_state(RECIPES[name]), NamedSharding(mesh, P()))
        mine, theirs = (
            jax.jit(functools.partial(step, RECIPES[name], kernels))(*given, state)
            for kernels in (MOSAIC, XLA)
        )
        assert_same_bits(mine, theirs)
        if kind == AxisType.Explicit:
            assert jax.tree.map(jax.typeof, mine) == jax.tree.map(jax.typeof, theirs)


@needs_mosaic
@pytest.mark.deviceless
def test_kernels_in_the_program_of_a_gpu_alone():
    x = jnp.ones((256, 256), jnp.bfloat16)
    for case in ("tiles", "squares", "mx", "rows and the whole"):
        granularities, how = QUANTIZED[case]
        if "rows" in case:
            granularities = fp8.PerAxis(0), fp8.PerAxis(1)
        run = lambda x, g=granularities, how=how: fp8.quantize(
            x, fp8.E4M3, g, kernels=MOSAIC, **how
        )
        assert kernels_in(run, x) == 1
    lhs, rhs = (fp8.quantize(x, fp8.E4M3, each) for each in (ROWS, SQUARES))
    assert kernels_in(lambda lhs, rhs: fp8.scaled_matmul(lhs, rhs, kernels=MOSAIC), lhs, rhs) == 1


def twice(x, w, *, bias, **how):
    """Two layers of different widths, which read one array."""
    wide = fp8.dot(x, jnp.concatenate([w, w, w], axis=1), **how)
    return fp8.dot(x, w, bias=bias, **how) + wide[..., :F]


def forgotten(x, w, *, bias, state, **how):
    """The backward pass casts x and w again."""
    bound = lambda x, w, bias, state: twice(x, w, bias=bias, state=state, **how)
    return jax.checkpoint(bound)(x, w, bias, state)


@pytest.fixture
def lowered(monkeypatch):
    """A list that gets the types of the operands and results of each kernel that is lowered."""
    from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration

    found, lower = [], registration.mpmd_map_mgpu_lowering_rule

    def spied(context, *operands, **options):
        found.append((*context.avals_in, *context.avals_out))
        return lower(context, *operands, **options)

    monkeypatch.setattr(registration, "mpmd_map_mgpu_lowering_rule", spied)
    return found


@needs_mosaic
@pytest.mark.deviceless
@pytest.mark.parametrize("transformed", ["jit", "vmap", "shard_map"])
@pytest.mark.parametrize("dot", [twice, forgotten])
def test_equal_kernels_are_lowered_once(dot, transformed, lowered):
    run = TRANSFORMED[transformed](functools.partial(step, RECIPES["blockwise"], MOSAIC, dot=dot))
    text_for("cuda", run, *arrays(), fp8.init_state(RECIPES["blockwise"]))
    # One cast of x, two of weights, two of gradients, and six matmuls.
    assert len(lowered) == len({*lowered}) == 11


@needs_mosaic
@pytest.mark.deviceless
def test_an_exported_program():
    """For each platform. jax 0.12 lowers a Pallas kernel for one platform at a time."""
    x = jnp.asarray(uneven((256, 256)), jnp.bfloat16)
    run = jax.jit(lambda x: fp8.quantize(x, fp8.E4M3, (ROWS, COLUMNS), kernels=MOSAIC))
    on_cpu = _exported(run, "cpu", x)
    assert_same_bits(on_cpu.call(x), run(x))
    assert not CALL.search(on_cpu.mlir_module())
    assert CALL.search(_exported(run, "cuda", x).mlir_module())


def _exported(run, platform, x):
    allowed = [
        export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")
    ]
    return export.export(run, platforms=[platform], disabled_checks=allowed)(x)
