"""`wire_report` and `assert_wire_dtype`: what devices send in a compiled program."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._check import check_one_of
from jaxfp8._table import align
from jaxfp8._typing import DType, PyTree
from jaxfp8.numerics._formats import Format
from jaxfp8.programs._hlo import read_program
from jaxfp8.programs._transfers import KINDS, CollectiveKind, Transfer, traffic_of

# `wire_report`: the bytes that devices send in a compiled program, read from its text.


def _name_of(dtype: DType | Format) -> str:
    """The name of a dtype, or of the dtype of a format."""
    return str(jnp.dtype(dtype.dtype if isinstance(dtype, Format) else dtype).name)


@dataclasses.dataclass(frozen=True)
class WireReport:
    """The transfers between devices in one run of a program, counted for one device.

    `print` shows them as a table.

    Attributes:
      transfers: one entry for each tensor in each collective of the program.

    Example:
      >>> kind, dtype, shape = "all-gather", "float8_e4m3fn", (16, 32)
      >>> step = Transfer(kind, dtype, shape, group_size=4, bytes=512, times=10, label="dense")
      >>> scale = Transfer("all-reduce", "float32", (), 8, bytes=4, times=10, label="amax")
      >>> report = WireReport((step, scale))
      >>> print(report)
      kind        dtype          group  tensors  operand bytes  wire bytes
      all-gather  float8_e4m3fn      4       10          5,120      15,360
      all-reduce  float32            8       10             40          70
      total                                  20          5,160      15,430
      >>> report.only(kind="all-gather").wire_bytes
      15360
    """

    transfers: tuple[Transfer, ...]

    @property
    def count(self) -> int:
        """The number of tensors that are sent. A tensor in a loop counts each time."""
        return sum(t.times for t in self.transfers)

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands of all collectives on one device."""
        return sum(t.operand_bytes for t in self.transfers)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends."""
        return sum(t.wire_bytes for t in self.transfers)

    def only(
        self,
        *,
        kind: CollectiveKind | None = None,
        dtype: DType | Format | None = None,
        group_size: int | None = None,
        at_least: int = 0,
    ) -> "WireReport":
        """A report with only the transfers that fit all arguments.

        Args:
          kind: the kind of collective; None for all kinds.
          dtype: the dtype that is sent; None for all.
          group_size: the number of devices in a group; None for all.
          at_least: the least number of bytes of an operand on one device, each time.

        Returns:
          The filtered report.

        Raises:
          ValueError: if `kind` is not a kind of collective.
        """
        if kind is not None:
            check_one_of("kind", kind, KINDS)
        return WireReport(
            tuple(
                t
                for t in self.transfers
                if (kind is None or t.kind == kind)
                and (dtype is None or t.dtype == _name_of(dtype))
                and (group_size is None or t.group_size == group_size)
                and t.bytes >= at_least
            )
        )

    def __str__(self) -> str:
        alike: dict[tuple[str, str, int], list[Transfer]] = collections.defaultdict(list)
        for t in self.transfers:
            alike[t.kind, t.dtype, t.group_size].append(t)
        rows = [["kind", "dtype", "group", "tensors", "operand bytes", "wire bytes"]]
        rows += [
            [kind, dtype, str(n), *_sums(of)] for (kind, dtype, n), of in sorted(alike.items())
        ]
        rows += [["total", "", "", *_sums(self.transfers)]]
        return align(rows, right=range(2, 6))


def _sums(transfers: Iterable[Transfer]) -> list[str]:
    report = WireReport(tuple(transfers))
    return [f"{report.count:,}", f"{report.operand_bytes:,}", f"{report.wire_bytes:,.0f}"]


def wire_report(compiled: Any, *, trip_count: int | None = None) -> WireReport:
    """Counts the bytes that devices send in one run of a compiled program.

    Every tensor of every collective counts, in a loop each time. Of the branches of a conditional,
    the one that sends the most bytes counts.

    For an operand of b bytes on each device, and groups of g devices, one device sends:

    - all-gather: b(g-1).
    - reduce-scatter or all-to-all: b(g-1)/g.
    - all-reduce: 2b(g-1)/g.
    - collective-permute, collective-broadcast or send: b.
    - ragged-all-to-all: at most b.

    Transfers of hand-written kernels are not counted. Programs for CPUs widen values before they
    send them: FP8 to float16, and bfloat16 to float32. The report shows these dtypes. Compile for a
    GPU to see what a GPU sends.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.
      trip_count: how often a loop runs if the program does not know its count.

    Returns:
      The report.

    Raises:
      TypeError, ValueError: if `compiled` is neither, or the program has no text.
      ValueError: if a collective is in a loop of unknown length and `trip_count` is missing. Also
        if `trip_count` is given and not needed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
      >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
      >>> x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, PartitionSpec("data")))
      >>> report = wire_report(jax.jit(jnp.sum).lower(x).compile())
      >>> report.only(kind="all-gather").count
      0
    """
    if trip_count is not None and trip_count < 0:
        raise ValueError(f"trip_count is {trip_count}; a loop runs 0 times or more.")
    transfers, loops_of_unknown_length = traffic_of(read_program(compiled), trip_count)
    if trip_count is not None and not loops_of_unknown_length:
        raise ValueError(
            f"trip_count is {trip_count}, but the program knows how often each loop with a "
            "collective runs; leave it out."
        )
    return WireReport(transfers)


# `assert_wire_dtype`: the check of the dtypes that collectives send.


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
    # Only dtypes matter here, so any count above 0 will do. A count of 0 would remove transfers.
    sent, _ = traffic_of(read_program(compiled), trip_count=1, every_branch=True)
    everything = WireReport(sent)
    transfers = [t for t in everything.only(kind=kind, at_least=at_least).transfers if t.wire_bytes]
    expected, ignored = [_name_of(dtype) for dtype in dtypes], _shards(kept)
    if others := [
        t for t in transfers if t.dtype not in expected and tuple(sorted(t.shape)) not in ignored
    ]:
        lines = [
            f"{kind} carries another dtype than {' or '.join(expected)}:",
            *map(_sent_line, others),
        ]
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


def _sent_line(transfer: Transfer) -> str:
    shape = ",".join(map(str, transfer.shape))
    return (
        f"  {transfer.dtype}[{shape}], {transfer.bytes:,} bytes, among {transfer.group_size} "
        f"devices: {transfer.label}"
    )
