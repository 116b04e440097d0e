"""`Coverage`: which layers of a model run in FP8, and why the others do not."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxfp8.conversion._layer import Layer
from jaxfp8.conversion._plan import Decision


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """One layer of a model.

    Attributes:
      path: names of modules from the model to the layer, joined by "/".
      type: name of its class.
      shape: (M, K, N) of its matmul: tokens, features in, features out. () if it has none.
      recipe: name of its recipe. "" if the layer stays in high precision.
      reason: the rule that decided, or why the layer stays in high precision. "" for the recipe of
        the model.
      flops: its operations in one forward pass. Without example inputs, for one token.

    Example:
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> _, coverage = fp8.convert(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), fp8.recipes.current())
      >>> coverage[""].shape
      (1, 8, 4)
    """

    path: str
    type: str
    shape: tuple[int, ...]
    recipe: str
    reason: str
    flops: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """Which layers of a model run in FP8. `str()` is a table, and rich prints one in colors.

    Attributes:
      rows: the layers with a kernel, in the order in which the model calls them.
      other_flops: operations of matmuls and convolutions that belong to no row, for instance those
        of attention scores.
      counted: whether an example call gave M and the operations. Otherwise M is 1, and each layer
        counts once.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, recipe = jnp.ones((2, 8)), fp8.recipes.current()
      >>> model, coverage = fp8.convert(nn.Dense(4), recipe, inputs=(x,))
      >>> print(coverage)
      layer type  shape     share recipe  reason
      .     Dense (2, 8, 4)  100% current
      100% of the FLOPs of matmuls run in FP8: 1 of 1 layers
    """

    rows: tuple[CoverageRow, ...]
    other_flops: int = 0
    counted: bool = True

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str) -> CoverageRow:
        """The row of a path."""
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f"no layer has the path {path!r}. Paths: {[row.path for row in self.rows]}")

    @property
    def flops(self) -> int:
        """Operations of all matmuls and convolutions of a forward pass."""
        return self.other_flops + sum(row.flops for row in self.rows)

    @property
    def share(self) -> float:
        """The part of these operations that runs in FP8, from 0 to 1."""
        return sum(row.flops for row in self.rows if row.recipe) / max(self.flops, 1)

    @property
    def _cells(self) -> list[tuple[str, ...]]:
        all_flops = max(self.flops, 1)
        cells: list[tuple[str, ...]] = [
            (row.path or ".", row.type, str(row.shape or ""), _percent(row.flops / all_flops),
             row.recipe or "-", row.reason)
            for row in self.rows
        ]  # fmt: skip
        if self.other_flops:
            share = _percent(self.other_flops / self.flops)
            cells.append(("(no layer)", "", "", share, "-", "no kernel, attention for instance"))
        return cells

    @property
    def _total(self) -> str:
        converted = sum(bool(row.recipe and row.flops) for row in self.rows)
        return (
            f"{_percent(self.share)} of the FLOPs of matmuls run in FP8: {converted} of "
            f"{len(self.rows)} layers{'' if self.counted else ', each called once (no inputs)'}"
        )

    def __str__(self) -> str:
        cells = [_HEADER, *self._cells]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADER))]
        lines = [
            " ".join(
                cell.rjust(width) if name == "share" else cell.ljust(width)
                for name, cell, width in zip(_HEADER, row, widths, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([*lines, self._total])

    def __rich__(self) -> Any:
        from rich.table import Table  # who prints with rich has it

        table = Table(title="FP8 coverage", caption=self._total)
        for name in _HEADER:
            table.add_column(name, justify="right" if name == "share" else "left")
        for row in self._cells:
            table.add_row(*row, style="dim" if row[4] == "-" else None)
        return table


_HEADER = ("layer", "type", "shape", "share", "recipe", "reason")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"


def coverage_of(
    decisions: Mapping[Layer, Decision],
    flops: Mapping[str, int],
    other_flops: int,
    *,
    counted: bool,
) -> Coverage:
    """The table of these layers. `flops` has the operations of each path.

    Example:
      >>> coverage_of({}, {}, 0, counted=True).share
      0.0
    """
    rows = (
        CoverageRow(
            path=layer.path,
            type=layer.type.__name__,
            shape=layer.shape,
            recipe="" if decision.recipe is None else decision.recipe.name,
            reason=decision.reason or ("" if layer.calls else "not called with inputs="),
            flops=flops.get(layer.path, 0),
        )
        for layer, decision in decisions.items()
    )
    return Coverage(rows=tuple(rows), other_flops=other_flops, counted=counted)
