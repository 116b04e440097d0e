"""Each matmul of a trained layer becomes one FP8 call of cuBLASLt, on Hopper and Blackwell.

Nothing else multiplies.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from program import Program
from targets import array, compile_for, dense_step, program_for, state_of

import jaxfp8 as fp8

pytestmark = pytest.mark.deviceless

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "static": fp8.recipes.static(x_scale=0.1, w_scale=0.3, g_scale=0.7),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, wgrad in high precision": fp8.recipes.rowwise(high_precision_wgrad=True),
}
M, K, N = 512, 256, 128


@functools.cache
def trained(name: str, chip: str, settled: bool = True) -> Program:
    recipe = RECIPES[name]
    state = state_of(recipe, settled=settled)
    arguments = array(M, K), array(K, N), array(M, N), state
    return program_for(
        chip, dense_step(recipe), *arguments, options=fp8.Kernels(chip).compiler_options(recipe)
    )


@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize("name", RECIPES)
def test_matmuls(name, chip):
    program, recipe = trained(name, chip), RECIPES[name]
    assert "conditional" not in {i.op for c in program.computations.values() for i in c.values()}
    assert len(program.fp8_matmuls(program.entry)) == recipe.fp8_matmuls
    assert len(program.other_matmuls(program.entry)) == 3 - recipe.fp8_matmuls


@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize("name", RECIPES)
def test_scales_are_float32_scalars(name, chip):
    for program in (trained(name, chip), trained(name, chip, settled=False)):
        entry = program.computations[program.entry]
        for call in program.fp8_matmuls(program.entry):
            assert [entry[scale].type for scale in call.operands[2:4]] == ["f32[]", "f32[]"]


def test_scales_are_not_rounded_to_bfloat16():
    program = trained("static", "h200")
    scales = {
        program.source(program.entry, s).literal
        for c in program.fp8_matmuls(program.entry)
        for s in c.operands[2:4]
    }
    assert scales == {"0.1", "0.3", "0.7"}
    # A stored scale goes from the state to the call through no bfloat16 at all.
    program = trained("delayed", "h200")
    for call in program.fp8_matmuls(program.entry):
        for scale in call.operands[2:4]:
            source = program.source(program.entry, scale)
            assert not any(i.type == "bf16[]" for i in program.inside(program.entry, source))


EXACT = '"HIGHEST","HIGHEST"'


def precisions(program: Program, part: str) -> dict[str, str]:
    """What each matmul asks of cuBLASLt, which accumulates fast for DEFAULT only."""
    found = {}
    for call in program.fp8_matmuls(part):
        matmul = re.search(r"jaxfp8\.(\w+)", call.attributes)[1]
        found[matmul] = re.search(r'"operand_precision":\[([^\]]*)\]', call.attributes)[1]
    return found


@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_precision(chip):
    for name in ("delayed", "current", "static", "rowwise"):
        program = trained(name, chip)
        assert precisions(program, program.entry) == {
            "fprop": '"DEFAULT","DEFAULT"',
            "dgrad": EXACT,
            "wgrad": EXACT,
        }


@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_precision_that_is_asked_for(precision, chip):
    recipe = RECIPES["static"]

    def dot(x, w, state):
        return fp8.dot(x, w, recipe=recipe, state=state, precision=precision)

    arguments = array(M, K), array(K, N), array(M, N), ()
    program = program_for(
        chip,
        dense_step(recipe, dot),
        *arguments,
        options=fp8.Kernels(chip).compiler_options(recipe),
    )
    assert set(precisions(program, program.entry).values()) == {EXACT}


def test_float32():
    recipe = RECIPES["delayed"]
    arguments = [array(*shape, dtype=jnp.float32) for shape in ((M, K), (K, N), (M, N))]
    program = program_for(
        "h200",
        dense_step(recipe),
        *arguments,
        state_of(recipe),
        options=fp8.Kernels("h200").compiler_options(recipe),
    )
    calls = program.fp8_matmuls(program.entry)
    assert sorted(call.type.split("{")[0] for call in calls) == sorted(
        f"(f32[{a},{b}]" for a, b in ((M, N), (M, K), (K, N))
    )
    assert not program.other_matmuls(program.entry)


def general(recipe, contract):
    return lambda x, w, state: fp8.dot_general(
        x, w, ((contract, tuple(range(len(contract)))), ((), ())), recipe=recipe, state=state
    )


def experts(recipe, contract):
    del contract
    return jax.vmap(lambda x, w, state: fp8.dot(x, w, recipe=recipe, state=state))


def layers(recipe, contract):
    del contract

    def dot(x, w, state):
        return jax.lax.scan(
            lambda x, layer: (fp8.dot(x, layer[0], recipe=recipe, state=layer[1]), None),
            x,
            (w, state),
        )[0]

    return dot


# Of each case: how it multiplies, the contracted axes of x, the shapes of x, w and y, leading axes
# of the state.
SHAPES = {
    "activations [B,S,D]": (general, (2,), (4, 128, 256), (256, 512), (4, 128, 512), ()),
    "heads, w [D,H,Dh]": (general, (2,), (4, 128, 256), (256, 4, 64), (4, 128, 4, 64), ()),
    "out projection, w [H,Dh,D]": (
        general,
        (2, 3),
        (4, 128, 4, 64),
        (4, 64, 256),
        (4, 128, 256),
        (),
    ),
    "experts": (experts, (), (4, 128, 256), (4, 256, 512), (4, 128, 512), (4,)),
    "layers in a scan": (layers, (), (512, 256), (4, 256, 256), (512, 256), (4,)),
}


@pytest.mark.parametrize(
    ("case", "name"), [*((case, "delayed") for case in SHAPES), ("experts", "current")]
)
def test_shapes(case, name):
    recipe = RECIPES[name]
    dot, contract, x, w, y, stacked = SHAPES[case]
    step = dense_step(recipe, dot(recipe, contract))
    state = state_of(recipe, *stacked) if recipe.rows else ()
    compiled = compile_for(
        "h200",
        step,
        array(*x),
        array(*w),
        array(*y),
        state,
        options=fp8.Kernels("h200").compiler_options(recipe),
    )
    fp8.programs.assert_fp8_gemms(compiled, 3)
    program = Program(compiled.as_text())
    assert len(program.fp8_matmuls(program.entry)) == 3
    assert not program.other_matmuls(program.entry)


def test_without_the_options_the_assertion_says_so():
    recipe = RECIPES["static"]
    compiled = compile_for("h200", dense_step(recipe), array(M, K), array(K, N), array(M, N), ())
    with pytest.raises(AssertionError) as error:
        fp8.programs.assert_fp8_gemms(compiled, 3)
    message = str(error.value)
    for matmul in ("fprop", "dgrad", "wgrad"):
        assert re.search(rf"asked for in FP8, but in high precision: .*jaxfp8\.{matmul}", message)
    assert "compiler_options=kernels.compiler_options(recipe)" in message
