"""The result of `roofline`: the cost of each matmul and of all casts, and a table of them."""

import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

from jaxfp8._typing import Matmul
from jaxfp8.plan._costs import Cost

Shape: TypeAlias = tuple[int, int, int]

MATMULS: tuple[Matmul, ...] = ("fprop", "dgrad", "wgrad")


def check_shape(shape: object) -> Shape:
    """Raise ValueError unless it is three positive integers.

    Example:
      >>> check_shape((1, 2, 3))
      (1, 2, 3)
    """
    if not (
        isinstance(shape, tuple)
        and len(shape) == 3
        and all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(
            f"shape={shape!r} must be three positive integers (M, K, N): tokens, features in and "
            "features out on one device. Write for instance shape=(8192, 4096, 4096)."
        )
    return shape


class Footnotes:
    """Texts that many rows of a table have. The table says each of them once, below its rows.

    Example:
      >>> notes = Footnotes()
      >>> [notes.shorten(f"{us} us, FP8, block-scaled", ["block-scaled"]) for us in (3, 4)]
      ['3 us, FP8 [1]', '4 us, FP8 [1]']
      >>> notes.lines()
      ['[1] block-scaled']
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def shorten(self, text: str, notes: Iterable[str]) -> str:
        """The text with a number in the place of each note."""
        for note in notes:
            number = self._numbers.setdefault(note, len(self._numbers) + 1)
            for separator in ",;":
                text = text.replace(f"{separator} {note}", f" [{number}]")
        return text

    def lines(self) -> list[str]:
        """The notes, each with its number."""
        return [f"[{number}] {note}" for note, number in self._numbers.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One matmul, or all casts, of a training step of a layer.

    Attributes:
      bf16: its cost in a layer in bfloat16.
      recipe: its cost in a layer of the recipe.
      how: text for tables: the route of the matmul, or bytes for each value that is cast.
    """

    bf16: Cost
    recipe: Cost
    how: str

    @property
    def speedup(self) -> float:
        """Time in bfloat16 / time in the recipe."""
        return self.bf16.seconds / self.recipe.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """An estimate of one dense layer, forward and backward, in a recipe and in bfloat16.

    `str()` is a table.

    Attributes:
      shape: (M, K, N): tokens, features in and features out.
      recipe: the name of the recipe.
      chip: the name of the chip.
      fprop: y = x @ w.
      dgrad: dx = g @ w^T.
      wgrad: dw = x^T @ g.
      casts: amaxes, casts to FP8 and transpositions of x, w and g. In bfloat16 there are none.
      groups: the number of groups of a grouped matmul; None for a dense layer.
    """

    shape: Shape
    recipe: str
    chip: str
    fprop: Part
    dgrad: Part
    wgrad: Part
    casts: Part
    groups: int | None = None

    @property
    def total(self) -> Part:
        """The sum of the three matmuls and the casts."""
        parts = (self.fprop, self.dgrad, self.wgrad, self.casts)
        bf16, recipe = (
            sum((getattr(part, side) for part in parts), Cost()) for side in ("bf16", "recipe")
        )
        return Part(bf16=bf16, recipe=recipe, how="")

    @property
    def speedup(self) -> float:
        """Time in bfloat16 / time in the recipe. Below 1 the recipe is slower."""
        return self.total.speedup

    def __str__(self) -> str:
        m, k, n = self.shape
        of_groups = "" if self.groups is None else f"{self.groups}, "
        lines = [
            f"[{m}, {k}] @ [{of_groups}{k}, {n}], {self.recipe} on {self.chip}: "
            f"{self.speedup:.2f}x of bf16's speed, estimated",
            f"{'':6}{'GFLOP':>8}{'bf16 MB':>10}{'bf16 us':>10}{'MB':>10}{'us':>10}  how",
        ]
        notes = Footnotes()
        for name in (*MATMULS, "casts", "total"):
            part = getattr(self, name)
            how = part.how
            if name in MATMULS and (detail := how.partition(", ")[2]):
                how = notes.shorten(how, [detail])
            numbers = (
                part.recipe.flops / 1e9, part.bf16.bytes / 1e6, part.bf16.seconds * 1e6,
                part.recipe.bytes / 1e6, part.recipe.seconds * 1e6,
            )  # fmt: skip
            lines.append(
                f"{name:6}{numbers[0]:8.0f}"
                + "".join(f"{x:10.1f}" for x in numbers[1:])
                + f"  {how}"
            )
        return "\n".join(line.rstrip() for line in [*lines, *notes.lines()])
