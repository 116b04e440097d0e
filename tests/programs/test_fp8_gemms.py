"""Counting matmuls in program texts, each cut down to what matters."""

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8
from jaxfp8.programs._fp8_gemms import _find_gemms

FP8 = (
    "(bf16[64,64]{1,0}, s8[4194304]{0}) custom-call(%p.0, %p.1, %s.0, %s.1), "
    'custom_call_target="__cublas$lt$matmul$f8"'
)
BLOCKS = (
    "(bf16[1,64,64]{2,1,0}, u8[0]{0}) custom-call(%p.0, %p.1, %s.0, %s.1), "
    'custom_call_target="__cudnn$blockScaledDot", backend_config={"custom_fusion_config":null}'
)
BF16 = 'bf16[64,64]{1,0} custom-call(%p.0, %p.1), custom_call_target="__cublas$lt$matmul"'
TYPE = "(p.0: bf16[64,64], p.1: bf16[64,64]) -> bf16[64,64] {"


def named(name: str) -> str:
    return f', metadata={{op_name="jit(step)/{name}/dot_general" stack_frame_id=1}}'


def program(*entry: str, **computations: str) -> str:
    """A program text: the entry and the other computations, a line each."""
    blocks = [f"%{name} {TYPE}\n  ROOT %x = {line}\n}}" for name, line in computations.items()]
    lines = "\n".join(f"  %i.{n} = {line}" for n, line in enumerate(entry))
    return "HloModule jit_step, entry_computation_layout={()->bf16[64,64]}\n\n" + "\n\n".join(
        [*blocks, f"ENTRY %main.1 {TYPE}\n{lines}\n}}\n"]
    )


DOT = "bf16[64,64]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def call(op: str, attributes: str) -> str:
    return f"bf16[64,64]{{1,0}} {op}(%p.0, %p.1), {attributes}"


TABLE = {
    "a call": (program(FP8), 1, 0),
    "a block-scaled call": (program(BLOCKS), 1, 0),
    "both FP8 calls, and cuDNN's attention": (
        program(FP8, BLOCKS, BLOCKS.replace("__cudnn$blockScaledDot", "__cudnn$fmhaSoftmax")),
        2,
        0,
    ),
    "both kinds": (program(FP8, BF16, FP8), 2, 1),
    "old gemm": (program(BF16.replace("lt$matmul", "gemm")), 0, 1),
    "cpu library": (program(BF16.replace("__cublas$lt$matmul", "__onednn$matmul")), 0, 1),
    "a dot": (program(DOT), 0, 1),
    "a batched dot": (program(DOT.replace("[64,64]{1,0}", "[2,64,64]{2,1,0}")), 0, 1),
    "in a Triton fusion": (
        program(call("fusion", "kind=kCustom, calls=%gemm_fusion"), gemm_fusion=DOT),
        0,
        1,
    ),
    "in a nested fusion": (
        program(
            call("fusion", "calls=%outer"),
            inner=DOT,
            outer=call("fusion", "kind=kCustom, calls=%inner"),
        ),
        0,
        1,
    ),
    "a fusion used twice": (program(*[call("fusion", "calls=%inner")] * 2, inner=DOT), 0, 2),
    "in a command buffer": (
        program(call("call", "to_apply=%command_buffer"), command_buffer=FP8),
        1,
        0,
    ),
    "a loop body, once": (
        program(call("while", "condition=%c, body=%body"), c="pred[] p()", body=FP8),
        1,
        0,
    ),
    "async wrapper": (
        program(
            call("async-start", "calls=%wrapped"), call("async-done", "calls=%wrapped"), wrapped=FP8
        ),
        1,
        0,
    ),
    "async, sugared": (
        program(
            *(FP8.replace(" custom-call(", f" custom-call-{half}(") for half in ("start", "done"))
        ),
        1,
        0,
    ),
    "a computation that nobody calls": (program(FP8, left_over=DOT), 1, 0),
    "equal branches": (
        program(
            call("conditional", "true_computation=%cold, false_computation=%warm"),
            cold=FP8,
            warm=FP8,
        ),
        1,
        0,
    ),
    "a branch that fell back": (
        program(call("conditional", "branch_computations={%warm, %cold}"), warm=FP8, cold=DOT),
        0,
        1,
    ),
    "a branch that does nothing": (
        program(
            call("conditional", "branch_computations={%skip, %work}"),
            skip=call("copy", ""),
            work=FP8,
        ),
        1,
        0,
    ),
    "no matmul, only its name": (program("bf16[64,64]{1,0} copy(%p.0)" + named("a dot(b)")), 0, 0),
    "tiled and long types": (
        program("/*index=5*/(bf16[64,64]{1,0:T(8,128)(2,1)S(1)}, u32[]) dot(%p.0, %p.1)"),
        0,
        1,
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_count(row):
    text, in_fp8, in_high_precision = TABLE[row]
    gemms = _find_gemms(text)
    assert (len(gemms.fp8), len(gemms.high_precision)) == (in_fp8, in_high_precision)


def test_error_lists_what_stayed_in_high_precision():
    text = program(
        FP8 + named("jvp(jaxfp8.fprop)"), DOT + named("jvp(jaxfp8.dgrad)"), DOT + named("attention")
    )
    with pytest.raises(AssertionError) as error:
        fp8.programs.assert_fp8_gemms(text, 2)
    assert str(error.value).splitlines() == [
        "expected 2 FP8 matmuls, found 1.",
        "  in FP8: jit(step)/jvp(jaxfp8.fprop)/dot_general",
        "  asked for in FP8, but in high precision: jit(step)/jvp(jaxfp8.dgrad)/dot_general",
        "  in high precision: jit(step)/attention/dot_general",
    ]
    fp8.programs.assert_fp8_gemms(text, 1)


def test_error_names_the_options_when_nothing_is_in_fp8():
    with pytest.raises(AssertionError) as error:
        fp8.programs.assert_fp8_gemms(program(DOT + named("jaxfp8.fprop")), 1)
    cure = str(error.value).splitlines()[-1]
    assert 'kernels = fp8.Kernels("h200")' in cure
    assert "compiler_options=kernels.compiler_options(recipe)" in cure
    assert "Recipes with tiles also need kernels=kernels in each layer." in cure


def test_error_says_that_there_is_no_recipe():
    for expected in (None, 1):
        with pytest.raises(
            AssertionError, match="No matmul of a recipe at all: compile a step whose layers"
        ):
            fp8.programs.assert_fp8_gemms(program(DOT + named("attention")), expected)


KERNEL = call("custom-call", 'custom_call_target="mosaic_gpu_v2"')
ALL_IN_FP8 = {
    "cuBLASLt": program(FP8 + named("jvp(jaxfp8.fprop)")),
    "beside a matmul of others": program(
        FP8 + named("jvp(jaxfp8.fprop)"), DOT + named("attention")
    ),
    "beside what a recipe leaves alone": program(
        FP8 + named("jvp(jaxfp8.fprop)"), DOT + named("transpose(jvp(jaxfp8.wgrad.high_precision))")
    ),
    "a Pallas kernel": program(KERNEL + named("jvp(jaxfp8.fprop)/body")),
}
NOT_ALL = {
    "none": program(DOT + named("attention")),
    "nothing": program("bf16[64,64]{1,0} copy(%p.0)"),
    "a cast by a Pallas kernel": program(KERNEL + named("jvp()/body")),
    "one of "
    "two": program(FP8 + named("jvp(jaxfp8.fprop)"), DOT + named("transpose(jvp(jaxfp8.wgrad))")),
    "a branch that fell back": program(
        call("conditional", "branch_computations={%warm, %cold}"),
        warm=FP8 + named("jaxfp8.fprop"), cold=DOT + named("jaxfp8.fprop"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ALL_IN_FP8)
def test_every_matmul_of_a_recipe(row):
    fp8.programs.assert_fp8_gemms(ALL_IN_FP8[row])


@pytest.mark.parametrize("row", NOT_ALL)
def test_a_matmul_of_a_recipe_that_is_not_in_fp8(row):
    with pytest.raises(AssertionError, match="expected every matmul of a recipe in FP8, found "):
        fp8.programs.assert_fp8_gemms(NOT_ALL[row])


def test_names_fall_back_on_the_instruction():
    assert _find_gemms(program(FP8)).fp8 == ("i.0",)


@pytest.mark.quick
def test_compiled_for_cpu():
    recipe = fp8.recipes.current()
    compiled = (
        jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe))
        .lower(jnp.ones((32, 32)), jnp.ones((32, 32)))
        .compile()
    )
    (name,) = _find_gemms(compiled).high_precision
    assert "jaxfp8.fprop" in name
    with pytest.raises(AssertionError, match="found 0 in FP8 and 1 in high precision"):
        fp8.programs.assert_fp8_gemms(compiled)
    with pytest.raises(AssertionError, match="asked for in FP8, but in high precision: "):
        fp8.programs.assert_fp8_gemms(compiled, 1)


@pytest.mark.parametrize(
    ("bad", "error"), [(jnp.dot, TypeError), ("", ValueError), ("HloModule x", ValueError)]
)
def test_what_is_no_program_is_refused(bad, error):
    with pytest.raises(error, match=r"lower\(\.\.\.\)\.compile\(\)"):
        fp8.programs.assert_fp8_gemms(bad, 1)
