"""Operands: the two quantizers of one matmul. A recipe has three such pairs."""

import dataclasses
from typing import Any

from jaxfp8.numerics._formats import E5M2
from jaxfp8.quantizers._base import AbstractQuantizer


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
    if not isinstance(quantizer, AbstractQuantizer):
        raise TypeError(
            f"{side}={quantizer!r} is no quantizer; use one of fp8.quantizers, Identity() for none."
        )
    kind = type(quantizer).__name__
    if not _is_frozen(quantizer):
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
    fields: Any = dataclasses.fields(quantizer)  # type: ignore[arg-type]
    if ignored := [f.name for f in fields if not f.compare]:
        raise TypeError(
            f"{side} is a {kind} whose fields {ignored} have compare=False. Two quantizers that "
            "differ in these fields would count as equal; leave compare=False out."
        )
    if not quantizer.stateful:
        return
    length = quantizer.history_length
    if type(length) is not int or length < 1:
        raise ValueError(
            f"{side} is a {kind} with history_length={length!r}; it must be an integer of at least "
            "1."
        )
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


def _is_frozen(quantizer: object) -> bool:
    parameters = getattr(quantizer, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen
