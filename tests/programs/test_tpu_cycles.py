"""`tpu_cycles` on programs that XLA wrote for a TPU 7x, each cut down to what matters.

`tests/tpu/` compiles such programs.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxfp8.programs import CyclesReport, tpu_cycles

X, SCALAR = "bf16[512,512]{1,0:T(8,128)(2,1)}", "s32[]{:T(128)}"
UNKNOWN = 2**63 - 1


def estimate(cycles):
    return (
        ', backend_config={"flag_configs":[],"window_config":{"kernel_window_bounds":[],'
        f'"estimated_cycles":"{cycles}","iteration_bounds":["1","1"]}},"scoped_memory_configs":[]}}'
    )


def op(name):
    return f', metadata={{op_name="jit(f)/{name}" stack_frame_id=4}}'


def fusion(name, called, cycles, type=X, operands="%x"):
    return f"%{name} = {type} fusion({operands}), kind=kLoop, calls=%{called}{op(name)}" + (
        "" if cycles is None else estimate(cycles)
    )


def program(*entry, **computations):
    """A program text: the lines of the entry and those of other computations."""
    blocks = [
        f"{head} (a: bf16[512,512]) -> bf16[512,512] {{\n"
        f"  %x = {X} parameter(0){op('x')}\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
        for head, lines in (
            *((f"%{name}", lines) for name, lines in computations.items()),
            ("ENTRY %main", entry),
        )
    ]
    return "\n".join(["HloModule jit_f, is_scheduled=true\n", *blocks])


# What fusions have inside.

MAXIMUM = {
    "max": [
        "%a = bf16[]{:T(256)} parameter(1)",
        "ROOT %m = bf16[]{:T(256)} maximum(%a, %a)",
    ]
}
BITCAST = {"bitcast": [f"ROOT %b = {X} bitcast(%x)"]}
MATMUL = {
    "matmul": [
        f"%l = {X} fusion(%x), kind=kLoop, calls=%bitcast",
        f"%c = {X} convolution(%l, %x), dim_labels=bf_io->bf{op('attention/dot_general')}",
        f"ROOT %t = {X} tanh(%c){op('tanh')}",
    ],
    **BITCAST,
}
F8, U8 = "f8e4m3fn[512,512]{1,0:T(32,128)(4,1)}", "u8[512,512]{1,0:T(32,128)(4,1)}"
E8M0 = "f8e8m0fnu[512,16]{1,0:T(32,128)(4,1)}"
AMAX = (
    f"%a = {X} abs(%x)",
    f"%s = {X} select(%x, %a, %x)",
    "%r = bf16[]{:T(256)} reduce(%s, %x), dimensions={0,1}, to_apply=%max",
)
CAST = f"%q = {F8} convert(%x)"

# The lines of a fused computation, and its kind.
KINDS = {
    "a cast": ([f"ROOT {CAST}"], "cast"),
    "a cast with an amax": ([*AMAX, CAST, f"ROOT %t = ({F8}, bf16[]) tuple(%q, %r)"], "cast"),
    "a cast that is transposed": ([CAST, f"ROOT %t = {F8} transpose(%q), dimensions={{1,0}}"],
                                  "cast"),
    "a cast in a fusion": ([f"ROOT %t = {F8} fusion(%x), kind=kLoop, calls=%inner"], "cast"),
    "a cast that is copied by a fusion": (
        [CAST, f"ROOT %t = {F8} fusion(%q), kind=kLoop, calls=%inner_copy"], "cast"),
    "a byte of integers": (
        [f"%b = {U8} convert(%x)", f"ROOT %q = {F8} bitcast-convert(%b)"], "cast"),
    "bytes of a cast": ([CAST, f"ROOT %b = {U8} bitcast-convert(%q)"], "cast"),
    "integers of one byte": ([f"ROOT %b = {U8} convert(%x)"], "rest"),
    "a copy of FP8": ([f"%p = {F8} parameter(1)", f"ROOT %t = {F8} copy(%p)"], "rest"),
    "FP8 that a gather made": ([f"%p = {U8} parameter(1)", f"ROOT %t = {F8} bitcast-convert(%p)"],
                               "rest"),
    "FP8 that becomes another": (
        [f"%p = {F8} parameter(1)", f"ROOT %t = {F8.replace('e4m3fn', 'e5m2')} convert(%p)"],
        "rest"),
    "FP8 that is read": ([CAST, f"ROOT %t = {X} convert(%q)"], "rest"),
    "scales": ([f"ROOT %t = {E8M0} convert(%x)"], "rest"),
    "an amax": ([*AMAX[:2], "ROOT " + AMAX[2]], "amax"),
    "an amax in a tuple": ([*AMAX, f"ROOT %t = (bf16[], {X}) tuple(%r, %s)"], "amax"),
    "an amax of an inner fusion": (
        [f"%a = {X} fusion(%x), kind=kLoop, calls=%inner_abs",
         "ROOT %r = bf16[]{:T(256)} reduce(%a, %x), dimensions={0,1}, to_apply=%max"], "amax"),
    "a maximum": (["ROOT " + AMAX[2].replace("%s", "%x")], "rest"),
    "a sum of absolute values": ([AMAX[0], AMAX[1], "ROOT " + AMAX[2].replace("%max", "%sum")],
                                 "rest"),
    "a matmul that writes FP8": (
        [f"%c = {X} convolution(%x, %x), dim_labels=bf_io->bf", f"ROOT %q = {F8} convert(%c)"],
        "matmul"),
    "a gather": ([f"ROOT %g = {X} all-gather(%x), replica_groups={{}}"], "collective"),
}  # fmt: skip
INNER = {
    "inner": [f"ROOT {CAST}"],
    "inner_copy": [f"%p = {F8} parameter(1)", f"ROOT %t = {F8} copy(%p)"],
    "inner_abs": [f"ROOT %a = {X} abs(%x)"],
    "sum": ["ROOT %m = bf16[]{:T(256)} add(%x, %x)"],
    **MAXIMUM,
}


@pytest.mark.parametrize("row", KINDS)
def test_kinds_of_fusions(row):
    lines, kind = KINDS[row]
    text = program(fusion("f", "fused", 700), fused=lines, **INNER)
    (found,) = tpu_cycles(text).rows
    assert (found.kind, found.cycles, found.times) == (kind, 700, 1)


def test_instructions_that_are_not_fused():
    text = program(
        f"%c = {X} copy(%x)" + estimate(10),
        f"%q = {F8} convert(%x)" + estimate(20),
        f"%d = {F8.replace('e4m3fn', 'e5m2')} convert(%q)" + estimate(30),
        f"%m = {X} convolution(%x, %x), dim_labels=bf_io->bf" + estimate(40),
    )
    assert tpu_cycles(text).by_kind == {
        "matmul": 40, "cast": 20, "amax": 0, "collective": 0, "rest": 40
    }  # fmt: skip


# What runs, and how often.


def loop(name, body, condition="less", carried="carried"):
    return f"%{name} = ({SCALAR}, {X}) while(%{carried}), condition=%{condition}, body=%{body}" + (
        op(name)
    )


START = (f"%zero = {SCALAR} constant(0)", f"%carried = ({SCALAR}, {X}) tuple(%zero, %x)")
STEP = (
    f"%p = ({SCALAR}, {X}) parameter(0)",
    f"%one = {SCALAR} constant(1)",
    f"%i = {SCALAR} get-tuple-element(%p), index=0",
    f"%next = {SCALAR} add(%i, %one)",
)


def body(*lines):
    return [*STEP, *lines, f"ROOT %t = ({SCALAR}, {X}) tuple(%next, %x)"]


def bound(n, *more):
    return [
        *more, f"%p = ({SCALAR}, {X}) parameter(0)", f"%bound = {SCALAR} constant({n})",
        f"%i = {SCALAR} get-tuple-element(%p), index=0",
        "ROOT %l = pred[]{:T(512)} compare(%i, %bound), direction=LT",
    ]  # fmt: skip


WORK = fusion("work", "matmul", 100)
ONCE = program(*START, loop("w", "body"), body=body(WORK), less=bound(6), **MATMUL)
NESTED = program(
    *START, loop("w", "outer"), fusion("after", "bitcast", 7),
    outer=body(fusion("between", "bitcast", 3), *START, loop("v", "body", "five")),
    body=body(WORK), less=bound(6), five=bound(5), **MATMUL,
)  # fmt: skip
SLICED = program(  # the condition has work of its own, as that of `lax.while_loop`
    *START, loop("w", "body"), body=body(WORK), **MATMUL,
    less=bound(6, "%s = bf16[1,1]{1,0:T(2,128)(2,1)} slice(%x)" + estimate(10)),
)  # fmt: skip
UNKNOWN_LENGTH = ONCE.replace("constant(6)", "get-tuple-element(%p), index=0")
BRANCHES = (
    f"%n = {SCALAR} constant(0)",
    (f"%y = {X} conditional(%n, %x, %x), branch_computations={{%cheap, %dear}}{op('cond')}"),
)
CHEAP, DEAR = fusion("add", "bitcast", 50), fusion("work", "matmul", 100)
COND = program(*BRANCHES, cheap=[CHEAP], dear=[DEAR, CHEAP], **MATMUL)
CALLED = program(
    f"%s = (({X}), {X}, u32[]{{:S(2)}}) async-start(%x), calls=%wrapped",
    f"%d = {X} async-done(%s)",
    f"%c = {X} call(%x), to_apply=%wrapped",
    wrapped=[WORK],
    **MATMUL,
)

# A program, its cycles, those of matmuls, and the names of what has no estimate.
RUNS = {
    "no loop": (program(WORK, **MATMUL), 100, 100, []),
    "a loop": (ONCE, 600, 600, []),
    "a loop that never runs": (ONCE.replace("constant(6)", "constant(0)"), 0, 0, []),
    "a loop in a loop": (NESTED, 6 * (5 * 100 + 3) + 7, 3000, []),
    "a condition that works": (SLICED, 6 * 100 + 7 * 10, 600, []),
    "a loop of unknown length": (UNKNOWN_LENGTH, 100, 100, ["w"]),
    "a conditional": (COND, 150, 100, []),
    "a conditional in a loop": (
        program(*START, loop("w", "body"), body=body(*BRANCHES), less=bound(4), cheap=[CHEAP],
                dear=[DEAR], **MATMUL), 400, 400, []),
    "another branch has something unknown": (
        program(*BRANCHES, cheap=[fusion("gather", "bitcast", None)], dear=[DEAR], **MATMUL),
        100, 100, ["gather"]),
    "called twice": (CALLED, 200, 200, []),
    "a call with an estimate": (CALLED.replace("to_apply=%wrapped", "to_apply=%wrapped"
                                               + estimate(140)), 240, 240, []),
}  # fmt: skip


@pytest.mark.parametrize("row", RUNS)
def test_what_runs(row):
    text, total, matmuls, unknown = RUNS[row]
    report = tpu_cycles(text)
    assert (report.total, report.by_kind["matmul"]) == (total, matmuls)
    assert [found.name for found in report.unknown] == unknown


def test_a_row_of_a_loop_in_a_loop():
    rows = {row.name: row for row in tpu_cycles(NESTED).rows}
    assert {name: (row.cycles, row.times) for name, row in rows.items()} == {
        "work": (100, 30), "between": (3, 6), "after": (7, 1)
    }  # fmt: skip
    # The name is that of the matmul, so that those of attention can be told from others.
    assert rows["work"].op_name == "jit(f)/attention/dot_general"
    assert rows["after"].op_name == "jit(f)/after"


def test_what_never_runs_has_no_row():
    text = program(*START, loop("w", "body"), body=body(WORK, KERNEL), less=bound(0), **MATMUL)
    assert tpu_cycles(text) == CyclesReport(())


def test_an_instruction_that_is_called_twice_is_one_row():
    (row,) = tpu_cycles(CALLED).rows
    assert (row.times, row.total) == (2, 200)


# What has no estimate.

KERNEL = f'%k = {X} custom-call(%x), custom_call_target="tpu_custom_call"{op("ragged-dot-none")}'
OFFLOAD = (
    f'%s = (({X}), {X}, u32[]{{:S(8)}}) call-start(%x), async_execution_thread="sparsecore", '
    f"to_apply=%called{op('scatter-add')}"
)
DONE = f"%d = {X} call-done(%s){op('scatter-add')}"
PERMUTE = (
    f"%p = ({X}, {X}, u32[]{{:S(2)}}) collective-permute-start(%x), channel_id=3, "
    "source_target_pairs={{0,1},{1,0}}"
)

# The lines of a program, and the kinds of what is unknown.
WITHOUT = {
    "a Pallas kernel": ([KERNEL], ["kernel"]),
    "a SparseCore": ([OFFLOAD, DONE], ["sparsecore"]),
    "a collective of a SparseCore": ([OFFLOAD.replace("%called", "%sends"), DONE], ["collective"]),
    "a collective": ([PERMUTE, f"%q = {X} collective-permute-done(%p)"], ["collective"]),
    "a collective of one number": (
        ["%n = f32[]{:T(128)} constant(0)", "%r = f32[]{:T(128)} all-reduce(%n), to_apply=%max"],
        ["collective"],
    ),
    "XLA does not know": ([fusion("f", "bitcast", UNKNOWN)], ["rest"]),
    "10**12": ([fusion("f", "bitcast", 10**12)], ["rest"]),
    "less than that": ([fusion("f", "bitcast", 10**12 - 1)], []),
    "a gather": ([fusion("f", "bitcast", None)], ["rest"]),
    "a matmul": ([fusion("f", "matmul", None)], ["matmul"]),
    "a fusion of numbers": ([fusion("f", "bitcast", None, SCALAR, "%n")], ["rest"]),
    "a kernel of numbers": ([KERNEL.replace(X, SCALAR).replace("%x", "")], ["kernel"]),
    "a copy": (["%c = bf16[512,512]{1,0:T(16,128)(2,1)S(1)} copy(%x)"], ["rest"]),
    "a reduction to one number": (
        ["%n = bf16[]{:T(256)} reduce(%x, %x), dimensions={0,1}, to_apply=%max"], ["rest"]
    ),
    "no work": (
        [f"%b = {X} bitcast(%x)", f"%t = ({X}) tuple(%b)", f"%g = {X} get-tuple-element(%t), "
         "index=0", f"%c = {X} constant({{...}})", "%i = u32[]{:T(128)S(6)} partition-id()",
         f'%a = {X} custom-call(), custom_call_target="AllocateBuffer"',
         f'%d = {X} custom-call(%b, %c), custom_call_target="ConcatBitcast"'], []),
    "numbers": (
        ["%n = f32[]{:T(128)} constant(3)", "%m = f32[]{:T(128)S(6)} multiply(%n, %n)",
         "%c = f32[1]{0:T(128)} copy(%m)"], []),
}  # fmt: skip


@pytest.mark.parametrize("row", WITHOUT)
def test_what_has_no_estimate(row):
    lines, kinds = WITHOUT[row]
    parts = {
        "called": [fusion("g", "bitcast", UNKNOWN)],
        "sends": [f"%r = {X} all-reduce(%x), to_apply=%max"],
        **MATMUL,
        **MAXIMUM,
    }
    report = tpu_cycles(program(*lines, **parts))
    assert [found.kind for found in report.unknown] == kinds
    assert [found.cycles for found in report.unknown] == [None] * len(kinds)


def test_what_has_no_estimate_in_a_loop():
    text = program(*START, loop("w", "body"), body=body(KERNEL), less=bound(6), **MATMUL)
    (row,) = tpu_cycles(text).unknown
    assert (row.name, row.times, row.op_name) == ("k", 6, "jit(f)/ragged-dot-none")


def test_copies_beside_other_instructions():
    text = program(
        f"%s = ({X}, {X}, u32[]{{:S(2)}}) copy-start(%x)", f"%d = {X} copy-done(%s)", WORK,
        f"%v = (({X}), {X}, s32[]{{:S(2)}}) slice-start(%x), slice={{[0:256], [0:512]}}", **MATMUL,
    )  # fmt: skip
    report = tpu_cycles(text)
    assert (report.total, report.unknown) == (100, ())
    assert [(row.name, row.times) for row in report.copies] == [("s", 1), ("v", 1)]


def test_the_table():
    text = program(*START, loop("w", "body"), KERNEL, body=body(WORK), less=bound(6), **MATMUL)
    assert str(tpu_cycles(text)).splitlines() == [
        "kind    instructions  runs  cycles  share",
        "matmul             1     6     600   1.00",
        "total              1     6     600   1.00",
        "Too low, because these have no estimate:",
        "kind    runs  name  operation",
        "kernel     1  k     jit(f)/ragged-dot-none",
    ]
    assert str(tpu_cycles(program())).splitlines()[-1].split() == ["total", "0", "0", "0", "–"]


def test_only_one_kind():
    text = program(fusion("f", "bitcast", 5), fusion("g", "bitcast", None), WORK, **MATMUL)
    report = tpu_cycles(text)
    assert (report.only("rest").total, report.only("matmul").total) == (5, 100)
    assert [len(report.only(kind).unknown) for kind in ("rest", "matmul")] == [1, 0]
    with pytest.raises(ValueError, match="kind='gemm' is unknown; use 'matmul', "):
        report.only("gemm")


def test_not_a_program_for_a_tpu():
    on_cpu = jax.jit(jnp.sin).lower(jnp.ones(8)).compile()
    for each in (on_cpu, on_cpu.as_text()):
        with pytest.raises(ValueError, match=r"not a program for a TPU.*topology_name="):
            tpu_cycles(each)
    with pytest.raises(TypeError, match="compiled is of type Lowered"):
        tpu_cycles(jax.jit(jnp.sin).lower(1.0))
    with pytest.raises(ValueError, match="0 ENTRY"):
        tpu_cycles("")
    with pytest.raises(ValueError, match="calls a computation body that it does not hold"):
        tpu_cycles(ONCE.replace("%body (", "%other ("))


def test_many_paths_to_one_operand():
    """Without memory a reader of 40 steps, each of which reads its operand twice, would not end."""
    u8 = "u8[512]{0:T(512)}"
    body = [f"  %v0 = {u8} parameter(0)"]
    for i in range(40):
        root = "ROOT " if i == 39 else ""
        body += [
            f"  %a{i} = {u8} multiply(%v{i}, %v{i})",
            f"  {root}%v{i + 1} = {u8} add(%a{i}, %v{i})",
        ]
    estimate = 'backend_config={"estimated_cycles":"5"}'
    lines = [
        "%f (v0: u8[512]) -> u8[512] {", *body, "}",
        "ENTRY %main (x: u8[512]) -> u8[512] {", f"  %x = {u8} parameter(0)",
        f"  ROOT %y = {u8} fusion(%x), kind=kLoop, calls=%f, {estimate}", "}",
    ]  # fmt: skip
    assert tpu_cycles("\n".join(lines)).by_kind["rest"] == 5
