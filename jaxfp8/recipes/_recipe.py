"""Recipe: the quantizers of the operands of the three matmuls of a training step.

Here x is [M, K], w is [K, N], and g [M, N] is the gradient of y:

- fprop: `y  = x   @ w  `, lhs x, rhs w, contracts K
- dgrad: `dx = g   @ w^T`, lhs g, rhs w, contracts N
- wgrad: `dw = x^T @ g  `, lhs x, rhs g, contracts M
"""

import dataclasses
import functools
import math
import zlib
from typing import Any, Literal, NamedTuple

from jaxfp8._typing import Matmul, Tensor
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.recipes._operands import Operands

# The matmuls that read each tensor, and as which operand.
_USES: dict[Tensor, tuple[tuple[Matmul, Literal["lhs", "rhs"]], ...]] = {
    "x": (("fprop", "lhs"), ("wgrad", "lhs")),
    "w": (("fprop", "rhs"), ("dgrad", "rhs")),
    "g": (("dgrad", "lhs"), ("wgrad", "rhs")),
}


class Row(NamedTuple):
    """One row of quantizer state: the tensor that it belongs to, and the quantizer."""

    tensor: Tensor
    quantizer: AbstractQuantizer

    @property
    def fingerprint(self) -> float:
        """A float32 in [1, 2) that identifies tensor and quantizer in a file of arrays.

        Fields with their default value do not count. So a later version can add a field and still
        read the files of an earlier version. `rounding` does not count, because the state does not
        depend on it.

        The fingerprint has 16 bits of a checksum. Float32 has 7 more bits. So a fingerprint is
        still recognized after the rounding of a mean of equal states over devices.

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
        quantizer: Any = self.quantizer  # a dataclass, which its type does not say
        fields = ((f, getattr(quantizer, f.name)) for f in dataclasses.fields(quantizer))
        counted = [
            f"{f.name}={value!r}"
            for f, value in fields
            if value != f.default and f.name != "rounding"
        ]
        return f"{self.tensor} {type(self.quantizer).__name__} {' '.join(counted)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The quantizers of the two operands of each of three matmuls.

    A recipe is frozen and hashable. It can be a static argument of jit and a field of a flax
    module.

    A tensor is quantized once if the two matmuls that read it have equal quantizers and equal scale
    cells.

    Attributes:
      name: a name for messages.
      fprop: the quantizers of x and w in y = x @ w.
      dgrad: the quantizers of g, the gradient of y, and w in dx = g @ w^T.
      wgrad: the quantizers of x and g in dw = x^T @ g.

    Raises:
      TypeError: if a field has another type, or if a quantizer with state has no stable repr.
      ValueError: if quantizers with state differ in `history_length`.

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
                f"name={self.name!r} must be a string; it names the recipe in messages."
            )
        for matmul in ("fprop", "dgrad", "wgrad"):
            if not isinstance(getattr(self, matmul), Operands):
                raise TypeError(
                    f"{matmul}={getattr(self, matmul)!r} must be Operands(lhs=..., rhs=...)."
                )
        for row in self.rows:
            if " at 0x" in row.description:
                raise TypeError(
                    f"the quantizer of {row.tensor} has a memory address in its repr: "
                    f"{row.description!r}. Another process has other addresses, so it could not "
                    "load a saved state. Give the field a type with a repr of its own."
                )
        lengths = {row.quantizer.history_length for row in self.rows}
        if len(lengths) > 1:
            raise ValueError(
                f"history_length differs among the operands of one recipe: {sorted(lengths)}. The "
                "amax histories are one array, so give all quantizers with state the same length."
            )

    def uses(self, tensor: Tensor) -> tuple[tuple[Matmul, AbstractQuantizer], ...]:
        """The matmuls that read a tensor, each with its quantizer of the tensor."""
        return tuple(
            (matmul, getattr(getattr(self, matmul), side)) for matmul, side in _USES[tensor]
        )

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of quantizer state, in the order x, w, g.

        There is one row for each tensor and stateful quantizer of it.
        """
        rows: list[Row] = []
        for tensor in _USES:
            for _, quantizer in self.uses(tensor):
                if quantizer.stateful and Row(tensor, quantizer) not in rows:
                    rows.append(Row(tensor, quantizer))
        return tuple(rows)

    def row_of(self, tensor: Tensor, quantizer: AbstractQuantizer) -> int | None:
        """The index of the row of a tensor and a quantizer; None if there is no such row."""
        row = Row(tensor, quantizer)
        return self.rows.index(row) if row in self.rows else None

    @functools.cached_property
    def tile(self) -> int | None:
        """The longest side of all tiles along contracted axes; None without tiles."""
        granularities = [quantizer.granularity for _, quantizer in self._all_uses]
        return max((each.along(2)[1] for each in granularities if each.in_tiles), default=None)

    @functools.cached_property
    def whole_tiles(self) -> int | None:
        """The fewest rows that all tiles divide, of a matrix of any matmul; None without tiles."""
        granularities = [quantizer.granularity for _, quantizer in self._all_uses]
        sides = [math.lcm(*each.along(2)) for each in granularities if each.in_tiles]
        return math.lcm(*sides) if sides else None

    @functools.cached_property
    def _all_uses(self) -> tuple[tuple[Tensor, AbstractQuantizer], ...]:
        """Each tensor with each of its quantizers."""
        return tuple((tensor, q) for tensor in _USES for _, q in self.uses(tensor))

    @functools.cached_property
    def combines_amaxes(self) -> bool:
        """Whether a scale comes from the amax of a whole tensor, which may span devices."""
        return any(q.uses_amax and q.granularity.in_one for _, q in self._all_uses)

    @functools.cached_property
    def tensors_in_rows(self) -> tuple[Tensor, ...]:
        """The tensors that have one scale for each row."""
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
    """A recipe in which each tensor has one quantizer for all matmuls.

    Example:
      >>> import jaxfp8 as fp8
      >>> x = fp8.quantizers.Current(format=fp8.E4M3)
      >>> by_tensor("mine", x, x, x).fp8_matmuls
      3
    """
    fprop, dgrad, wgrad = Operands(lhs=x, rhs=w), Operands(lhs=g, rhs=w), Operands(lhs=x, rhs=g)
    return Recipe(name=name, fprop=fprop, dgrad=dgrad, wgrad=wgrad)
