"""Experts on TPUs: kernels multiply FP8 on a TPU 7x, or a loop does.

One kernel is in Pallas, for scales of tensors. The other is XLA's own for `jax.lax.ragged_dot`, for
scales of rows. XLA prints both as a `tpu_custom_call`, whose operands have the dtypes that the
matrix unit reads. It prints no `estimated_cycles` for them, as for no custom call.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_targets import array, compile_for, topology

import jaxfp8 as fp8

pytestmark = pytest.mark.tpu

T, K, N, E = 512, 256, 128, 4
E4M3, E5M2 = "f8e4m3fn", "f8e5m2"


def kernels_for(gradients):
    """The kernels of one layer, for gradients in this format."""
    wgrad, fprop = ("jaxfp8.wgrad", (E4M3, gradients)), ("jaxfp8.fprop", (E4M3, E4M3))
    return [("jaxfp8.dgrad", (gradients, E4M3)), fprop, wgrad]


def kernels_of(text):
    """(scope, dtypes of both operands) of each call of a kernel."""
    found = []
    for line in text.splitlines():
        named = re.search(r"ragged-dot-none|grouped_(rows|sums)", line.partition("=")[0])
        if " custom-call(" not in line or not named:
            continue
        types = line.partition("operand_layout_constraints=")[2].partition(", metadata=")[0]
        scope = re.search(r'op_name="[^"]*?(jaxfp8\.\w+)', line)
        found.append((scope and scope[1], tuple(re.findall(r"(f8\w*|bf16)\[", types))))
    return sorted(found)


def loops(text):
    return text.count(" while(")


def other_matmuls(text):
    return len(re.findall(r" (?:convolution|dot)\(", text))


def test_all_matmuls_of_a_step_are_in_fp8():
    def step(x, w, sizes):
        how = {"recipe": fp8.recipes.current(), "kernels": fp8.Kernels("tpu7x")}
        loss = lambda x, w: jnp.sum(fp8.ragged_dot(x, w, sizes, **how).astype(jnp.float32))
        return jax.grad(loss, (0, 1))(x, w)

    shapes = array(T, K), array(E, K, N), array(E, dtype=jnp.int32)
    fp8.programs.assert_fp8_gemms(compile_for("tpu7x", step, *shapes), 2)  # dgrad and wgrad


RAGGED = "ragged-dot-none"


def step_of(recipe):
    def step(x, w, g, sizes):
        how = {"recipe": recipe, "kernels": fp8.Kernels("tpu7x")}
        y, backward = jax.vjp(lambda x, w: fp8.ragged_dot(x, w, sizes, **how), x, w)
        return y, backward(g)

    return step


def arguments(tokens, k, n, experts):
    return (array(tokens, k), array(experts, k, n), array(tokens, n),
            array(experts, dtype=jnp.int32))  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        (4096, 7168, 2048, 8),
        (2048, 4096, 14336, 4),
        (300, 200, 72, 3),
        pytest.param((8, 128, 128, 4), marks=pytest.mark.slow),
        pytest.param((65536, 2048, 768, 128), marks=pytest.mark.slow),
        pytest.param((2048, 32768, 4096, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_are_read_where_they_are(shape):
    """Blocks fit into VMEM, and no row is gathered, scattered or copied."""
    compiled = compile_for("tpu7x", step_of(fp8.recipes.current()), *arguments(*shape))
    text = compiled.as_text()
    assert kernels_of(text) == kernels_for(E5M2)
    assert RAGGED not in text
    fp8.programs.assert_fp8_gemms(compiled, 3)
    tokens, *features, _ = shape
    if any(size % 128 for size in features):
        return  # they are padded
    assert not re.search(rf"\[{tokens},\S* (gather|scatter|copy|transpose)\(", text)


def test_features_that_do_not_fit_into_vmem_are_for_ragged_dot():
    text = compile_for(
        "tpu7x", step_of(fp8.recipes.current()), *arguments(512, 128, 131072, 2)
    ).as_text()
    assert RAGGED in text
    assert kernels_of(text) == kernels_for(E5M2)


@pytest.mark.parametrize("states", [1, E])
def test_a_cast_and_its_amax_are_one_fusion(states):
    """A settled step of `delayed()` reads each tensor once, and moves no row."""
    recipe = fp8.recipes.delayed()

    def init(index):
        return fp8.init_state(recipe)

    state = jax.eval_shape(lambda: init(0) if states == 1 else jax.vmap(init)(jnp.arange(states)))

    def step(x, w, g, sizes, state):
        def loss(arrays, state):
            how = {"recipe": recipe, "state": state, "kernels": fp8.Kernels("tpu7x")}
            y = fp8.ragged_dot(*arrays, sizes, **how)
            return jnp.vdot(y, g), y

        return fp8.value_and_grad(loss, has_aux=True)((x, w), state)

    compiled = compile_for("tpu7x", step, *arguments(4096, 1024, 512, E), fp8.settle(state))
    fp8.programs.assert_fp8_gemms(compiled, 3)
    report = fp8.programs.tpu_cycles(compiled)
    assert not report.only("amax").rows
    assert len(report.only("cast").rows) == 3
    assert not [row for row in report.unknown if row.kind in ("sparsecore", "loop")]


def test_no_rows():
    compile_for("tpu7x", step_of(fp8.recipes.current()), *arguments(0, K, N, E))


def test_with_64_bits():
    with jax.enable_x64(True):
        compiled = compile_for("tpu7x", step_of(fp8.recipes.current()), *arguments(T, K, N, E))
    fp8.programs.assert_fp8_gemms(compiled, 3)


def test_scales_of_tiles_are_multiplied_in_a_loop():
    def forward(x, w, sizes):
        how = {"recipe": fp8.recipes.blockwise(), "kernels": fp8.Kernels("tpu7x")}
        return fp8.ragged_dot(x, w, sizes, **how)

    shapes = array(T, K), array(E, K, N), array(E, dtype=jnp.int32)
    text = compile_for("tpu7x", forward, *shapes).as_text()
    assert not kernels_of(text)
    assert loops(text) == other_matmuls(text) == 1


def test_other_tpus_would_widen_the_operands_before_the_kernel():
    """So `ragged_dot` is for a TPU 7x alone: E4M3 is copied to wider arrays first."""
    x, w = (array(*shape, dtype=jnp.float8_e4m3fn) for shape in ((T, K), (E, K, N)))
    run = functools.partial(lax.ragged_dot, preferred_element_type=jnp.float32)
    read = {
        chip: kernels_of(compile_for(chip, run, x, w, array(E, dtype=jnp.int32)).as_text())
        for chip in ("tpu7x", "v6e", "v5p", "v5e")
    }
    assert read.pop("tpu7x") == [(None, (E4M3, E4M3))]
    for chip, ((_, dtypes),) in read.items():
        assert E4M3 not in dtypes, chip


def test_a_higher_precision_of_jax_does_not_reach_the_kernel():
    # XLA's kernel does not compile for FP8 operands at that precision.
    def step(x, w, sizes):
        how = {"recipe": fp8.recipes.current(), "kernels": fp8.Kernels("tpu7x")}
        y, backward = jax.vjp(lambda x, w: fp8.ragged_dot(x, w, sizes, **how), x, w)
        return backward(y)

    with jax.default_matmul_precision("highest"):
        compiled = compile_for(
            "tpu7x", step, array(T, K), array(E, K, N), array(E, dtype=jnp.int32)
        )
    fp8.programs.assert_fp8_gemms(compiled, 3)


def test_under_vmap_scan_and_remat():
    recipe, kernels = fp8.recipes.rowwise(), fp8.Kernels("tpu7x")

    def network(x, w, sizes):
        @jax.checkpoint
        def layer(x, w):
            return fp8.ragged_dot(x, w, sizes, recipe=recipe, kernels=kernels), None

        return jnp.sum(lax.scan(layer, x, w)[0].astype(jnp.float32))

    def run(x, w, sizes):
        return jax.vmap(jax.grad(network, (0, 1)))(x, w, sizes)

    shapes = array(2, T, N), array(2, 3, E, N, N), array(2, E, dtype=jnp.int32)
    found = kernels_of(compile_for("tpu7x", run, *shapes).as_text())
    assert set(found) == set(kernels_for(E4M3))


def experts_on_eight_cores(recipe):
    """Tokens go to experts that are split over the cores of a host, forward and backward."""
    mesh = Mesh(np.array(topology("tpu7x").devices), ("expert",), (AxisType.Auto,))
    split, experts = P("expert"), 2 * mesh.size

    @jax.shard_map(in_specs=(split, split, P(), split), out_specs=(split, (split, split), P()))
    def on_device(x, w, state, chosen):
        way = fp8.moe.route(chosen, experts=experts, axis="expert", capacity_factor=1.25)

        def loss(arrays, state):
            how = {"recipe": recipe, "state": state, "kernels": fp8.Kernels("tpu7x")}
            y = fp8.moe.dispatch_matmul(*arrays, way, **how)
            return jnp.vdot(y, y)

        total, gradients, state = fp8.value_and_grad(loss)((x, w), state)
        return total[None], gradients, state

    def put(*shape, dtype=jnp.bfloat16, spec=split):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    tokens = 256 * mesh.size
    state = jax.eval_shape(lambda: fp8.init_state(recipe))
    state = jax.tree.map(lambda s: put(*s.shape, dtype=s.dtype, spec=P()), state)
    chosen = put(tokens, 2, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(on_device).lower(put(tokens, K), put(experts, K, N), state, chosen)
        return lowered.compile().as_text()


@pytest.mark.slow
def test_experts_on_eight_cores():
    text = experts_on_eight_cores(fp8.recipes.delayed())
    assert kernels_of(text) == kernels_for(E5M2)
    assert not loops(text)
    assert not other_matmuls(text)
    assert "f64[" not in text
    rows = set(re.findall(r"= (\w+)\[8,80,256\]\S* all-to-all\(", text))
    assert rows == {"u8", "bf16"}  # tokens in FP8, and the others as they are
