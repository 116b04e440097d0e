"""The axes of a matmul and of its two gradients, from dimension numbers.

Dimension numbers are those of `jax.lax.dot_general`. An axis is kept if the result has it and it is
no batch axis.

Letters: B batch axes, M kept axes of lhs, N kept axes of rhs, K contracted axes.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence

from jaxfp8._typing import Axes, DotDimensionNumbers, Matmul, Tensor


@dataclasses.dataclass(frozen=True)
class OperandAxes:
    """What a matmul does with each axis of one operand.

    Batch and contracted axes are in the order of the dimension numbers, kept axes ascend.
    """

    batch: Axes
    kept: Axes
    contracted: Axes

    @functools.cached_property
    def order(self) -> Axes:
        """The permutation to [*batch, *kept, *contracted]."""
        return self.batch + self.kept + self.contracted

    @functools.cached_property
    def not_contracted(self) -> Axes:
        """The batch and kept axes, ascending: those that the result has."""
        return tuple(sorted(self.batch + self.kept))

    @property
    def is_transposed(self) -> bool:
        """Whether the second-to-last axis is contracted, and the last one is not.

        Kernels for Hopper read such an operand from a copy whose last two axes are transposed.
        """
        last = len(self.order) - 1
        return last in self.not_contracted and last - 1 in self.contracted

    @functools.cached_property
    def in_order(self) -> "OperandAxes":
        """The axes of the operand once it is transposed to `order`."""
        axes = tuple(range(len(self.order)))
        first, second = len(self.batch), len(self.batch) + len(self.kept)
        return OperandAxes(axes[:first], axes[first:second], axes[second:])

    def shape(self, shape: Axes) -> tuple[Axes, Axes, Axes]:
        """The sizes of the batch, kept and contracted axes of an operand of this shape."""
        groups = self.batch, self.kept, self.contracted
        batch, kept, contracted = (tuple(shape[axis] for axis in axes) for axes in groups)
        return batch, kept, contracted

    def matrix_shape(self, shape: Axes) -> tuple[int, int, int]:
        """The sizes of the operand as matrices: [B, M, K] for lhs, [B, N, K] for rhs."""
        batch, kept, contracted = map(math.prod, self.shape(shape))
        return batch, kept, contracted


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The axes of one matmul. Its result is [*batch, *lhs kept, *rhs kept]. Hashable."""

    lhs: OperandAxes
    rhs: OperandAxes

    @classmethod
    def of(cls, dimension_numbers: DotDimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> "Geometry":
        """From the result of `check_dimension_numbers`, and the numbers of axes of the operands."""
        (lhs, rhs), (lhs_batch, rhs_batch) = dimension_numbers
        return cls(_axes(lhs_ndim, lhs_batch, lhs), _axes(rhs_ndim, rhs_batch, rhs))

    @functools.cached_property
    def with_lhs_in_order(self) -> "Geometry":
        """The axes once lhs is transposed to [*batch, *kept, *contracted]."""
        return Geometry(self.lhs.in_order, self.rhs)

    @functools.cached_property
    def sides(self) -> tuple[OperandAxes, OperandAxes]:
        """The axes of lhs and of rhs."""
        return self.lhs, self.rhs

    @functools.cached_property
    def dimension_numbers(self) -> DotDimensionNumbers:
        """The dimension numbers, as `jax.lax.dot_general` takes them."""
        return (self.lhs.contracted, self.rhs.contracted), (self.lhs.batch, self.rhs.batch)

    def with_innermost(self, pair: int) -> "Geometry":
        """The same matmul with the contracted axes of index `pair` moved to the end."""
        lhs, rhs = (
            dataclasses.replace(axes,
                contracted=(
                    *axes.contracted[:pair], *axes.contracted[pair + 1 :], axes.contracted[pair],
                )
            )
            for axes in self.sides
        )  # fmt: skip
        return Geometry(lhs, rhs)

    def out_shape(self, lhs_shape: Axes, rhs_shape: Axes) -> Axes:
        """The shape of the result."""
        batch, kept, _ = self.lhs.shape(lhs_shape)
        return batch + kept + self.rhs.shape(rhs_shape)[1]

    @functools.cached_property
    def added_axes(self) -> tuple[Axes, Axes]:
        """For lhs and for rhs: the axes of the result that come from the other operand alone.

        After `jnp.expand_dims` along them, an array [*batch, *kept] broadcasts to the result.
        """
        batch, m, n = len(self.lhs.batch), len(self.lhs.kept), len(self.rhs.kept)
        return tuple(range(batch + m, batch + m + n)), tuple(range(batch, batch + m))


@dataclasses.dataclass(frozen=True)
class TrainingGeometry:
    """The axes of the three matmuls of a training step. Hashable.

    `dx_axes` says for each axis of dgrad's result which axis of x it is, and `dw_axes` for each
    axis of wgrad's result which axis of w.
    """

    fprop: Geometry
    dgrad: Geometry
    wgrad: Geometry
    dx_axes: Axes
    dw_axes: Axes

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(
        cls, dimension_numbers: DotDimensionNumbers, x_ndim: int, w_ndim: int
    ) -> "TrainingGeometry":
        """The axes of `dot_general(x, w, dimension_numbers)` and of its two gradients."""
        fprop = Geometry.of(dimension_numbers, x_ndim, w_ndim)
        x, w = fprop.sides
        # The axes of g are those of y: [*batch, *x kept, *w kept].
        w_kept_in_g, x_kept_in_g = fprop.added_axes
        batch_in_g = tuple(range(len(x.batch)))
        dgrad = Geometry(
            OperandAxes(batch_in_g, x_kept_in_g, w_kept_in_g),
            OperandAxes(w.batch, tuple(sorted(w.contracted)), w.kept),
        )
        wgrad = Geometry(
            OperandAxes(x.batch, tuple(sorted(x.contracted)), x.kept),
            OperandAxes(batch_in_g, w_kept_in_g, x_kept_in_g),
        )
        # dgrad's result has the contracted axes of w where dx needs those of x, and wgrad's result
        # those of x where dw needs those of w. `dimension_numbers` pairs them.
        x_of_w = dict(zip(w.contracted, x.contracted, strict=True))
        w_of_x = dict(zip(x.contracted, w.contracted, strict=True))
        return cls(
            fprop, dgrad, wgrad,
            dx_axes=x.batch + x.kept + tuple(x_of_w[axis] for axis in dgrad.rhs.kept),
            dw_axes=w.batch + tuple(w_of_x[axis] for axis in wgrad.lhs.kept) + w.kept,
        )  # fmt: skip

    def axes(self, matmul: Matmul, tensor: Tensor) -> OperandAxes:
        """The axes of a tensor in one of the matmuls that read it."""
        geometry: Geometry = getattr(self, matmul)
        return geometry.lhs if tensor == OPERANDS[matmul][0] else geometry.rhs


OPERANDS: dict[Matmul, tuple[Tensor, Tensor]] = {
    "fprop": ("x", "w"),
    "dgrad": ("g", "w"),
    "wgrad": ("x", "g"),
}
"""The tensors that each matmul reads: its left and its right operand."""


def inverse_permutation(axes: Axes) -> Axes:
    """The permutation that undoes `axes`."""
    return tuple(axes.index(axis) for axis in range(len(axes)))


def _axes(ndim: int, batch: Sequence[int], contracted: Sequence[int]) -> OperandAxes:
    batch, contracted = tuple(batch), tuple(contracted)
    kept = tuple(axis for axis in range(ndim) if axis not in batch + contracted)
    return OperandAxes(batch, kept, contracted)


def check_dimension_numbers(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], dimension_numbers: DotDimensionNumbers
) -> DotDimensionNumbers:
    """The dimension numbers with non-negative axes. ValueError if they do not fit the shapes."""
    try:
        (xc, wc), (xb, wb) = dimension_numbers
        xc, wc, xb, wb = (tuple(map(operator.index, axes)) for axes in (xc, wc, xb, wb))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"dimension_numbers={dimension_numbers!r} must be ((lhs_contract, rhs_contract), "
            "(lhs_batch, rhs_batch)), each a sequence of axes, as in jax.lax.dot_general."
        ) from error
    xc, xb = (_canonical("lhs", axes, x_shape) for axes in (xc, xb))
    wc, wb = (_canonical("rhs", axes, w_shape) for axes in (wc, wb))
    for what, x_axes, w_axes in (("contracted", xc, wc), ("batch", xb, wb)):
        sizes = [x_shape[a] for a in x_axes], [w_shape[a] for a in w_axes]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{what} axes do not match: lhs {list(x_shape)} has sizes {sizes[0]} along "
                f"{x_axes}, rhs {list(w_shape)} has {sizes[1]} along {w_axes}. Pair axes of equal "
                "sizes."
            )
    for name, axes in (("lhs", xc + xb), ("rhs", wc + wb)):
        if len(set(axes)) != len(axes):
            raise ValueError(
                f"dimension_numbers={dimension_numbers!r} name an axis of {name} twice. Name it "
                "once, as contracted or as batch axis."
            )
    return ((xc, wc), (xb, wb))


def _canonical(name: str, axes: Sequence[int], shape: tuple[int, ...]) -> Axes:
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"axis {axis} is out of range for {name} of shape {list(shape)}. Use one of its "
                "axes in dimension_numbers."
            )
    return tuple(axis % len(shape) for axis in axes)
