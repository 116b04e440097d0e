"""Dimension numbers, as in `jax.lax.dot_general`, checked against the shapes of the operands."""

import operator
from collections.abc import Sequence

from jaxfp8._typing import Axes, DotDimensionNumbers


def check(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], dimension_numbers: DotDimensionNumbers
) -> DotDimensionNumbers:
    """Dimension numbers with non-negative integer axes.

    Raises:
      ValueError: if they do not fit the shapes.

    Example:
      >>> check((2, 3), (3, 4), (((-1,), (0,)), ((), ())))
      (((1,), (0,)), ((), ()))
    """
    try:
        (xc, wc), (xb, wb) = dimension_numbers
        xc, wc, xb, wb = (tuple(map(operator.index, axes)) for axes in (xc, wc, xb, wb))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"dimension_numbers={dimension_numbers!r} must be ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)), each a "
            "sequence of axes, as in jax.lax.dot_general."
        ) from error
    xc, xb = (_canonical("lhs", axes, x_shape) for axes in (xc, xb))
    wc, wb = (_canonical("rhs", axes, w_shape) for axes in (wc, wb))
    for what, x_axes, w_axes in (("contracted", xc, wc), ("batch", xb, wb)):
        sizes = [x_shape[a] for a in x_axes], [w_shape[a] for a in w_axes]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{what} axes do not match: lhs {list(x_shape)} has sizes {sizes[0]} along {x_axes}, rhs {list(w_shape)} has "
                f"{sizes[1]} along {w_axes}."
            )
    for name, axes in (("lhs", xc + xb), ("rhs", wc + wb)):
        if len(set(axes)) != len(axes):
            raise ValueError(f"dimension_numbers={dimension_numbers!r} name an axis of {name} twice.")
    return ((xc, wc), (xb, wb))


def _canonical(name: str, axes: Sequence[int], shape: tuple[int, ...]) -> Axes:
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axis {axis} is out of range for {name} of shape {list(shape)}.")
    return tuple(axis % len(shape) for axis in axes)
