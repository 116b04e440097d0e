"""A recipe: which quantizer for which operand of which matmul.

The three matmuls of y = x @ w, with g the gradient of y (here for [M, K] @ [K, N]):

  fprop   y  = x   @ w      lhs x [M, K]     rhs w [K, N]    contracts K
  dgrad   dx = g   @ w^T    lhs g [M, N]     rhs w [K, N]    contracts N
  wgrad   dw = x^T @ g      lhs x [M, K]     rhs g [M, N]    contracts M
"""

import dataclasses
import functools
import zlib
from typing import Any, Literal, NamedTuple

from jaxfp8._typing import Matmul, Tensor
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.recipes._operands import Operands

# Which matmuls read a tensor, and on which side.
_USES: dict[Tensor, tuple[tuple[Matmul, Literal["lhs", "rhs"]], ...]] = {
    "x": (("fprop", "lhs"), ("wgrad", "lhs")),
    "w": (("fprop", "rhs"), ("dgrad", "rhs")),
    "g": (("dgrad", "lhs"), ("wgrad", "rhs")),
}


class Row(NamedTuple):
    """One row of quantizer state: which tensor it follows, by which quantizer."""

    tensor: Tensor
    quantizer: AbstractQuantizer

    @property
    def fingerprint(self) -> float:
        """A float32 in [1, 2) that identifies tensor and quantizer: a file holds arrays only.

        Fields of the quantizer that have their default value do not count, so a field that a later
        version adds does not make files of an earlier one unreadable. Nor does the rounding, on
        which a state does not depend. It has 16 bits of a checksum. Float32 has room for the
        rounding of a mean of equal states over devices, which is no change.

        Example:
          >>> import jaxfp8 as fp8
          >>> from jaxfp8.quantizers import Delayed
          >>> e4m3, e5m2 = (Row("g", Delayed(format=f)) for f in (fp8.E4M3, fp8.E5M2))
          >>> e4m3.fingerprint == e5m2.fingerprint
          False
        """
        return 1 + (zlib.crc32(self.description.encode()) >> 16) / 2**16

    @property
    def description(self) -> str:
        """Tensor, quantizer, and the fields of the quantizer that count for the fingerprint."""
        quantizer: Any = self.quantizer  # a dataclass, which types do not tell
        fields = ((f, getattr(quantizer, f.name)) for f in dataclasses.fields(quantizer))
        counted = [
            f"{f.name}={value!r}"
            for f, value in fields
            if value != f.default and f.name != "rounding"
        ]
        return f"{self.tensor} {type(self.quantizer).__name__} {' '.join(counted)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A 3 x 2 table of quantizers.

    Frozen and hashable: a static argument of jit, a field of a flax module.

    A tensor that two matmuls read by equal quantizers, and with equal scale cells, is cast once.

    Attributes:
      name: how it calls itself.
      fprop: quantizers of x and w in y = x @ w.
      dgrad: quantizers of g and w in dx = g @ w^T.
      wgrad: quantizers of x and g in dw = x^T @ g.

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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(
                f"name={self.name!r} must be a string; it is how the recipe calls itself."
            )
        for matmul in ("fprop", "dgrad", "wgrad"):
            if not isinstance(getattr(self, matmul), Operands):
                raise TypeError(
                    f"{matmul}={getattr(self, matmul)!r} must be Operands(lhs=..., rhs=...)."
                )
        for row in self.rows:
            if " at 0x" in row.description:
                raise TypeError(
                    f"the quantizer of {row.tensor} shows a memory address, {row.description!r}, "
                    "which another process would not have, so no saved state would be found again; "
                    "give the field a type with a repr of its own."
                )
        lengths = {row.quantizer.history_length for row in self.rows}
        if len(lengths) > 1:
            raise ValueError(
                f"history_length differs among the operands of one recipe ({sorted(lengths)}), but "
                "their amax histories are one array; give all quantizers with state the same."
            )

    def uses(self, tensor: Tensor) -> tuple[tuple[Matmul, AbstractQuantizer], ...]:
        """The matmuls that read a tensor, each with the quantizer it reads it by."""
        return tuple(
            (matmul, getattr(getattr(self, matmul), side)) for matmul, side in _USES[tensor]
        )

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of quantizer state.

        One for each tensor and stateful quantizer, in the order x, w, g.
        """
        rows: list[Row] = []
        for tensor in _USES:
            for _, quantizer in self.uses(tensor):
                if quantizer.stateful and Row(tensor, quantizer) not in rows:
                    rows.append(Row(tensor, quantizer))
        return tuple(rows)

    def row_of(self, tensor: Tensor, quantizer: AbstractQuantizer) -> int | None:
        """The index of the row of a tensor by a quantizer; None if it has none."""
        row = Row(tensor, quantizer)
        return self.rows.index(row) if row in self.rows else None

    @functools.cached_property
    def tile(self) -> int | None:
        """The longest side of the tiles that its operands are quantized in; None without tiles."""
        granularities = [quantizer.granularity for _, quantizer in self._all_uses]
        return max((each.along(2)[1] for each in granularities if each.in_tiles), default=None)

    @functools.cached_property
    def _all_uses(self) -> tuple[tuple[Tensor, AbstractQuantizer], ...]:
        """Each tensor with each quantizer that it is read by."""
        return tuple((tensor, q) for tensor in _USES for _, q in self.uses(tensor))

    @functools.cached_property
    def combines_amaxes(self) -> bool:
        """Whether a scale comes from the amax of a whole tensor, which may span devices."""
        return any(q.uses_amax and q.granularity.in_one for _, q in self._all_uses)

    @functools.cached_property
    def tensors_in_rows(self) -> tuple[Tensor, ...]:
        """The tensors that have a scale for each row."""
        return tuple(dict.fromkeys(t for t, q in self._all_uses if q.granularity.in_rows))

    @functools.cached_property
    def needs_key(self) -> bool:
        """Whether a tensor is rounded stochastically, which needs a PRNG key at each step."""
        return any(q.rounding == "stochastic" for _, q in self._all_uses)

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether every operand stays in high precision."""
        return all(quantizer.value_format is None for _, quantizer in self._all_uses)

    @property
    def fp8_matmuls(self) -> int:
        """How many of the three matmuls of a training step run in FP8."""
        return sum(operands.in_fp8 for operands in (self.fprop, self.dgrad, self.wgrad))


def by_tensor(
    name: str,
    x: AbstractQuantizer,
    w: AbstractQuantizer,
    g: AbstractQuantizer,
) -> Recipe:
    """The recipe in which each tensor has one quantizer, whichever matmul reads it.

    Example:
      >>> import jaxfp8 as fp8
      >>> x = fp8.quantizers.Current(format=fp8.E4M3)
      >>> by_tensor("mine", x, x, x).fp8_matmuls
      3
    """
    fprop, dgrad, wgrad = Operands(lhs=x, rhs=w), Operands(lhs=g, rhs=w), Operands(lhs=x, rhs=g)
    return Recipe(name=name, fprop=fprop, dgrad=dgrad, wgrad=wgrad)
