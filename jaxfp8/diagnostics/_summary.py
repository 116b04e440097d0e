"""`summary`: casts, sums and states as tables, and as a flat dict for loggers."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Group

from jaxfp8._table import align, rich_table
from jaxfp8._typing import FP8StateError, Tensor
from jaxfp8.diagnostics._collect import CastRow, Records, SumRow, layer_name
from jaxfp8.nnx._state import states_of
from jaxfp8.state._state import MatmulState, is_state

# Rows of quantizer state: what each row of each state holds after a step.

# Parts of a path that all states have: the collection of linen, and fields of Variables.
_SILENT = ("_overwrite_with_gradient", "fp8", "state", "value", "raw_value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRow:
    """One row of the quantizer state of a matmul, between two steps.

    Attributes:
      layer: the name of the layer. A state that is stacked along a leading axis gives a row for
        each index: "blocks/up[3]".
      tensor: "x", "w" or "g", the gradient of the layer's result.
      scale: the scale of the next step, 0 if it is unset.
      amax: the newest amax of the history. It is 0 before the first one, and NaN if the history has
        a length of 1, because then it is not kept.
      amax_min: the smallest amax of the history; 0 until the history is full.
      amax_max: the largest amax of the history.
      nonfinite_steps: the number of steps whose amax was inf or NaN.
      unset: whether the scale is unset, because no finite amax above 0 was seen.

    Example:
      >>> import jaxfp8 as fp8
      >>> state = {"up": fp8.init_state(fp8.recipes.delayed())}
      >>> row = fp8.diagnostics.summary(state).rows[0]
      >>> row.layer, row.tensor, row.scale, row.unset
      ('up', 'x', 0.0, True)
    """

    layer: str
    tensor: Tensor
    key: str = dataclasses.field(repr=False)
    scale: float
    amax: float
    amax_min: float
    amax_max: float
    nonfinite_steps: int
    unset: bool


def _state_rows(tree: Any) -> list[StateRow]:
    """One row for each row of each state in a tree. Anything else in the tree is left out.

    FP8StateError if there is no state, or if its values are not known yet.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state)
    states = [(path, leaf) for path, leaf in leaves if is_state(leaf)]
    if not states:
        raise FP8StateError(
            f"an object of type {type(tree).__name__} has no quantizer state. Pass what "
            "fp8.value_and_grad returned, linen variables or an nnx model. Recipes such as "
            "current() and blockwise() have no state. For these use fp8.diagnostics.collect()."
        )
    return [row for path, state in states for row in _rows(path, state)]


def _rows(path: tuple[Any, ...], state: MatmulState) -> list[StateRow]:
    if isinstance(state.scale, jax.core.Tracer):
        raise FP8StateError(
            "fp8.diagnostics.summary reads values, but the state is traced here. Call it outside "
            "of jax.jit, with the state that the step returned."
        )
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    while parts and parts[-1] in _SILENT:
        parts.pop()
    layer = layer_name(part for part in parts if part != _SILENT[0])
    scale, history, nonfinite = map(
        np.asarray, (state.scale, state.amax_history, state.nonfinite_steps)
    )
    # Slot 0 is the staging slot. Without other slots nothing is kept.
    kept = history[..., 1:] if history.shape[-1] > 1 else np.full((*scale.shape, 1), np.nan)
    tensors = [row.tensor for row in state.rows]
    rows = []
    for index in itertools.product(*map(range, scale.shape[:-1])):
        for i, tensor in enumerate(tensors):
            place = (*index, i)
            rows.append(
                StateRow(
                    layer=layer + "".join(f"[{each}]" for each in index),
                    tensor=tensor,
                    # A tensor with two quantizers has two rows.
                    key=tensor if tensors.count(tensor) == 1 else f"{tensor}/{i}",
                    scale=float(scale[place]),
                    amax=float(kept[place][-1]),
                    amax_min=float(kept[place].min()),
                    amax_max=float(kept[place].max()),
                    nonfinite_steps=int(nonfinite[place]),
                    unset=bool(scale[place] == 0),
                )
            )
    return rows


# Summary: rows of diagnostics as a table, and as a flat dict for loggers.

_NAMES = ("layer", "tensor", "matmul", "matmuls", "key", "in_use")

# A share above its limit is marked in the table. Sources: NVIDIA's limit of underflow in gradients
# (BioNeMo, FP8 Training Analyzer), and the losses of benchmarks/learning/cast_losses.py. See
# docs/diagnostics.md.
_ACT_ABOVE = {"saturated": 0.001, "underflowed": 0.02}
_LIMITS = ", ".join(f"{100 * limit:g} % {name}" for name, limit in _ACT_ABOVE.items())
_NOTE = f"act above {_LIMITS} (marked !)"
# Five times what a result in bfloat16 loses at most: half of a unit in its 8 bits, 0.2 %.
_MOST_OF_SUMS = 0.01
_NOTE_OF_SUMS = f"act above {100 * _MOST_OF_SUMS:g} % lost by the accumulation in use (marked !)"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Rows of diagnostics. `print(summary)` shows a table, and so does `rich.print(summary)`.

    The table of casts marks shares of lost values that are above what is normal. That of sums marks
    the error of the accumulation that the matmul uses.

    Attributes:
      rows: `CastRow`s or `StateRow`s.
      sums: `SumRow`s, with `collect(sums=True)`.

    Example:
      >>> import jaxfp8 as fp8
      >>> print(fp8.diagnostics.summary({"up": fp8.init_state(fp8.recipes.delayed())}))
      layer  tensor  scale  amax  history  nonfinite steps  unset
      up     x       0      0     0        0                yes
      up     w       0      0     0        0                yes
      up     g       0      0     0        0                yes
    """

    rows: tuple[CastRow | StateRow, ...]
    sums: tuple[SumRow, ...] = ()

    def as_dict(self) -> dict[str, float]:
        """The numbers of all rows: `{"layer/tensor/figure": number}`.

        If only one matmul reads a copy of a tensor, the key is "layer/tensor/matmul/figure". That
        of sums is "layer/matmul/figure".

        Example:
          >>> import jaxfp8 as fp8
          >>> state = {"up": fp8.init_state(fp8.recipes.delayed())}
          >>> fp8.diagnostics.summary(state).as_dict()["up/x/nonfinite_steps"]
          0.0
        """
        return {
            f"{row.layer}/{row.key}/{field.name}": float(getattr(row, field.name))
            for row in (*self.rows, *self.sums)
            for field in dataclasses.fields(row)
            if field.name not in _NAMES
        }

    def __str__(self) -> str:
        tables = ([align(cells, right=()), *notes] for cells, notes in self._tables)
        return "\n\n".join(map("\n".join, tables))

    @property
    def _tables(self) -> list[tuple[list[list[str]], list[str]]]:
        """The cells of each table, and what is normal below them."""
        has_casts = any(isinstance(row, CastRow) for row in self.rows)
        tables = [(_cells(self.rows), [_NOTE] if has_casts else [])]
        return [*tables, (_cells_of_sums(self.sums), [_NOTE_OF_SUMS])] if self.sums else tables

    def __rich__(self) -> Group:
        """The tables for rich, which calls this method."""
        return Group(
            *(
                rich_table(cells, right=(), caption="\n".join(notes) or None)
                for cells, notes in self._tables
            )
        )


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
        return Summary(tuple(source.rows()), tuple(source.sums()))
    if isinstance(source, nnx.Module | nnx.Optimizer):
        source = states_of(source)
    return Summary(tuple(_state_rows(source)))


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
        mark = " !" if value > _ACT_ABOVE[title] else ""
        return f"{100 * value:.3g} %{mark}" if value else "0"
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _cells_of_sums(rows: Sequence[SumRow]) -> list[list[str]]:
    """The titles and the rows of the table of sums."""
    titles = ["layer", "matmul", "k", "one sign", "fast", "promoted", "in use", "outputs", "calls"]

    def error(row: SumRow, name: str) -> str:
        value = getattr(row, name)
        mark = " !" if value > _MOST_OF_SUMS and name == row.in_use else ""
        if np.isnan(value):  # of tiles, unless a sum is not finite
            return "-" if np.isfinite(row.promoted) else "nan"
        return f"{100 * value:.3g} %{mark}" if value else "0"

    return [
        titles,
        *(
            [row.layer, row.matmul, str(row.k), f"{row.one_sign:.3g}", error(row, "fast"),
             error(row, "promoted"), row.in_use, str(row.outputs), str(row.calls)]
            for row in rows
        ),
    ]  # fmt: skip


def _range(least: float, most: float) -> str:
    ends = f"{least:.3g}", f"{most:.3g}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
