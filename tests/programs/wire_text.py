"""Texts of programs on eight devices, each cut down to what matters."""

EIGHT = "HloModule jit_step, is_scheduled=true, num_partitions=8"
PARAMETERS = """\
  %x = f8e4m3fn[16,32]{1,0} parameter(0)
  %y = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(1)
  %s = f32[] parameter(2)
  %i = s64[8]{0} parameter(3)
  %t = token[] after-all()
"""
G4 = "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true"
X, Y, S = ("float8_e4m3fn", (16, 32), 512), ("bfloat16", (16, 32), 1024), ("float32", (), 4)


def program(*entry, header=EIGHT, **computations):
    """A program text: the lines of the entry and those of other computations."""

    def block(head, lines):
        return (
            f"{head} (x: f8e4m3fn[16,32]) -> f32[] {{\n{PARAMETERS}"
            + "\n".join(f"  {r}" for r in lines)
            + "\n}\n"
        )

    blocks = [
        block(f"%{name}", [lines] if isinstance(lines, str) else lines)
        for name, lines in computations.items()
    ]
    return "\n".join([header, "", *blocks, block("ENTRY %main.1", entry)])


def transfer(kind, tensor, size, times=1):
    dtype, shape, bytes = tensor
    return (kind, dtype, shape, size, bytes, times)


def gather(groups, operand="x", name="g"):
    return (
        f"%{name} = bf16[64,32]{{1,0}} all-gather(%{operand}), channel_id=1, "
        f"replica_groups={groups}, dimensions={{0}}, "
        'use_global_device_ids=true, metadata={op_name="jit(f)/all_gather"}'
    )


GATHER = gather("{{0,2,4,6},{1,3,5,7}}")
REDUCE = f"%r = f32[] all-reduce(%s), {G4}, to_apply=%add"
ADD = {"add": "%sum = f32[] add(%s, %s)"}


def call(op, attributes, name="c"):
    return f"ROOT %{name} = (f32[], /*index=5*/bf16[16,32]{{1,0:S(5)}}) {op}(%x), {attributes}"


def loop(n, body="body", condition="cond"):
    known = (
        ""
        if n is None
        else ', backend_config={"known_init_step":{"step":"1"},'
        f'"known_trip_count":{{"n":"{n}"}}}}'
    )
    return call("while", f"condition=%{condition}, body=%{body}{known}", name="w")


IDLE = {"cond": "%p = pred[] constant(true)"}
