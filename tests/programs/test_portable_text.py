"""GPU programs, written by hand: fusions, loops, branches, asynchronous instructions, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8.programs.on_cpu._run import run_on_cpu

FUSED_ADD = """%add (a: f32[4], b: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  ROOT %sum = f32[4]{0} add(%a, %b)
}
"""


def program(*lines, before="", head=""):
    entry = "\n  ".join(["ENTRY %main (x: f32[4]) -> f32[4] {", *lines])
    return f"HloModule m, is_scheduled=true{head}\n\n{before}\n{entry}\n}}\n"


X = jnp.arange(4.0)
PARAMETER = '%x = f32[4]{0} parameter(0), sharding={replicated}, metadata={op_name="x"}'


def run(*lines, **text):
    (y,) = run_on_cpu(program(PARAMETER, *lines, **text), X)
    return y.tolist()


@pytest.mark.parametrize("kind", ["kLoop", "kInput", "kCustom"])
def test_fusions_and_those_inside(kind):
    inner = (
        FUSED_ADD
        + """%outer (c: f32[4]) -> f32[4] {
  %c = f32[4]{0} parameter(0)
  %twice = f32[4]{0} fusion(%c, %c), kind=kLoop, calls=%add
  ROOT %less = f32[4]{0} subtract(%twice, %c)
}
"""
    )
    config = 'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
    line = f"ROOT %y = f32[4]{{0}} fusion(%x), kind={kind}, calls=%outer, {config}"
    assert run(line, before=inner) == [0, 1, 2, 3]


def test_without_a_root_the_last_instruction_is_the_result():
    assert run("%y = f32[4]{0} add(%x, %x)", "%z = f32[4]{0} add(%y, %x)") == [0, 3, 6, 9]


ASYNCHRONOUS = {
    "copy": (
        "%s = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%x)",
        "%d = f32[4]{0} copy-done(%s)",
        "ROOT %y = f32[4]{0} add(%d, %d)",
    ),
    "fusion": (
        "%s = ((f32[4]{0}, f32[4]{0}), f32[4]{0}, s32[]) fusion-start(%x, %x), kind=kLoop, "
        "calls=%add",
        "ROOT %y = f32[4]{0} fusion-done(%s)",
    ),
    "call": (
        "%s = ((f32[4]{0}, f32[4]{0}), f32[4]{0}, s32[]) call-start(%x, %x), to_apply=%add",
        "ROOT %y = f32[4]{0} call-done(%s)",
    ),
    "wrapper": (
        "%s = ((f32[4]{0}, f32[4]{0}), f32[4]{0}) async-start(%x, %x), "
        'async_execution_thread="main", calls=%add',
        "%u = ((f32[4]{0}, f32[4]{0}), f32[4]{0}) async-update(%s)",
        "ROOT %y = f32[4]{0} async-done(%u)",
    ),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_instructions(name):
    assert run(*ASYNCHRONOUS[name], before=FUSED_ADD) == [0, 2, 4, 6]


LOOP = """%body (c: (s32[], f32[2,2])) -> (s32[], f32[2,2]) {
  %c = (s32[], f32[2,2]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %x = f32[2,2]{1,0} get-tuple-element(%c), index=1
  %low = f8e4m3fn[2,2]{0,1} convert(%x)
  %y = f32[2,2]{1,0} dot(%low, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="squared"}
  ROOT %t = (s32[], f32[2,2]{1,0}) tuple(%next, %y)
}
%condition (c: (s32[], f32[2,2])) -> pred[] {
  %c = (s32[], f32[2,2]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%n, %three), direction=LT
}
%chosen (c: (f32[2,2])) -> f32[2,2] {
  %c = (f32[2,2]{1,0}) parameter(0)
  %x = f32[2,2]{1,0} get-tuple-element(%c), index=0
  %zero = s32[] constant(0)
  %t = (s32[], f32[2,2]{1,0}) tuple(%zero, %x)
  %w = (s32[], f32[2,2]{1,0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %y = f32[2,2]{1,0} get-tuple-element(%w), index=1
}
%other (c: (f32[2,2])) -> f32[2,2] {
  %c = (f32[2,2]{1,0}) parameter(0)
  ROOT %x = f32[2,2]{1,0} get-tuple-element(%c), index=0
}
"""
BRANCHES = {
    "pred": "true_computation=%chosen, false_computation=%other",
    "s32": "branch_computations={%other, %chosen}",
}


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("taken", [True, False])
def test_taps_in_loops_and_branches(kind, taken):
    text = f"""HloModule m
{LOOP}
ENTRY %main (p: {kind}[], x: f32[2,2]) -> f32[2,2] {{
  %p = {kind}[] parameter(0)
  %x = f32[2,2]{{1,0}} parameter(1)
  %t = (f32[2,2]{{1,0}}) tuple(%x)
  ROOT %y = f32[2,2]{{1,0}} conditional(%p, %t, %t), {BRANCHES[kind]}
}}
"""
    x = jnp.array([[1.0, 2.0], [3.1, 0.5]])
    seen = []
    (y,) = run_on_cpu(
        text,
        jnp.array(taken, bool if kind == "pred" else jnp.int32),
        x,
        seen=lambda *a: seen.append(a),
    )
    wanted = np.asarray(x)
    for label, lhs, rhs, *scales in seen:
        assert (label, scales) == ("squared", [None, None])
        assert lhs.dtype == jnp.float8_e4m3fn
        assert lhs.tolist() == wanted.astype(jnp.float8_e4m3fn).tolist()
        np.testing.assert_allclose(rhs, wanted, rtol=1e-6)
        wanted = lhs.astype(np.float32) @ wanted
    assert len(seen) == 3 * taken
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("type", "dtype"),
    [("bf16", jnp.bfloat16), ("f16", jnp.float16), ("f8e4m3fn", jnp.float8_e4m3fn)],
)
def test_no_conversion_is_folded(type, dtype):
    lines = (
        "%c = f32[] constant(0.333333343)",
        "%b = f32[4]{0} broadcast(%c), dimensions={}",
        "%third = f32[4]{0} multiply(%x, %b)",
        f"%low = {type}[4]{{0}} convert(%third)",
        "%high = f32[4]{0} convert(%low)",
        "ROOT %y = f32[4]{0} multiply(%high, %b)",
    )
    third = np.float32(1 / 3)
    wanted = (np.asarray(X) * third).astype(dtype).astype(np.float32) * third
    assert run(*lines) == wanted.tolist()


def test_matmuls_round_once():
    # 256 + 1 is no bfloat16: a sum in bfloat16 stays at 256.
    x = jnp.concatenate([jnp.full(1, 256), jnp.ones(255)]).astype(jnp.bfloat16)
    text = """HloModule m
ENTRY %e {
  %x = bf16[256]{0} parameter(0)
  %one = bf16[] constant(1)
  %ones = bf16[256]{0} broadcast(%one), dimensions={}
  ROOT %y = bf16[] dot(%x, %ones), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}"""
    assert float(run_on_cpu(text, x)[0]) == 512  # 511, rounded


ROUNDED = {"dot_bf16_bf16_f32": 7, "dot_tf32_tf32_f32": 10, "dot_bf16_bf16_f32_x3": 23}


@pytest.mark.parametrize("algorithm", ROUNDED)
def test_algorithms_round_their_operands(algorithm):
    how = f"algorithm={algorithm}"
    text = f"""HloModule m
ENTRY %e {{
  %x = f32[1]{{0}} parameter(0)
  ROOT %y = f32[] dot(%x, %x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, {how}
}}"""
    x = jnp.full(1, 1 / 3)
    rounded = jax.lax.reduce_precision(x, 8, ROUNDED[algorithm])
    assert float(run_on_cpu(text, x)[0]) == float((rounded * rounded)[0])


def test_result_in_another_layout():
    lines = "%x = f32[2,3]{0,1} parameter(0)", "ROOT %y = f32[2,3]{0,1} negate(%x)"
    x = jnp.arange(6.0).reshape(2, 3)
    layout = ", entry_computation_layout={(f32[2,3]{0,1})->f32[2,3]{0,1}}"
    assert run_on_cpu(program(*lines, head=layout), x)[0].tolist() == (-x).tolist()


REFUSED = {
    "custom call": (
        'ROOT %y = f32[4]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2"',
        "calls mosaic_gpu_v2",
    ),
    "opcode": (
        "ROOT %y = f32[4]{0} rng-get-and-update-state(), delta=1",
        "opcode rng-get-and-update-state",
    ),
    "collective": ("ROOT %y = f32[4]{0} all-gather(%x), dimensions={0}", "opcode all-gather"),
    "constant": ("ROOT %y = f32[4]{0} constant({...})", "leaves out the value of the constant y"),
    "sparse": (
        "ROOT %y = f32[] dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}, "
        "sparsity=L.0@2:4",
        "sparse operands",
    ),
    "no config": (
        'ROOT %y = f32[4]{0} custom-call(%x, %x), custom_call_target="__cublas$gemm"',
        "no gemm_backend_config",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    line, complaint = REFUSED[name]
    with pytest.raises(ValueError, match=complaint):
        run(line)


def test_an_asynchronous_collective_is_refused():
    lines = (
        "%s = (f32[4]{0}, f32[4]{0}) all-reduce-start(%x), to_apply=%r",
        "ROOT %y = f32[4]{0} all-reduce-done(%s)",
    )
    with pytest.raises(ValueError, match="opcode all-reduce"):
        run(*lines, before="%r {\n  %a = f32[] parameter(0)\n  ROOT %b = f32[] add(%a, %a)\n}\n")


@pytest.mark.parametrize("head", [", num_partitions=8", ", replica_count=2"])
def test_several_devices_are_refused(head):
    with pytest.raises(ValueError, match="only programs for one device"):
        run("ROOT %y = f32[4]{0} copy(%x)", head=head)
