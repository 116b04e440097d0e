"""A recipe: which quantizer for which operand of which matmul.

The three matmuls of y = x @ w, with g the gradient of y (here for [M, K] @ [K, N]):

  fprop   y  = x   @ w      lhs x [M, K]     rhs w [K, N]    contracts K
  dgrad   dx = g   @ w^T    lhs g [M, N]     rhs w [K, N]    contracts N
  wgrad   dw = x^T @ g      lhs x [M, K]     rhs g [M, N]    contracts M
"""

import dataclasses
import functools
import zlib
from typing import Literal, NamedTuple, TypeAlias

from jaxfp8.kernels._platform import chip_named
from jaxfp8.numerics._formats import E5M2
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._current import Current
from jaxfp8.quantizers._delayed import Delayed
from jaxfp8.quantizers._identity import Identity

Matmul: TypeAlias = Literal["fprop", "dgrad", "wgrad"]
Tensor: TypeAlias = Literal["x", "w", "g"]

# Which matmuls read a tensor, and on which side.
_USES: dict[Tensor, tuple[tuple[Matmul, Literal["lhs", "rhs"]], ...]] = {
    "x": (("fprop", "lhs"), ("wgrad", "lhs")),
    "w": (("fprop", "rhs"), ("dgrad", "rhs")),
    "g": (("dgrad", "lhs"), ("wgrad", "rhs")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The quantizers of the two operands of one matmul.

    Attributes:
      lhs: of the left operand (x or g).
      rhs: of the right operand (w or g).

    Example:
      >>> import jaxfp8 as fp8
      >>> operands = fp8.Operands(lhs=fp8.quantizers.Current(format=fp8.E4M3), rhs=fp8.quantizers.Identity())
      >>> operands.in_fp8
      False
    """

    lhs: AbstractQuantizer
    rhs: AbstractQuantizer

    def __post_init__(self) -> None:
        for side in ("lhs", "rhs"):
            if not isinstance(getattr(self, side), AbstractQuantizer):
                raise TypeError(
                    f"{side}={getattr(self, side)!r} is no quantizer; use one of fp8.quantizers, Identity() for none."
                )
        tiles = [q.granularity.tile for q in (self.lhs, self.rhs) if isinstance(q.granularity, PerBlock)]
        if len(tiles) == 2:
            if all(kept > 1 for kept, _ in tiles):
                raise ValueError(
                    f"lhs and rhs are both in 2D tiles ({tiles[0]}, {tiles[1]}), which no kernel multiplies; give one of them "
                    f"1D tiles, PerBlock((1, {tiles[0][1]}))."
                )
            if tiles[0][1] != tiles[1][1]:
                raise ValueError(
                    f"lhs has tiles of {tiles[0][1]} along the contracted axis, rhs of {tiles[1][1]}; both sides need the same."
                )
        if self.lhs.value_format == self.rhs.value_format == E5M2:
            raise ValueError(
                "lhs and rhs are both E5M2, which no hardware multiplies; give one of them E4M3 "
                "(forward= or gradient= of a preset)."
            )

    @property
    def in_tiles(self) -> bool:
        """Whether an operand has a scale for each tile."""
        return any(isinstance(q.granularity, PerBlock) for q in (self.lhs, self.rhs))

    @property
    def in_fp8(self) -> bool:
        """Whether the matmul runs in FP8; with one operand in high precision it does not."""
        return self.lhs.value_format is not None and self.rhs.value_format is not None


class Row(NamedTuple):
    """One row of quantizer state: which tensor it follows, by which quantizer."""

    tensor: Tensor
    quantizer: Delayed

    @property
    def fingerprint(self) -> float:
        """A float32 in [1, 2) that identifies tensor and quantizer: a file holds arrays only.

        Fields of the quantizer that have their default value do not count, so a field that a later
        version adds does not make files of an earlier one unreadable. It has 16 bits of a checksum.
        Float32 has room for the rounding of a mean of equal states over devices, which is no change.

        Example:
          >>> import jaxfp8 as fp8
          >>> e4m3, e5m2 = (Row("g", fp8.quantizers.Delayed(format=f)) for f in (fp8.E4M3, fp8.E5M2))
          >>> e4m3.fingerprint == e5m2.fingerprint
          False
        """
        fields = ((f, getattr(self.quantizer, f.name)) for f in dataclasses.fields(self.quantizer))
        told = [f"{f.name}={value!r}" for f, value in fields if value != f.default]
        name = f"{self.tensor} {type(self.quantizer).__name__} {' '.join(told)}"
        return 1 + (zlib.crc32(name.encode()) >> 16) / 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A 3 x 2 table of quantizers. Frozen and hashable: a static argument of jit, a field of a flax module.

    A tensor that two matmuls read by equal quantizers, and with equal scale cells, is cast once.

    Attributes:
      name: how it calls itself.
      fprop: quantizers of x and w in y = x @ w.
      dgrad: quantizers of g and w in dx = g @ w^T.
      wgrad: quantizers of x and g in dw = x^T @ g.
      chip: the chip that programs are compiled for, if matmuls of tiles shall run on its own block-scaled instructions
        ("b200"). None, the default, compiles to programs that are right on every chip. Casts do not depend on it.

    Example:
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> [row.tensor for row in recipe.rows]
      ['x', 'w', 'g']
      >>> fp8.recipes.current().rows
      ()
    """

    name: str
    fprop: Operands
    dgrad: Operands
    wgrad: Operands
    chip: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} must be a string; it is how the recipe calls itself.")
        for matmul in ("fprop", "dgrad", "wgrad"):
            if not isinstance(getattr(self, matmul), Operands):
                raise TypeError(f"{matmul}={getattr(self, matmul)!r} must be Operands(lhs=..., rhs=...).")
        if self.chip is not None:
            self._check_chip(self.chip)
        lengths = {row.quantizer.history_length for row in self.rows}
        if len(lengths) > 1:
            raise ValueError(
                f"history_length differs among the operands of one recipe ({sorted(lengths)}), but their amax histories "
                "are one array; give all Delayed quantizers the same."
            )

    def _check_chip(self, chip: str) -> None:
        if not chip_named(chip).block_scaled_matmul:
            raise ValueError(
                f"chip={chip!r} has no block-scaled matmul, the only thing that chip= is for; leave it out."
            )
        tiled = [operands for operands in (self.fprop, self.dgrad, self.wgrad) if operands.in_tiles and operands.in_fp8]
        if not tiled:
            raise ValueError(f"chip={chip!r} is not used by a recipe without tiles; leave it out.")
        for quantizer in (q for operands in tiled for q in (operands.lhs, operands.rhs)):
            tile = quantizer.granularity
            exact = isinstance(quantizer, Current) and quantizer.rule.exact
            if not (exact and isinstance(tile, PerBlock) and tile.tile[1] % 32 == 0):
                raise ValueError(
                    f"chip={chip!r} multiplies tiles whose sides are multiples of 32 and whose scales are powers of two, not "
                    f"{quantizer!r}; pass power_of_two=True, or leave chip out."
                )

    def uses(self, tensor: Tensor) -> tuple[tuple[Matmul, AbstractQuantizer], ...]:
        """The matmuls that read a tensor, each with the quantizer it reads it by."""
        return tuple((matmul, getattr(getattr(self, matmul), side)) for matmul, side in _USES[tensor])

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of quantizer state: one for each tensor and stateful quantizer, in the order x, w, g."""
        rows: list[Row] = []
        for tensor in _USES:
            for _, quantizer in self.uses(tensor):
                if isinstance(quantizer, Delayed) and Row(tensor, quantizer) not in rows:
                    rows.append(Row(tensor, quantizer))
        return tuple(rows)

    @functools.cached_property
    def tile(self) -> int | None:
        """The longest side of the tiles that its operands are quantized in; None without tiles."""
        sides = [q.granularity.tile[1] for t in _USES for _, q in self.uses(t) if isinstance(q.granularity, PerBlock)]
        return max(sides, default=None)

    @property
    def is_identity(self) -> bool:
        """Whether every operand stays in high precision."""
        return all(isinstance(quantizer, Identity) for tensor in _USES for _, quantizer in self.uses(tensor))

    @property
    def fp8_matmuls(self) -> int:
        """How many of the three matmuls of a training step run in FP8."""
        return sum(operands.in_fp8 for operands in (self.fprop, self.dgrad, self.wgrad))
