"""The equation of an einsum of two operands, and the matmul that it describes."""

import dataclasses

import opt_einsum

from jaxfp8._typing import Axes, DotDimensionNumbers


@dataclasses.dataclass(frozen=True)
class Equation:
    """A parsed equation. Each axis has one letter. Letters also replace the axes of '...'.

    Attributes:
      text: the equation as the user wrote it, for messages.
      lhs, rhs, output: one letter for each axis.
      lhs_ones, rhs_ones: letters of axes of size 1 that the other operand has with another size.
    """

    text: str
    lhs: str
    rhs: str
    output: str
    lhs_ones: str = ""
    rhs_ones: str = ""

    @property
    def lhs_kept(self) -> str:
        """The letters of lhs that the matmul reads, each once."""
        return self._kept(self.lhs, self.lhs_ones, self.rhs, self.rhs_ones)

    @property
    def rhs_kept(self) -> str:
        """The letters of rhs that the matmul reads, each once."""
        return self._kept(self.rhs, self.rhs_ones, self.lhs, self.lhs_ones)

    def _kept(self, names: str, ones: str, other: str, other_ones: str) -> str:
        """The letters of `names` that the matmul reads, each once.

        A letter is kept if the other operand or the output has it, too. Otherwise its axis is
        summed before the matmul. `ones` and `other_ones` are letters of axes of size 1 that
        broadcast. The operand with size 1 does not keep such a letter, and counts as if it did not
        have it.
        """
        elsewhere = (set(other) - set(other_ones)) | set(self.output)
        return "".join(
            name for name in dict.fromkeys(names) if name in elsewhere and name not in ones
        )

    def matmul(self) -> tuple[DotDimensionNumbers, Axes]:
        """Dimension numbers of the matmul of the kept axes, and the permutation to the output.

        A matmul returns [batch, kept by lhs, kept by rhs]. The output may have another order.
        """
        x, w = self.lhs_kept, self.rhs_kept
        batch = [name for name in self.output if name in x and name in w]
        contracted = [name for name in x if name in w and name not in self.output]
        product = "".join(batch) + "".join(
            name for name in x + w if name in self.output and name not in batch
        )
        dimension_numbers = (
            (tuple(map(x.index, contracted)), tuple(map(w.index, contracted))),
            (tuple(map(x.index, batch)), tuple(map(w.index, batch))),
        )
        return dimension_numbers, tuple(map(product.index, self.output))

    def called(self, name: str) -> str:
        """How a message names an index. The user did not write the letters of '...'."""
        return f"index {name!r}" if name in self.text else "an index of '...'"


def parse(text: str, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> Equation:
    """The equation of two operands of these shapes, as `jnp.einsum` reads it.

    Raises:
      TypeError: if `text` is not a string.
      ValueError: if `text` does not fit the shapes. The message names the indices that the user
        wrote.

    Example:
      >>> parse("...d,dk", (2, 3, 4), (4, 5)).output[-1]
      'k'
    """
    if not isinstance(text, str):
        raise TypeError(f"equation={text!r} must be a string. Write for instance 'bd,dk->bk'.")
    shapes = {"lhs": lhs_shape, "rhs": rhs_shape}
    given = f"equation {text!r} of lhs {list(lhs_shape)} and rhs {list(rhs_shape)}"
    if text.count(",") != 1:
        raise ValueError(
            f"{given} has {text.count(',') + 1} operands, but fp8.einsum takes two; split it into "
            "einsums of two operands."
        )
    for (name, shape), written in zip(shapes.items(), text.split("->")[0].split(","), strict=True):
        written = written.replace(" ", "")
        if "." not in written and len(written) != len(shape):
            raise ValueError(
                f"{given}: {written!r} names {len(written)} axes, but {name} has {len(shape)}; "
                "write one index for each axis, or '...' for several."
            )
    try:
        inputs, output, _ = opt_einsum.parser.parse_einsum_input(
            (text, lhs_shape, rhs_shape), shapes=True
        )
    except ValueError as error:
        raise ValueError(f"{given}: {error} Write for instance 'bd,dk->bk'.") from None
    lhs, rhs = inputs.split(",")
    found = Equation(text, lhs, rhs, output)
    sizes: dict[str, dict[str, int]] = {name: {} for name in shapes}
    for name, letters in (("lhs", lhs), ("rhs", rhs)):
        for letter, size in zip(letters, shapes[name], strict=True):
            if sizes[name].setdefault(letter, size) != size:
                raise ValueError(
                    f"{given}: {found.called(letter)} of {name} has the sizes "
                    f"{sizes[name][letter]} and {size}; axes with the same index must have the "
                    "same size. Use another index."
                )
    # jnp.einsum broadcasts an axis of size 1 against the same index of another size.
    ones = dict.fromkeys(shapes, "")
    for letter in [each for each in sizes["lhs"] if each in sizes["rhs"]]:
        pair = sizes["lhs"][letter], sizes["rhs"][letter]
        if pair[0] != pair[1] and 1 not in pair:
            raise ValueError(
                f"{given}: {found.called(letter)} has size {pair[0]} in lhs and {pair[1]} in rhs; "
                "axes with the same index must have the same size. Use another index."
            )
        if pair[0] != pair[1]:
            ones["lhs" if pair[0] == 1 else "rhs"] += letter
    return dataclasses.replace(found, lhs_ones=ones["lhs"], rhs_ones=ones["rhs"])
