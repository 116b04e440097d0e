"""`assert_wire_dtype`: the check of the dtypes that collectives send."""

from typing import Any

import jax

from jaxfp8._typing import DType, PyTree
from jaxfp8.numerics._formats import Format
from jaxfp8.programs._hlo import read_program
from jaxfp8.programs._traffic import Traffic
from jaxfp8.programs._transfer import CollectiveKind, Transfer
from jaxfp8.programs._wire_report import WireReport, name_of


def assert_wire_dtype(
    compiled: Any,
    kind: CollectiveKind,
    *dtypes: DType | Format,
    at_least: int = 0,
    kept: PyTree = (),
) -> None:
    """Raise AssertionError unless all collectives of a kind send these dtypes and no other.

    If XLA gathers weights before they are quantized, the gather sends bfloat16, twice the bytes of
    FP8. The results are the same, so no other test shows it.

    All branches of conditionals are checked, and all loops. A program without such a collective
    raises an error, because it may be compiled for one device.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`. Compile for the
        chip that will run it: programs for CPUs widen values before they send them, see
        `wire_report`.
      kind: the kind of collective, for instance "all-gather".
      dtypes: the dtypes that must be sent. No other dtype may be sent.
      at_least: the least number of bytes of an operand on one device. Smaller operands are ignored,
        for instance amaxes and scales. Good is the size of the smallest shard of an FP8 weight: its
        values divided by the devices that split it.
      kept: a tree of the arrays that stay in high precision, as the step gets them, for instance
        the embeddings and the head. They need their shardings, and may be
        `jax.ShapeDtypeStruct`s. Another dtype is ignored if the operand has the shape of one of
        their shards, in any order of axes. So is a weight with an equal shard. A loop gathers one
        layer of a stack: give the `jax.ShapeDtypeStruct` of one.

    Raises:
      AssertionError: with every tensor that is sent in another dtype, or with the dtypes in which
        no tensor is sent.
      TypeError, ValueError: see `wire_report`. Also if `kind` is unknown, if `dtypes` is empty, or
        if `kept` holds anything but arrays with shardings.

    Example:
      >>> import jax.numpy as jnp
      >>> program = '''ENTRY %main (x: bf16[64]) -> bf16[256] {
      ...   %x = bf16[64]{0} parameter(0)
      ...   ROOT %y = bf16[256]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
      ... }'''
      >>> assert_wire_dtype(program, "all-gather", jnp.bfloat16)
      >>> assert_wire_dtype(program, "all-gather", jnp.float8_e4m3fn)
      Traceback (most recent call last):
      AssertionError: all-gather carries another dtype than float8_e4m3fn:
        bfloat16[64], 128 bytes, among 4 devices: y
      Name a weight in w_shard=, so that it is gathered in FP8.
      Ignore scales by at_least=, and arrays in high precision by kept=.
    """
    if not dtypes:
        raise ValueError(f"dtypes is empty; name what {kind} has to carry, fp8.E4M3 for instance.")
    program = read_program(compiled)
    # Only dtypes matter here, so any count above 0 will do. A count of 0 would remove transfers.
    everything = WireReport(Traffic(program, trip_count=1, every_branch=True).of(program.entry))
    transfers = [t for t in everything.only(kind=kind, at_least=at_least).transfers if t.wire_bytes]
    expected, ignored = [name_of(dtype) for dtype in dtypes], _shards(kept)
    if others := [
        t for t in transfers if t.dtype not in expected and tuple(sorted(t.shape)) not in ignored
    ]:
        lines = [f"{kind} carries another dtype than {' or '.join(expected)}:", *map(_line, others)]
        if kind == "all-gather":
            lines.append("Name a weight in w_shard=, so that it is gathered in FP8.")
        lines.append("Ignore scales by at_least=, and arrays in high precision by kept=.")
        raise AssertionError("\n".join(lines))
    if missing := [name for name in expected if name not in {t.dtype for t in transfers}]:
        small = f" of at least {at_least} bytes" if at_least else ""
        raise AssertionError(
            f"no {kind}{small} carries {' or '.join(missing)}; the program sends\n{everything}"
        )


def _shards(kept: PyTree) -> set[tuple[int, ...]]:
    """The shapes of the shards of arrays, sorted, because XLA may transpose before it sends."""
    shapes = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(kept):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.Sharding):
            raise TypeError(
                f"kept{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, which has no "
                "sharding. Pass the arrays that the step gets, for instance "
                "kept=(params['embed'], params['head'])."
            )
        shapes.add(tuple(sorted(sharding.shard_shape(leaf.shape))))
    return shapes


def _line(transfer: Transfer) -> str:
    shape = ",".join(map(str, transfer.shape))
    return (
        f"  {transfer.dtype}[{shape}], {transfer.bytes:,} bytes, among {transfer.group_size} "
        f"devices: {transfer.label}"
    )
