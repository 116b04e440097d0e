"""Counting matmuls in program texts, each cut down to what matters."""

from types import SimpleNamespace

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


# TPUs. A matmul is a convolution in a fusion. XLA has a kernel for `jax.lax.ragged_dot`.


class OnTPU(jax.stages.Compiled):
    """A text, as if jax had compiled it for TPUs of these kinds."""

    def __init__(self, text, *kinds):
        self.text, self.kinds = text, kinds

    def as_text(self):
        return self.text

    @property
    def input_shardings(self):
        return (None,), {}  # an argument that the program does not read

    @property
    def output_shardings(self):
        return [SimpleNamespace(device_set=[SimpleNamespace(device_kind=k)]) for k in self.kinds]


TPU_TEXT = """HloModule jit_step, is_scheduled=true

%fused (p.0: LHS[64,64], p.1: RHS[64,64]) -> f32[64,64] {
  %p.0 = LHS[64,64]{1,0:T(32,128)(4,1)S(1)} parameter(0)
  %p.1 = RHS[64,64]{1,0:T(32,128)(4,1)} parameter(1)
  %copy.1 = LHS[64,64]{1,0:T(8,128)(4,1)} copy(%p.0)
  %by = f32[64,64]{1,0:T(8,128)} convolution(%copy.1, %p.1), dim_labels=bf_io->bf, METADATA
  ROOT %exp = f32[64,64]{1,0:T(8,128)} exponential(%by)
}

ENTRY %main (x: LHS[64,64], w: RHS[64,64], n: s32[8]) -> f32[64,64] {
  %x = LHS[64,64]{1,0:T(32,128)(4,1)} parameter(0)
  %w = RHS[64,64]{1,0:T(32,128)(4,1)} parameter(1)
  %n = s32[8]{0:T(128)S(1)} parameter(2)
  ROOT %by = f32[64,64]{1,0:T(8,128)} CALL
}
"""
FUSED = "fusion(%x, %w), kind=kOutput, calls=%fused"
KERNEL_ON_TPU = 'custom-call(%n, %x, %w), custom_call_target="tpu_custom_call", METADATA'
TILING = 'frontend_attributes={ragged_dot_tiling="64,64,64"}, METADATA'
RAGGED_DOT = KERNEL_ON_TPU.replace("METADATA", TILING)


def tpu_text(lhs, rhs, call=FUSED, name="jaxfp8.fprop/dot_general"):
    text = TPU_TEXT.replace("CALL", call).replace("LHS", lhs).replace("RHS", rhs)
    return text.replace("METADATA", f'metadata={{op_name="jit(step)/{name}"}}')


E4M3, E5M2, BFLOAT16 = "f8e4m3fn", "f8e5m2", "bf16"
ON_TPUS = {
    "E4M3": ("TPU7x", tpu_text(E4M3, E4M3), True),
    "a gradient": ("TPU7x", tpu_text(E5M2, E4M3), True),
    "one operand": ("TPU7x", tpu_text(BFLOAT16, E4M3), False),
    "bfloat16": ("TPU7x", tpu_text(BFLOAT16, BFLOAT16), False),
    "another FP8": ("TPU7x", tpu_text("f8e4m3b11fnuz", "f8e4m3b11fnuz"), False),
    "E4M3 on v6e": ("TPU v6 lite", tpu_text(E4M3, E4M3), False),
    "a gradient on v5p": ("TPU v5", tpu_text(E5M2, E4M3), False),
    "E5M2 on v5e": ("TPU v5 lite", tpu_text(E5M2, E5M2), True),
    "ragged_dot": ("TPU7x", tpu_text(E4M3, E4M3, RAGGED_DOT), True),
    "ragged_dot in bfloat16": ("TPU7x", tpu_text(BFLOAT16, BFLOAT16, RAGGED_DOT), False),
    "a kernel that multiplies": ("TPU7x", tpu_text(E4M3, E4M3, KERNEL_ON_TPU), True),
}


@pytest.mark.parametrize("row", ON_TPUS)
def test_on_tpus(row):
    kind, text, in_fp8 = ON_TPUS[row]
    gemms = _find_gemms(OnTPU(text, kind))
    assert (len(gemms.fp8), len(gemms.high_precision)) == (in_fp8, not in_fp8)
    if not in_fp8:
        cure = "Use delayed" if kind == "TPU7x" else "No change of your code helps"
        with pytest.raises(AssertionError, match=rf"asked for in FP8(.|\n)*{cure}"):
            fp8.programs.assert_fp8_gemms(OnTPU(text, kind))


@pytest.mark.parametrize(
    "text",
    [
        tpu_text(E4M3, E4M3, name="Conv/conv_general_dilated"),
        tpu_text(E4M3, E4M3, KERNEL_ON_TPU, "attention/pallas_call"),
    ],
)
def test_on_a_tpu_what_is_no_matmul_of_a_recipe_counts_nowhere(text):
    assert _find_gemms(OnTPU(text, "TPU7x")) == ((), ())


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        (tpu_text(E4M3, E4M3), "does not say which TPU(.*)instead of its text"),
        (OnTPU(tpu_text(E4M3, E4M3), "TPU v4"), "a program for TPU v4(.*)It knows TPU7x, TPU v6"),
        (OnTPU(tpu_text(E4M3, E4M3), "TPU7x", "cpu"), "a program for TPU7x and cpu"),
    ],
)
def test_a_tpu_that_is_not_known(compiled, words):
    with pytest.raises(ValueError, match=words):
        fp8.programs.assert_fp8_gemms(compiled)


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
