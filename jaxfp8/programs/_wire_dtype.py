"""Raising when something travels in another dtype than it should."""

from typing import Any

from jaxfp8._typing import DType
from jaxfp8.numerics._formats import Format
from jaxfp8.programs._hlo import read_program
from jaxfp8.programs._traffic import Traffic
from jaxfp8.programs._transfer import CollectiveKind, Transfer
from jaxfp8.programs._wire_report import WireReport, name_of


def assert_wire_dtype(
    compiled: Any, kind: CollectiveKind, *dtypes: DType | Format, at_least: int = 0
) -> None:
    """Raise unless the collectives of a kind carry these dtypes and no other, in every branch.

    It takes one gather of weights that precedes their quantization, and half of the gain is gone
    without a trace. Branches that a run does not take and loops of unknown length are looked into
    as well. A program with no such collective at all raises: it may be that of one device.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`. One for CPUs
        widens what it sends (`wire_report`); compile for the chip that is meant.
      kind: of collective.
      dtypes: that may travel; each of them has to.
      at_least: bytes of an operand on one device; smaller ones are left out, amaxes and scales for
        instance.

    Raises:
      AssertionError: with every tensor that travels in another dtype, or with the dtype that
        nothing travels in.
      TypeError, ValueError: as `wire_report`; a kind that is none, or no dtype.

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
    """
    if not dtypes:
        raise ValueError(f"dtypes is empty; name what {kind} has to carry, fp8.E4M3 for instance.")
    program = read_program(compiled)
    # Any count will do, for only dtypes matter; 1 and not 0, or the transfers would be gone.
    everything = WireReport(Traffic(program, trip_count=1, every_branch=True).of(program.entry))
    transfers = [t for t in everything.only(kind=kind, at_least=at_least).transfers if t.wire_bytes]
    expected = [name_of(dtype) for dtype in dtypes]
    if others := [t for t in transfers if t.dtype not in expected]:
        lines = [f"{kind} carries another dtype than {' or '.join(expected)}:", *map(_line, others)]
        raise AssertionError("\n".join(lines))
    if missing := [name for name in expected if name not in {t.dtype for t in transfers}]:
        small = f" of at least {at_least} bytes" if at_least else ""
        raise AssertionError(
            f"no {kind}{small} carries {' or '.join(missing)}; the program sends\n{everything}"
        )


def _line(transfer: Transfer) -> str:
    shape = ",".join(map(str, transfer.shape))
    return (
        f"  {transfer.dtype}[{shape}], {transfer.bytes:,} bytes, among {transfer.group_size} "
        f"devices: {transfer.label}"
    )
