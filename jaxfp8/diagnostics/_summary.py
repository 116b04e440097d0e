"""Summary: rows of diagnostics as a table, and as a flat dict for loggers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx
from rich.table import Table

from jaxfp8.diagnostics._cast_rows import CastRow
from jaxfp8.diagnostics._collect import Records
from jaxfp8.diagnostics._state_rows import StateRow, state_rows
from jaxfp8.nnx._state import states_of

_NAMES = ("layer", "tensor", "matmuls", "key")

# A share above its limit is marked in the table. Sources: NVIDIA's limit of underflow in gradients
# (BioNeMo, FP8 Training Analyzer), and the losses of benchmarks/learning/cast_losses.py. See
# docs/diagnostics.md.
ACT_ABOVE = {"saturated": 0.001, "underflowed": 0.02}
_LIMITS = ", ".join(f"{100 * limit:g} % {name}" for name, limit in ACT_ABOVE.items())
_NOTE = f"act above {_LIMITS} (marked !)"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Rows of diagnostics. `print(summary)` shows a table, and so does `rich.print(summary)`.

    The table of casts marks shares of lost values that are above what is normal.

    Attributes:
      rows: `CastRow`s or `StateRow`s.

    Example:
      >>> import jaxfp8 as fp8
      >>> print(fp8.diagnostics.summary({"up": fp8.init_state(fp8.recipes.delayed())}))
      layer  tensor  scale  amax  history  nonfinite steps  unset
      up     x       0      0     0        0                yes
      up     w       0      0     0        0                yes
      up     g       0      0     0        0                yes
    """

    rows: tuple[CastRow | StateRow, ...]

    def as_dict(self) -> dict[str, float]:
        """The numbers of all rows: `{"layer/tensor/figure": number}`.

        If only one matmul reads a copy of a tensor, the key is "layer/tensor/matmul/figure".

        Example:
          >>> import jaxfp8 as fp8
          >>> state = {"up": fp8.init_state(fp8.recipes.delayed())}
          >>> fp8.diagnostics.summary(state).as_dict()["up/x/nonfinite_steps"]
          0.0
        """
        return {
            f"{row.layer}/{row.key}/{field.name}": float(getattr(row, field.name))
            for row in self.rows
            for field in dataclasses.fields(row)
            if field.name not in _NAMES
        }

    def __str__(self) -> str:
        lines = _cells(self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*table, *self._notes])

    @property
    def _notes(self) -> list[str]:
        """What is normal, below a table of casts."""
        return [_NOTE] if any(isinstance(row, CastRow) for row in self.rows) else []

    def __rich__(self) -> Table:
        """The table for rich, which calls this method."""
        titles, *lines = _cells(self.rows)
        table = Table(*titles, caption="\n".join(self._notes) or None)
        for line in lines:
            table.add_row(*line)
        return table


def summary(source: Any) -> Summary:
    """A summary of the casts of a step, or of quantizer state.

    Args:
      source: the records of `fp8.diagnostics.collect`. Or quantizer state: a tree with
        `MatmulState`s in it, as `fp8.value_and_grad` returns it, linen variables, a train state, or
        an nnx module.

    Raises:
      FP8StateError: if `source` is none of these.

    Example:
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> layer = fp8.nnx.FP8Linear(8, 4, rngs=nnx.Rngs(0))
      >>> [row.tensor for row in fp8.diagnostics.summary(layer).rows]
      ['x', 'w', 'g']
    """
    if isinstance(source, Records):
        return Summary(tuple(source.rows()))
    return Summary(tuple(state_rows(states_of(source) if _is_nnx(source) else source)))


def _is_nnx(source: Any) -> bool:
    return isinstance(source, nnx.Module | nnx.Optimizer)


def _cells(rows: Sequence[CastRow | StateRow]) -> list[list[str]]:
    """The titles and the rows of a table."""
    of_states = bool(rows) and isinstance(rows[0], StateRow)
    titles = ("scale amax history nonfinite_steps unset" if of_states else
              "amax scale saturated underflowed nonfinite values calls").split()  # fmt: skip
    table = [["layer", "tensor", *(title.replace("_", " ") for title in titles)]]
    table += [
        [row.layer, row.key.replace("/", " "), *(_cell(row, title) for title in titles)]
        for row in rows
    ]
    return table


def _cell(row: CastRow | StateRow, title: str) -> str:
    if title == "scale" and isinstance(row, CastRow):
        return _range(row.scale_min, row.scale_max)
    if title == "history" and isinstance(row, StateRow):
        return _range(row.amax_min, row.amax_max)
    value = getattr(row, title)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if title in ("saturated", "underflowed"):
        mark = " !" if value > ACT_ABOVE[title] else ""
        return f"{100 * value:.3g} %{mark}" if value else "0"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _range(least: float, most: float) -> str:
    ends = f"{least:.3g}", f"{most:.3g}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
