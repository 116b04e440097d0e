"""`Recipe`: the quantizers of the operands of the three matmuls of a training step.

Here x is [M, K], w is [K, N], and g [M, N] is the gradient of y:

- fprop: `y  = x   @ w  `, lhs x, rhs w, contracts K
- dgrad: `dx = g   @ w^T`, lhs g, rhs w, contracts N
- wgrad: `dw = x^T @ g  `, lhs x, rhs g, contracts M

`plan_casts` says which of them share one copy of a tensor.
"""

import dataclasses
import functools
import math
import zlib
from typing import Any, NamedTuple, get_args

from jaxfp8._check import check_int, check_type
from jaxfp8._geometry import OPERANDS, TrainingGeometry
from jaxfp8._pytrees import register_value
from jaxfp8._quantized_tensor import Cast, Direction
from jaxfp8._typing import Axes, Matmul, Tensor
from jaxfp8.kernels.cast._api import BACKENDS as CASTS
from jaxfp8.numerics._formats import E5M2
from jaxfp8.quantizers._base import AbstractQuantizer

# Operands: the two quantizers of one matmul. A recipe has three such pairs.


@register_value
@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The quantizers of the two operands of one matmul.

    Attributes:
      lhs: the quantizer of the left operand (x or g).
      rhs: the quantizer of the right operand (w or g).

    Raises:
      TypeError: if one of them is no quantizer, or is not frozen, hashable and comparable.
      ValueError: if both have 2D tiles, tiles of different lengths, or the format E5M2.

    Example:
      >>> import jaxfp8 as fp8
      >>> from jaxfp8.quantizers import Current, Identity
      >>> fp8.recipes.Operands(lhs=Current(format=fp8.E4M3), rhs=Identity()).in_fp8
      False
    """

    lhs: AbstractQuantizer
    rhs: AbstractQuantizer

    def __post_init__(self) -> None:
        for side in ("lhs", "rhs"):
            _check_quantizer(side, getattr(self, side))
        tiles = [q.granularity.along(2) for q in (self.lhs, self.rhs) if q.granularity.in_tiles]
        if len(tiles) == 2:
            if all(kept > 1 for kept, _ in tiles):
                raise ValueError(
                    f"lhs and rhs are both in 2D tiles ({tiles[0]}, {tiles[1]}). No kernel "
                    f"multiplies these; give one of them 1D tiles, PerBlock((1, {tiles[0][1]}))."
                )
            if tiles[0][1] != tiles[1][1]:
                raise ValueError(
                    f"lhs has tiles of {tiles[0][1]} along the contracted axis, rhs of "
                    f"{tiles[1][1]}; both sides need the same length. Change one PerBlock."
                )
        if self.lhs.value_format == self.rhs.value_format == E5M2:
            raise ValueError(
                "lhs and rhs are both E5M2. No hardware multiplies these; give one of them E4M3 "
                "(forward= or gradient= of a preset)."
            )

    @property
    def in_tiles(self) -> bool:
        """Whether an operand has one scale for each tile."""
        return self.lhs.granularity.in_tiles or self.rhs.granularity.in_tiles

    @property
    def in_fp8(self) -> bool:
        """Whether the matmul runs in FP8. If one operand is in high precision, it does not."""
        return self.lhs.value_format is not None and self.rhs.value_format is not None


def _check_quantizer(side: str, quantizer: Any) -> None:
    """Raise TypeError or ValueError unless a recipe can hold the quantizer."""
    check_type(
        side, quantizer, AbstractQuantizer, "a quantizer of fp8.quantizers, Identity() for none"
    )
    kind = type(quantizer).__name__
    parameters = getattr(quantizer, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise TypeError(
            f"{side} is a {kind}, which is no frozen dataclass. Recipes and states have to compare "
            f"it; decorate {kind} with @dataclasses.dataclass(frozen=True)."
        )
    try:
        hash(quantizer)
    except TypeError as error:
        raise TypeError(
            f"{side}={quantizer!r} cannot be hashed ({error}). A recipe must be hashable. Give "
            "each field a hashable value, for instance a tuple in place of a list or an array."
        ) from None
    fields: Any = dataclasses.fields(quantizer)
    if ignored := [f.name for f in fields if not f.compare]:
        raise TypeError(
            f"{side} is a {kind} whose fields {ignored} have compare=False. Two quantizers that "
            "differ in these fields would count as equal; leave compare=False out."
        )
    if not quantizer.stateful:
        return
    check_int(f"{side}: {kind}.history_length", quantizer.history_length)
    if not quantizer.granularity.in_one:
        raise ValueError(
            f"{side}={quantizer!r} has state. A row of state has one scale, but its granularity is "
            f"{quantizer.granularity!r}; use PerTensor()."
        )
    if type(quantizer).update is AbstractQuantizer.update:
        raise TypeError(
            f"{side} is a {kind} with stateful=True, but it has no update(row, amax). This method "
            "computes the next row of state; define it, or set stateful=False."
        )


# Recipe: the quantizers of the operands of the three matmuls of a training step.


@register_value
class Row(NamedTuple):
    """One row of quantizer state: the tensor that it belongs to, and the quantizer."""

    tensor: Tensor
    quantizer: AbstractQuantizer

    @property
    def fingerprint(self) -> float:
        """A float32 in [1, 2) that identifies tensor and quantizer in a file of arrays."""
        # 16 bits of a checksum. Float32 has 7 more, so a fingerprint is still recognized after the
        # rounding of a mean of equal states over devices.
        return 1 + (zlib.crc32(self.description.encode()) >> 16) / 2**16

    @property
    def description(self) -> str:
        """Tensor, quantizer, and the fields of the quantizer that count for the fingerprint."""
        quantizer: Any = self.quantizer  # a dataclass, which its type does not say
        fields = ((f, getattr(quantizer, f.name)) for f in dataclasses.fields(quantizer))
        # A field with its default does not count, so a later version may add one and still read the
        # files of this version. The state does not depend on `rounding`.
        counted = [
            f"{f.name}={value!r}"
            for f, value in fields
            if value != f.default and f.name != "rounding"
        ]
        return f"{self.tensor} {type(self.quantizer).__name__} {' '.join(counted)}"


@register_value
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
        check_type("name", self.name, str, "a string, which names the recipe in messages")
        for matmul in ("fprop", "dgrad", "wgrad"):
            check_type(matmul, getattr(self, matmul), Operands, "Operands(lhs=..., rhs=...)")
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
            (matmul, getattr(getattr(self, matmul), side))
            for matmul, tensors in OPERANDS.items()
            for side, each in zip(("lhs", "rhs"), tensors, strict=True)
            if each == tensor
        )

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of quantizer state: one for each tensor, x, w and g, and quantizer of it."""
        return tuple(dict.fromkeys(Row(t, q) for t, q in self._all_uses if q.stateful))

    def row_of(self, tensor: Tensor, quantizer: AbstractQuantizer) -> int | None:
        """The index of the row of a tensor and a quantizer; None if there is no such row."""
        row = Row(tensor, quantizer)
        return self.rows.index(row) if row in self.rows else None

    @functools.cached_property
    def tile(self) -> int | None:
        """The longest side of all tiles along contracted axes; None without tiles."""
        return max((contracted for _, contracted in self._tiles), default=None)

    @functools.cached_property
    def whole_tiles(self) -> int | None:
        """The fewest rows that all tiles divide, of a matrix of any matmul; None without tiles."""
        return math.lcm(*(side for tile in self._tiles for side in tile)) if self._tiles else None

    @property
    def _tiles(self) -> list[Axes]:
        granularities = [quantizer.granularity for _, quantizer in self._all_uses]
        return [each.along(2) for each in granularities if each.in_tiles]

    @functools.cached_property
    def _all_uses(self) -> tuple[tuple[Tensor, AbstractQuantizer], ...]:
        """Each tensor with each of its quantizers."""
        tensors: tuple[Tensor, ...] = get_args(Tensor)
        return tuple((tensor, q) for tensor in tensors for _, q in self.uses(tensor))

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
        """How many of the three matmuls run in FP8."""
        return sum(operands.in_fp8 for operands in (self.fprop, self.dgrad, self.wgrad))


# The copies of a tensor that the matmuls of a training step read, and how each is cast.


class PlannedCast(NamedTuple):
    """The copies of one tensor by one quantizer.

    Attributes:
      cast: the copies to make; None if the tensor stays in high precision.
      readers: for each copy, the matmuls that read it.
      row: the index of the quantizer's row of state; None if the quantizer has no state.
    """

    quantizer: AbstractQuantizer
    cast: Cast | None
    readers: tuple[tuple[Matmul, ...], ...]
    row: int | None


@functools.lru_cache(maxsize=4096)  # once for a recipe and a geometry, and not for each layer
def plan_casts(
    recipe: Recipe,
    geometry: TrainingGeometry,
    tensor: Tensor,
    backends: tuple[str, ...],
    column_sums: bool = False,
    gathered: bool = False,
    by_xla: frozenset[Matmul] = frozenset(),
    only: Matmul | None = None,
) -> tuple[PlannedCast, ...]:
    """The casts of a tensor: one for each quantizer that the recipe gives it.

    With `column_sums` the first cast also sums columns. `gathered` says that the copies of this
    pass are gathered over a mesh. Matmuls with one scale then share a copy, because a second one
    would double the bytes. XLA computes the matmuls `by_xla`, and multiplies tiles in bfloat16, in
    any layout. `only` is the only matmul that reads the copies of this pass; None for all.
    """
    # Matmuls with equal quantizers share a cast. With equal directions as well, they share a copy.
    found: dict[AbstractQuantizer, dict[Direction, tuple[Matmul, ...]]] = {}
    for matmul, quantizer in recipe.uses(tensor):
        if only not in (None, matmul):
            continue
        axes = geometry.axes(matmul, tensor)
        granularity = quantizer.granularity.for_matmul(axes.not_contracted, len(axes.order))
        # Hopper's matmuls read operands with the contracted axis last. So a backend that can write
        # a copy transposed does it here, and nobody has to transpose it later.
        transposed = axes.is_transposed and CASTS[backends[0]].writes_transposed
        if (gathered and granularity.in_one) or (matmul in by_xla and granularity.in_tiles):
            transposed = False
        direction = Direction(granularity, transposed)
        copies = found.setdefault(quantizer, {})
        copies[direction] = (*copies.get(direction, ()), matmul)
    planned = []
    for quantizer, copies in found.items():
        cast = None
        if quantizer.value_format is not None:
            cast = Cast(
                format=quantizer.value_format, directions=tuple(copies), rule=quantizer.rule,
                rounding=quantizer.rounding, column_sums=column_sums, backends=backends,
            )  # fmt: skip
            column_sums = False  # one sum is enough, also if other quantizers cast the tensor
        readers, row = tuple(copies.values()), recipe.row_of(tensor, quantizer)
        planned.append(PlannedCast(quantizer, cast, readers, row))
    return tuple(planned)
