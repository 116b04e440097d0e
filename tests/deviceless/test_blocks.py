"""Recipes of tiles, compiled.

On Blackwell three block-scaled matmuls, on Hopper three in bfloat16, no wide temporary.

Hopper's tensor cores apply no scales of tiles, and XLA makes of its block-scaled operation a loop
of scalar code there (jax 0.12) or a bfloat16 matmul. So it is asked for only by kernels for
Blackwell. On Hopper XLA multiplies tiles in bfloat16, exactly, at the speed of bfloat16; Hopper's
own kernel is Pallas (`test_compiled_matmul.py`).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import BLACKWELL
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from program import SHAPE, Program
from targets import array, compile_for, dense_step, state_of, topology

import jaxfp8 as fp8

pytestmark = pytest.mark.deviceless

BLOCK_SCALED = "__cudnn$blockScaledDot"
RECIPES = {
    "mxfp8": fp8.recipes.mxfp8,
    "mxfp8, w 32x32": functools.partial(fp8.recipes.mxfp8, w_tile_dim=2),
    "blockwise": fp8.recipes.blockwise,
    "blockwise, hybrid": functools.partial(fp8.recipes.blockwise, gradient=fp8.E5M2),
}
on_b200 = pytest.mark.parametrize("name", ["mxfp8", "blockwise"])


def check(compiled, expected=3):
    """So many block-scaled matmuls, and no other."""
    fp8.programs.assert_fp8_gemms(compiled, expected)
    program = Program(compiled.as_text())
    assert [
        i.is_fp8_matmul for i in program.kernels(program.entry) if BLOCK_SCALED in i.attributes
    ] == [True] * expected
    assert not program.other_matmuls(program.entry)
    assert "__op$block_scaled_dot" not in compiled.as_text()
    return program


def layer(recipe, kernels=None, *, x, w, g):
    return dense_step(recipe, kernels=kernels), array(*x), array(*w), array(*g), state_of(recipe)


@functools.cache
def trained(name, chip, m, k, n):
    """A dense layer, forward and backward; the chip's own matmul where XLA has one for it."""
    kernels = BLACKWELL if chip == "b200" else None
    return compile_for(chip, *layer(RECIPES[name](), kernels, x=(m, k), w=(k, n), g=(m, n)))


SHAPES = {
    "aligned": {"x": (1024, 512), "w": (512, 256), "g": (1024, 256)},
    "ragged": {"x": (300, 272), "w": (272, 200), "g": (300, 200)},
    "one tile": {"x": (32, 32), "w": (32, 32), "g": (32, 32)},
    "batch axes": {"x": (4, 256, 512), "w": (512, 256), "g": (4, 256, 256)},
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_on_blackwell(name, shapes):
    check(compile_for("b200", *layer(RECIPES[name](), BLACKWELL, **SHAPES[shapes])))


@on_b200
@pytest.mark.parametrize(
    "axes", [(0, 0, 0, None), (0, None, 0, None)], ids=["experts", "shared weights"]
)
def test_vmap(name, axes):
    step, x, w, g, state = layer(
        RECIPES[name](), BLACKWELL, x=(4, 256, 512), w=(4, 512, 256), g=(4, 256, 256)
    )
    w = w if axes[1] == 0 else array(512, 256)
    check(compile_for("b200", jax.vmap(step, in_axes=axes), x, w, g, state))


def in_scan(dot, x, weights, state):
    return jax.lax.scan(lambda h, w: (dot(h, w, state=state), None), x, weights)[0]


def in_remat(dot, x, w, state):
    block = jax.checkpoint(
        lambda x, w: dot(jnp.tanh(x), w, state=state),
        policy=fp8.save_fp8_residuals(),
    )
    return block(x, w)


@on_b200
@pytest.mark.parametrize(
    ("within", "leading"), [(in_scan, (3,)), (in_remat, ())], ids=["scan", "remat"]
)
def test_scan_and_remat(name, within, leading):
    # A scan has a body for each pass: one matmul in the forward, two in the backward one.
    recipe = RECIPES[name]()
    dot = functools.partial(fp8.dot, recipe=recipe, kernels=BLACKWELL)
    _, x, w, g, state = layer(recipe, x=(1024, 512), w=(*leading, 512, 512), g=(1024, 512))
    check(compile_for("b200", dense_step(recipe, functools.partial(within, dot)), x, w, g, state))


# Where x [M, K], w [K, N] and g [M, N] lie; what is gathered, in FP8.
LAYOUTS = {
    "data": ((("data", "model"), None), (None, None), (("data", "model"), None), 0),
    "data and tensor": (("data", None), (None, "model"), ("data", "model"), 0),
    "tensor, contracted": (("data", "model"), ("model", None), ("data", None), 0),
    "fully sharded": (
        (("data", "model"), None),
        (("data", "model"), None),
        (("data", "model"), None),
        1,
    ),
}


def mesh(axis_type):
    devices = np.array(topology("b200", "1x1x8").devices).reshape(4, 2)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)


def compile_on(mesh, recipe, layout, shapes=((1024, 512), (512, 256), (1024, 256))):
    def on_mesh(shape, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    tensors = [
        on_mesh(shape, spec) for shape, spec in zip(shapes, LAYOUTS[layout][:3], strict=True)
    ]
    state = jax.tree.map(lambda s: on_mesh(s.shape, (None,) * s.ndim, s.dtype), state_of(recipe))
    with jax.set_mesh(mesh):
        return jax.jit(dense_step(recipe, kernels=BLACKWELL)).lower(*tensors, state).compile()


@on_b200
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_mesh(name, layout):
    program = check(compile_on(mesh(AxisType.Auto), RECIPES[name](), layout))
    gathers = [
        i for i in program.kernels(program.entry) if i.op in ("all-gather", "all-gather-start")
    ]
    operands = [
        dtype
        for i in gathers
        for dtype, shape in SHAPE.findall(i.type)
        if math.prod(map(int, shape.split(","))) >= 2**15
    ]
    assert all(dtype in ("f8e4m3fn", "u8") for dtype in operands), operands
    assert len(gathers) <= 2 * LAYOUTS[layout][3]  # values, and their scales


@on_b200
def test_tiles_are_not_split_between_devices(name):
    # Eight devices hold 12 values of w's K each, less than a tile: they are put together again.
    program = check(
        compile_on(
            mesh(AxisType.Auto),
            RECIPES[name](),
            "fully sharded",
            ((1024, 96), (96, 256), (1024, 256)),
        )
    )
    for call in program.fp8_matmuls(program.entry):
        (computation,) = [c for c in program.computations.values() if c.get(call.name) is call]
        (lhs, lhs_scale), (rhs, rhs_scale) = (
            [
                [int(n) for n in SHAPE.findall(computation[call.operands[i]].type)[0][1].split(",")]
                for i in pair
            ]
            for pair in ((0, 2), (1, 3))
        )
        # Whole tiles, and a scale for each; the call wants scales in fours.
        assert lhs[2] == rhs[2]
        assert lhs[2] % 32 == 0
        assert lhs_scale[2] == rhs_scale[2] == 4 * math.ceil(lhs[2] / 128)


@on_b200
@pytest.mark.parametrize("layout", ["data", "data and tensor"])
def test_explicit_mesh(name, layout):
    program = check(compile_on(mesh(AxisType.Explicit), RECIPES[name](), layout))
    assert not [i for i in program.kernels(program.entry) if i.op.startswith("all-gather")]


@on_b200
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(name, check_vma):
    recipe = RECIPES[name]()
    devices, rows = mesh(AxisType.Auto), P(("data", "model"))

    def local(x, w, g, state):
        value, (dx, dw), _ = dense_step(recipe, kernels=BLACKWELL)(x, w, g, state)
        value = jax.lax.psum(value, ("data", "model"))
        return value, dx, dw if check_vma else jax.lax.psum(dw, ("data", "model"))

    step = jax.shard_map(
        local,
        mesh=devices,
        in_specs=(rows, P(), rows, P()),
        out_specs=(P(), rows, P()),
        check_vma=check_vma,
    )
    tensors = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(devices, spec))
        for shape, spec in (((1024, 512), rows), ((512, 256), P()), ((1024, 256), rows))
    ]
    check(jax.jit(step).lower(*tensors, state_of(recipe)).compile())


# From here on large enough for XLA not to split a sum into parts, in float32, to fill a GPU.
M, K, N = 2048, 1024, 2048


@pytest.mark.parametrize("chip", ["h200", "b200"])
@on_b200
def test_no_float32_copy_of_an_operand(name, chip):
    program = Program(trained(name, chip, M, K, N).as_text())
    for kernel in program.kernels(program.entry):
        for dtype, shape in SHAPE.findall(kernel.type):
            size = math.prod(int(n) for n in shape.split(",") if n)
            # Nor a mask: casting in two directions made some of each operand.
            assert dtype not in ("f32", "u32", "s32", "pred") or size < min(M * K, K * N), kernel


@on_b200
def test_traffic_on_blackwell(name):
    # Of an operand in bfloat16 (2 bytes a value): two reads for amaxes and two for casts, fewer
    # where one kernel does both; of each FP8 copy one write, a transposition (2) at most, and one
    # read.
    program = Program(trained(name, "b200", M, K, N).as_text())
    operands, results = M * K + K * N + M * N, M * N + M * K + K * N
    # and y once more, for the loss
    most = (4 * 2 + 2 * (1 + 2 + 1)) * operands + 2 * results + 2 * M * N
    assert program.traffic(program.entry) <= most


@pytest.mark.parametrize("chip", ["h200", "b200"])
@on_b200
def test_memory_does_not_grow_with_the_number_of_tiles(name, chip):
    # Beyond what holds the longer operands: two copies in FP8, and where there is no block-scaled
    # matmul one in bfloat16.
    short, long = (
        trained(name, chip, M, k, N).memory_analysis().temp_size_in_bytes for k in (K, 4 * K)
    )
    copies = {"b200": 2, "h200": 2 + 2}[chip]
    assert long - short <= copies * 3 * (M * K + K * N)


@on_b200
def test_hopper_multiplies_in_bfloat16(name):
    compiled = trained(name, "h200", M, K, N)
    assert "scaled-dot" not in compiled.as_text()
    assert "block_scaled_dot" not in compiled.as_text()
    program = Program(compiled.as_text())
    found = []
    for kernel in program.kernels(program.entry):
        inside = program.inside(program.entry, kernel) if kernel.op == "fusion" else []
        if dots := [i for i in inside if i.op == "dot"]:
            assert "kind=kCustom" in kernel.attributes, kernel  # a matmul of tensor cores, no loop
            assert '"kind":"__triton' in kernel.attributes, kernel
            found += dots
        elif kernel.is_other_matmul:
            found.append(kernel)
    assert len(found) == 3
    assert all(dot.type.startswith("bf16") for dot in found)


def test_without_kernels_a_program_is_portable_on_blackwell_too():
    recipe = fp8.recipes.mxfp8()
    program = Program(compile_for("b200", *layer(recipe, x=(M, K), w=(K, N), g=(M, N))).as_text())
    assert not program.fp8_matmuls(program.entry)
    assert len(program.other_matmuls(program.entry)) == 3
