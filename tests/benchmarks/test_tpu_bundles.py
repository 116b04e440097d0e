"""The second clock counts bundles as often as a kernel runs them.

The texts are shortened machine code of kernels for a TPU 7x.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "programs"
SPEC = importlib.util.spec_from_file_location("tpu_bundles", FOLDER / "_tpu_bundles.py")
bundles = importlib.util.module_from_spec(SPEC)
sys.modules["tpu_bundles"] = bundles
SPEC.loader.exec_module(bundles)

# A grid of 2 x 20 blocks in a pipeline of 48 steps. Stage 4 works: in the steps from 4 to 43.
PIPELINE = """= control target key start
LB: loop body
= control target key end

     0   :  { %s0_s0 = inlined_call_operand.hbm [shape: bf16[8192,5120], index: 0] /* operand 0 */ }
   0x1   :  { %s1_s20 = smov 0 /* copy for cssa */  ;;  %s1_s5 = smov 0 }
   0x2 LB: > { %s2_s21 = sadd.s32 4294967292, %s3_s20 /* iteration index, stage = 4 */  ;;  \
%s3_s20 = sphi %s1_s20, %s27_s20 /* phi copy :: iteration index, stage = 0 */  ;;  \
%s3_s5 = sphi %s1_s5, %s9_s5 } /* Start region 2140 :: Start region 4 */
   0x3   : > { %s4_s5 = sadd.s32 1, %s3_s5 }
   0x4   : > { %p5_p0 = scmp.ge.s32.totalorder %s4_s5, 20 }
   0x5   : > { %s9_s5 = smov (%p5_p0, %s4_s5), 0 }
   0x6   : > { %p6_p2 = scmp.ge.s32.totalorder %s3_s20, 4  ;;  \
%p7_p3 = scmp.lt.s32.totalorder %s3_s20, 44 }
   0x7   : > { %p8_p5 = pnand %p6_p2, %p7_p3 }
   0x8   : > { %98 = sbr.rel (%p8_p5) target = $region20 }
   0x9   : > { %1 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s0_s0, /*size_in_granules=*/65536 /*
base_bounds: (1024, 40)
iteration_bounds: (2, 20)
element_size_in_bytes: 1024 */ }
   0xa   : > { %2 = vmatmul.mubr.bf16.gmra.mrb[4].mxu1 %v1_v2  ;;  \
%3 = vmatmul.mubr.bf16.gmra.mrb[4].mxu0 %v1_v2 }
   0xb   :  {}
   0xc   : > { %4 = vmatmul.mubr.f8e4m3fn.vlgmr.msra.gmra.mrb[0].mxu1 %v1_v2 } /* End region 19 */
   0xd PF: > { %s5_s1 = smov 0 } /* Start/End empty region 20 */
   0xe   : > { %s27_s20 = sadd.s32 1, %s3_s20 }
   0xf   : > { %p24_p5 = scmp.ge.s32.totalorder %s27_s20, 48 /* loop exit test */ }
  0x10   :  { %26 = sbr.rel (!%p24_p5) target = $region2140 }
  0x11   :  { %6 = vsyncpa [#allocation1], 1 } /* exit bundle */
"""
# Bundles: 3 outside, 12 of each step, of which 4 are skipped in 8 steps. The jump is in the loop.
WORK, ALWAYS, OUTSIDE = 4, 11, 3
EXACT = OUTSIDE + 48 * ALWAYS + 40 * WORK


def changed(*pairs):
    text = PIPELINE
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_a_pipeline():
    runs = bundles.runs_of(PIPELINE)
    assert runs.bundles == (EXACT, EXACT)
    assert runs.loops == (48,)
    assert runs.grid == (2, 20)
    assert runs.matmuls == 40 * 2  # of the unit with two


def test_matmuls_of_another_format():
    """How long they take is not known."""
    few = changed(("%4 = vmatmul.mubr.f8e4m3fn", "%4 = vmatmul.mubr.f32"))
    assert bundles.runs_of(few).matmuls == 40
    assert bundles.runs_of(few.replace("mubr.bf16", "mubr.f32")).matmuls is None
    assert bundles.runs_of(few.replace("vmatmul", "vadd")).matmuls == 0


# What is skipped, and how often the rest of the loop runs: at least and at most.
SKIPS = {
    "by an index of the grid, which starts again": (
        "%p8_p5 = pnand %p6_p2, %p7_p3", "%p8_p5 = scmp.ne.s32.totalorder %s9_s5, 0", (2, 2)),
    "never": ("%p8_p5 = pnand %p6_p2, %p7_p3", "%p8_p5 = scmp.lt.s32.totalorder %s3_s20, 0",
              (48, 48)),
    "a spilled predicate": (
        "%p8_p5 = pnand %p6_p2, %p7_p3",
        "%p9_p5 = pnand %p6_p2, %p7_p3  ;;  %s8_s8 = scalar_select /*predicate=*/%p9_p5, "
        "/*on_true=*/1, /*on_false=*/0  ;;  %10 = sst [smem:[#allocation22_spill]] %s8_s8  ;;  "
        "%s8_s9 = sld [smem:[#allocation22_spill]]  ;;  "
        "%p8_p5 = scmp.ne.s32.totalorder %s8_s9, 0", (40, 40)),
    "a negated one": ("(%p8_p5)", "(!%p8_p5)", (8, 8)),
    "by data": ("pnand %p6_p2, %p7_p3", "pnand %p6_p2, %p99_p3", (0, 44)),
    "by data alone": ("pnand %p6_p2, %p7_p3", "pmov %p99_p3", (0, 48)),
}  # fmt: skip


@pytest.mark.parametrize("row", SKIPS)
def test_what_is_skipped(row):
    old, new, (least, most) = SKIPS[row]
    found = bundles.runs_of(changed((old, new)))
    rest = OUTSIDE + 48 * ALWAYS
    assert found.bundles == (rest + least * WORK, rest + most * WORK)
    assert found.matmuls == 2 * least


LENGTHS = {
    "another bound": ("%s27_s20, 48", "%s27_s20, 7", 7),
    "another step": ("%s27_s20 = sadd.s32 1,", "%s27_s20 = sadd.s32 2,", 24),
    "another start": ("%s1_s20 = smov 0", "%s1_s20 = smov 4294967294", 50),
    "a bound that is data": ("%s27_s20, 48", "%s27_s20, %s77_s1", None),
    "a start that is data": ("%s1_s20 = smov 0", "%s1_s20 = sld [smem:[#allocation4]]", None),
}


@pytest.mark.parametrize("row", LENGTHS)
def test_lengths_of_loops(row):
    old, new, length = LENGTHS[row]
    found = bundles.runs_of(changed((old, new)))
    assert found.loops == (length,)
    assert (found.bundles is None) == (length is None) == (found.matmuls is None)


def test_a_grid_that_is_data():
    text = changed(("%s27_s20, 48", "%s27_s20, %s77_s1"), ("(2, 20)", "(2, 2147483647)"))
    found = bundles.runs_of(text, steps=10)
    # The part that is skipped is less than half of the loop, so it may never run.
    assert found.bundles == (OUTSIDE + 10 * ALWAYS, OUTSIDE + 10 * (ALWAYS + WORK))
    assert found.grid == (2, -1)
    # With more work in it, it is the work of a step.
    more = "".join(f"  0x{i:x}   : > {{ %v{i} = vadd %v1 }}\n" for i in range(100, 130))
    found = bundles.runs_of(text.replace("   0xb   :", more + "   0xb   :"), steps=10)
    assert found.bundles == (OUTSIDE + 10 * (ALWAYS + WORK + 30),) * 2
    assert found.matmuls == 20


def test_a_part_that_data_decides_runs_as_often_as_the_caller_says():
    text = changed(("pnand %p6_p2, %p7_p3", "pmov %p99_p3"))
    found = bundles.runs_of(text, parts=(7,))
    assert found.bundles == (OUTSIDE + 48 * ALWAYS + 7 * WORK,) * 2
    assert found.matmuls == 14
    # It is the only one, so two numbers have no effect. Nor has one if indices decide the part.
    assert bundles.runs_of(text, parts=(7, 7)) == bundles.runs_of(text)
    assert bundles.runs_of(PIPELINE, parts=(7,)) == bundles.runs_of(PIPELINE)


def test_a_loop_in_a_loop():
    inner = """\
  0x30   : > { %s30_s1 = smov 0 }
  0x31 LB: >> { %s31_s1 = sphi %s30_s1, %s32_s1 } /* Start region 99 */
  0x32   : >> { %s32_s1 = sadd.s32 1, %s31_s1 }
  0x33   : >> { %p33_p1 = scmp.ge.s32.totalorder %s32_s1, 5 }
  0x34   : > { %34 = sbr.rel (!%p33_p1) target = $region99 }
"""
    found = bundles.runs_of(PIPELINE.replace("   0xb   :", inner + "   0xb   :"))
    assert found.loops == (48, 5)
    assert found.bundles == (EXACT + 40 * (1 + 5 * 4),) * 2
