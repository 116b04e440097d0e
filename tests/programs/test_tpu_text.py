"""Programs for TPUs as XLA prints them: loops, collectives on a SparseCore, memory on the chip.

Each is cut down to what matters. `tests/tpu/` compiles such programs.
"""

import pytest

from jaxfp8.programs import wire_report
from jaxfp8.programs._memory import _buffers_of

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"
GROUPS = (
    "channel_id=1, replica_groups=mesh['fsdp'=4,'tensor'=2] {'fsdp'}, use_global_device_ids=true"
)

# A scan of a psum: programs for TPUs do not say how often a loop runs.
CARRIED = "(s32[]{:T(128)}, f32[16,32]{1,0:T(8,128)S(1)}, s32[]{:T(128)})"
SCAN = f"""%body (p: {CARRIED}) -> {CARRIED} {{
  %p = {CARRIED} parameter(0)
  %one = s32[]{{:T(128)}} constant(1)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %next = s32[]{{:T(128)}} add(%i, %one)
  %x = f32[16,32]{{1,0:T(8,128)S(1)}} get-tuple-element(%p), index=1
  %sum = f32[16,32]{{1,0:T(8,128)S(1)}} all-reduce(%x), {GROUPS}, to_apply=%add
  %same = s32[]{{:T(128)}} get-tuple-element(%p), index=2
  ROOT %t = {CARRIED} tuple(%next, %sum, %same)
}}

%condition (q: {CARRIED}) -> pred[] {{
  %q = {CARRIED} parameter(0)
  %bound = s32[]{{:T(128)}} constant(7)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%j, %bound), direction=LT
}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (y: f32[16,32]) -> f32[16,32] {{
  %y = f32[16,32]{{1,0:T(8,128)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant(0)
  %begin = s32[]{{:T(128)}} copy(%zero)
  %start = {CARRIED} tuple(%begin, %y, %zero)
  %loop = {CARRIED} while(%start), condition=%condition, body=%body
  ROOT %z = f32[16,32]{{1,0:T(8,128)S(1)}} get-tuple-element(%loop), index=1
}}
"""

# What is written in place of a line, and how often the loop then runs. None: nobody knows.
COUNTERS = {
    "as compiled": ("", "", 7),
    "begins at 3": ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[] constant(3)", 4),
    "ends before it begins": ("constant(7)", "constant(-2)", 0),
    "two at a time": ("constant(1)", "constant(2)", 4),
    "the step first": ("add(%i, %one)", "add(%one, %i)", 7),
    "counts down": ("constant(1)", "constant(-1)", None),
    "another test": ("direction=LT", "direction=NE", None),
    "a bound that is carried": ("constant(7)", "get-tuple-element(%q), index=2", None),
    "a counter that is computed": ("add(%i, %one)", "multiply(%i, %one)", None),
    "the counter of another": ("get-tuple-element(%p), index=0", "get-tuple-element(%p), index=2",
                               None),
    "the test of another": ("get-tuple-element(%q), index=0", "get-tuple-element(%q), index=2",
                            None),
    "begins at an argument": ("copy(%zero)", "copy(%y)", None),
}  # fmt: skip


@pytest.mark.parametrize("row", COUNTERS)
def test_loops(row):
    old, new, times = COUNTERS[row]
    text = HEAD + SCAN.replace(old, new)
    assert old in SCAN
    if times is None:
        with pytest.raises(ValueError, match="a loop whose length the program does not know"):
            wire_report(text)
        assert wire_report(text, trip_count=5).count == 5
    else:
        assert wire_report(text).count == times


# A collective that runs on a SparseCore. Its operands come with the update.
OFFLOADED = f"""%called (p: bf16[64,128]) -> bf16[16,128] {{
  %p = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %r = bf16[16,128]{{1,0:T(8,128)(2,1)}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}
}}, execution_thread="sparsecore"

ENTRY %main (x: bf16[64,128]) -> bf16[16,128] {{
  %x = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  %s = ((), (), (s32[1]{{0:T(128)S(2)}})) call-start(), async_execution_thread="sparsecore", \
to_apply=%called
  %h = bf16[64,128]{{1,0:T(8,128)(2,1)}} sine(%x)
  %fast = bf16[64,128]{{1,0:T(8,128)(2,1)S(1)}} cosine(%x)
  %u = ((bf16[64,128]{{1,0:T(8,128)(2,1)}}), bf16[16,128]{{1,0:T(8,128)(2,1)}}) \
call-update(%s, %h)
  %d = bf16[16,128]{{1,0:T(8,128)(2,1)}} call-done(%u)
  ROOT %e = bf16[16,128]{{1,0:T(8,128)(2,1)}} exponential(%d)
}}
"""


def test_a_collective_on_a_sparse_core_counts_once():
    (found,) = wire_report(HEAD + OFFLOADED).transfers
    assert (found.kind, found.group_size, found.bytes, found.times) == (
        "reduce-scatter", 4, 64 * 128 * 2, 1
    )  # fmt: skip


def test_its_buffers():
    """The operand lives until the end of the transfer, and arrays on the chip take no memory."""
    buffers = [(b.bytes, b.born, b.dies) for b in _buffers_of(HEAD + OFFLOADED).buffers if b.bytes]
    assert buffers == [(64 * 128 * 2, 1, 4), (16 * 128 * 2, 3, 4)]
