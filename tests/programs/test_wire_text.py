"""Collectives as programs print them."""

import pytest
from wire_text import ADD, G4, GATHER, IDLE, REDUCE, S, X, Y, call, gather, loop, program, transfer

from jaxfp8.programs import Transfer, wire_report

GROUPS = {
    "listed": ("{{0,2,4,6},{1,3,5,7}}", 4),
    "listed, unequal": ("{{0,1},{2,3,4,5,6,7}}", 6),
    "listed, alone": ("{{0},{1},{2}}", 1),
    "everyone": ("{}", 8),
    "iota": ("[4,2]<=[8]", 2),
    "iota, transposed": ("[2,4]<=[4,2]T(1,0)", 4),
    "iota, three axes": ("[1,8]<=[2,2,2]T(2,0,1)", 8),
    "mesh": ("mesh['fsdp'=4,'tensor'=2] {'fsdp'}", 4),
    "mesh, other axis": ("mesh['fsdp'=4,'tensor'=2] {'tensor'}", 2),
    "mesh, two axes": ("mesh['a b'=2,'c'=2,'d'=2] {'a b','d'}", 4),
    "mesh, part of an axis": ("mesh['a'=8] {'a':(2)4}", 4),
    "mesh, parts of axes": ("mesh['a'=4,'b'=8] {'a':(1)2,'b':(4)2}", 4),
    "mesh, devices in another order": ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", 2),
    "mesh, listed devices": ("mesh['a'=4,'b'=2], device_ids=(0,2,1,3,4,6,5,7) {'a'}", 4),
    "mesh, no axis": ("mesh['a'=8] {}", 1),
}


@pytest.mark.parametrize("row", GROUPS)
def test_groups(row):
    groups, size = GROUPS[row]
    (found,) = wire_report(program(gather(groups))).transfers
    assert found == Transfer("all-gather", *X[:2], size, X[2], 1, "jit(f)/all_gather")
    assert found.wire_bytes == 512 * (size - 1)


PERMUTE = "%p = f8e4m3fn[16,32]{{1,0}} {}(%x), channel_id=1, source_target_pairs={}"
SEND = (
    "%d = (f8e4m3fn[16,32]{1,0}, u32[], token[]) send(%x, %t), channel_id=1, "
    'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
)
REPLICAS = "HloModule pmapped, replica_count=4, num_partitions=2"
STRINGS = (
    'metadata={op_name="all-gather(x) calls=%main.1"}, backend_config="body=%main.1 \\" calls=%z"'
)

ONE_GATHER = [transfer("all-gather", X, 4)], 1536
# entry and computations, expected transfers, wire bytes
TABLE = {
    "all-reduce": (program(REDUCE, **ADD), [transfer("all-reduce", S, 4)], 6),
    "odd groups": (
        program(REDUCE.replace("{{0,2,4,6},{1,3,5,7}}", "[2,3]<=[6]"), **ADD),
        [transfer("all-reduce", S, 3)],
        16 / 3,
    ),
    "reduce-scatter": (
        program(
            f"%r = bf16[4,32]{{1,0}} reduce-scatter(%y), {G4}, dimensions={{0}}, to_apply=%add",
            **ADD,
        ),
        [transfer("reduce-scatter", Y, 4)],
        768,
    ),
    "all-to-all": (
        program(
            "%a = f8e4m3fn[16,32]{1,0} all-to-all(%x), channel_id=1, replica_groups=[2,4]<=[8], "
            "dimensions={0}"
        ),
        [transfer("all-to-all", X, 4)],
        384,
    ),
    "all-to-all of pieces": (
        program(
            "%a = (f8e4m3fn[16,32]{1,0}, f8e4m3fn[16,32]{1,0}) all-to-all(%x, %x), channel_id=1, "
            "replica_groups={{0,1},{2,3}}"
        ),
        [transfer("all-to-all", ("float8_e4m3fn", (2, 16, 32), 1024), 2)],
        512,
    ),
    "ragged all-to-all, of which only the rows travel": (
        program(
            "%a-start = ((bf16[16,32]{1,0}, s64[8]{0}), bf16[16,32]{1,0}) "
            "ragged-all-to-all-start(%y, %y, %i, %i, %i, /*index=5*/%i), channel_id=1, "
            "replica_groups={{0,2,4,6},{1,3,5,7}}",
            "%a-done = bf16[16,32]{1,0} ragged-all-to-all-done(%a-start)",
        ),
        [transfer("ragged-all-to-all", Y, 4)],
        1024,
    ),
    "broadcast": (
        program(
            "%b = bf16[16,32]{1,0} collective-broadcast(%y), channel_id=1, replica_groups={{0,1,2}}"
        ),
        [transfer("collective-broadcast", Y, 3)],
        1024,
    ),
    "ring": (
        program(
            PERMUTE.format(
                "collective-permute", "{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"
            )
        ),
        [transfer("collective-permute", X, 4)],
        512,
    ),
    "line, its pairs in any order": (
        program(PERMUTE.format("collective-permute-start", "{{0,1},{2,3},{5,6},{1,2}}")),
        [transfer("collective-permute", X, 4)],
        512,
    ),
    "to itself": (
        program(PERMUTE.format("collective-permute", "{{0,0},{1,1}}")),
        [transfer("collective-permute", X, 1)],
        0,
    ),
    "to nobody": (
        program(PERMUTE.format("collective-permute", "{}")),
        [transfer("collective-permute", X, 1)],
        0,
    ),
    "send": (
        program(
            SEND,
            "%v = (bf16[4]{0}, u32[], token[]) recv(%t), channel_id=1",
            "%e = token[] send-done(%d)",
        ),
        [transfer("send", X, 3)],
        512,
    ),
    "send to the host": (program(SEND + ", is_host_transfer=true"), [], 0),
    "combined, two dtypes": (
        program(
            f"%g = (f8e4m3fn[64,32]{{1,0}}, f32[4]{{0}}) all-gather(%x, /*index=1*/%s), {G4}, "
            f"dimensions={{0}}"
        ),
        [transfer("all-gather", X, 4), transfer("all-gather", S, 4)],
        3 * 516,
    ),
    "combined, asynchronous": (
        program(
            f"%g = ((bf16[16,32]{{1,0}}, f8e4m3fn[16,32]{{1,0}}), (bf16[64,32]{{1,0}}, "
            f"f8e4m3fn[64,32]{{1,0}})) all-gather-start(%y, %x), {G4}, dimensions={{0}}",
            "ROOT %d = (bf16[64,32]{1,0}, f8e4m3fn[64,32]{1,0}) all-gather-done(%g)",
        ),
        [transfer("all-gather", Y, 4), transfer("all-gather", X, 4)],
        3 * 1536,
    ),
    "async wrapper": (
        program(
            call("async-start", "calls=%wrapped", "a"),
            call("async-update", "calls=%wrapped", "u"),
            call("async-done", "calls=%wrapped", "d"),
            wrapped=GATHER,
        ),
        *ONE_GATHER,
    ),
    "call, started": (
        program(
            call("call-start", "to_apply=%inner"),
            call("call-done", "to_apply=%inner", "d"),
            inner=GATHER,
        ),
        *ONE_GATHER,
    ),
    "call": (
        program(call("call", "to_apply=%command_buffer"), command_buffer=GATHER),
        *ONE_GATHER,
    ),
    "fusion in a fusion": (
        program(
            call("fusion", "kind=kCustom, calls=%outer"),
            inner=GATHER,
            outer=call("fusion", "kind=kLoop, calls=%inner"),
        ),
        *ONE_GATHER,
    ),
    "custom call": (
        program(
            call("custom-call", 'custom_call_target="x", called_computations={%inner, %add}'),
            inner=GATHER,
            **ADD,
        ),
        *ONE_GATHER,
    ),
    "called twice": (
        program(
            call("call", "to_apply=%inner"), call("call", "to_apply=%inner", "d"), inner=GATHER
        ),
        [transfer("all-gather", X, 4)] * 2,
        3072,
    ),
    "a computation that nobody calls": (
        program(GATHER, left_over=GATHER),
        *ONE_GATHER,
    ),
    "loop": (program(loop(5), body=GATHER, **IDLE), [transfer("all-gather", X, 4, 5)], 5 * 1536),
    "loop in a loop": (
        program(loop(5), body=[loop(3, "inner"), REDUCE], inner=GATHER, **IDLE, **ADD),
        [transfer("all-gather", X, 4, 15), transfer("all-reduce", S, 4, 5)],
        15 * 1536 + 30,
    ),
    "loop that never runs": (program(loop(0), body=GATHER, **IDLE), [], 0),
    "condition": (
        program(loop(5, "idle", "asks"), idle=[], asks=REDUCE, **ADD),
        [transfer("all-reduce", S, 4, 6)],
        36,
    ),
    "loop of unknown length, with nothing": (program(loop(None, "cond"), **IDLE), [], 0),
    "branches, by index": (
        program(
            call("conditional", "branch_computations={%a, %b, %c}"),
            a=REDUCE,
            b=GATHER,
            c=REDUCE,
            **ADD,
        ),
        *ONE_GATHER,
    ),
    "branches, by truth": (
        program(
            call("conditional", "true_computation=%a, false_computation=%b"),
            a=REDUCE,
            b=GATHER,
            **ADD,
        ),
        *ONE_GATHER,
    ),
    "dearer for its loop": (
        program(
            call("conditional", "branch_computations={%a, %b}"),
            a=loop(500),
            body=REDUCE,
            b=GATHER,
            **IDLE,
            **ADD,
        ),
        [transfer("all-reduce", S, 4, 500)],
        3000,
    ),
    "only the name of one": (
        program(f"%n = f32[] copy(%s), {STRINGS}"),
        [],
        0,
    ),
    "operands with types": (
        program(GATHER.replace("(%x)", "(f8e4m3fn[16,32]{1,0:T(8,128)(4,1)} %x)")),
        *ONE_GATHER,
    ),
    "without percent signs": (
        program(
            call("call", "to_apply=%f"), f=REDUCE.replace("(%s)", "(%s, /*index=1*/%y)"), **ADD
        ).replace("%", ""),
        [transfer("all-reduce", S, 4), transfer("all-reduce", Y, 4)],
        6 + 1536,
    ),
    "replicas": (
        program(
            "%g = f32[4]{0} all-gather(%s), replica_groups={}, dimensions={0}", header=REPLICAS
        ),
        [transfer("all-gather", S, 4)],
        12,
    ),
    "partitions": (
        program(
            "%a = bf16[16,32]{1,0} all-to-all(%y), channel_id=1, replica_groups={}, dimensions={0}",
            header=REPLICAS,
        ),
        [transfer("all-to-all", Y, 2)],
        512,
    ),
    "replicas, each with its partitions": (
        program(
            "%g = f32[4] all-gather(%s), channel_id=1, replica_groups={{0,1},{2,3}}, "
            "dimensions={0}",
            header=REPLICAS,
        ),
        [transfer("all-gather", S, 4)],
        12,
    ),
    "everyone, replicas with their partitions": (
        program(
            "%g = f32[4]{0} all-gather(%s), channel_id=1, replica_groups={}, dimensions={0}",
            header=REPLICAS,
        ),
        [transfer("all-gather", S, 8)],
        28,
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_transfers(row):
    text, expected, wire_bytes = TABLE[row]
    report = wire_report(text)
    assert [tuple(t[:6]) for t in report.transfers] == expected
    assert report.wire_bytes == wire_bytes


ERRORS = {
    "a loop of unknown length": (
        program(loop(None), body=GATHER, **IDLE),
        ValueError,
        r"all-gather is in a loop .*: w\. Pass",
    ),
    "its condition": (
        program(loop(None, "idle", "asks"), idle=[], asks=REDUCE, **ADD),
        ValueError,
        "all-reduce is in a loop",
    ),
    "groups in another print": (
        program(gather("@mesh<a=8> {a}")),
        ValueError,
        "cannot read which devices g joins",
    ),
    "no groups": (
        program("%g = f32[] all-reduce(%s), to_apply=%add", **ADD),
        ValueError,
        "cannot read which devices g",
    ),
    "no pairs": (
        program("%p = f32[] collective-permute(%s)"),
        ValueError,
        "cannot read which devices p joins",
    ),
    "no such computation": (
        program(call("call", "to_apply=%gone")),
        ValueError,
        "computation gone that it does not hold",
    ),
    "no such operand": (
        program(gather("{}", "gone")),
        ValueError,
        "g reads gone, which the text does not hold",
    ),
    "in place": (
        program(
            "%p = bf16[16,32]{1,0} collective-permute(%y, %y, %i, %i), "
            "source_target_pairs={{0,1}}, slice_sizes={{1,32}}"
        ),
        NotImplementedError,
        "p is an in-place collective-permute",
    ),
    "no opcode": (program("%p = bf16[16,32]{1,0}"), ValueError, "cannot read the instruction p"),
}


@pytest.mark.parametrize("row", ERRORS)
def test_errors(row):
    text, error, complaint = ERRORS[row]
    with pytest.raises(error, match=complaint):
        wire_report(text)
