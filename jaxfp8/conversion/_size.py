"""The size of a matmul, from its dimension numbers or its equation."""

import math
from typing import NamedTuple

from jaxfp8._typing import DotDimensionNumbers
from jaxfp8.ops._equation import parse


class Size(NamedTuple):
    """(M, K, N): tokens, features in, features out. B: axes that input and kernel share."""

    shape: tuple[int, int, int]
    batch: int = 1


def size_of_dot(
    lhs: tuple[int, ...], rhs: tuple[int, ...], dimension_numbers: DotDimensionNumbers
) -> Size:
    """The size of `lax.dot_general` of an input and a kernel of these shapes.

    Example:
      >>> size_of_dot((2, 3, 8), (8, 4, 5), (((2,), (0,)), ((), ())))
      Size(shape=(6, 8, 20), batch=1)
    """
    (contracted, _), (shared, _) = dimension_numbers
    k = math.prod(lhs[axis] for axis in contracted)
    batch = math.prod(lhs[axis] for axis in shared)
    inner = max(k * batch, 1)  # an axis may have size 0
    return Size((math.prod(lhs) // inner, k, math.prod(rhs) // inner), batch)


def size_of_einsum(equation: str, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Size:
    """The size of the matmul of an einsum of an input and a kernel of these shapes.

    Example:
      >>> size_of_einsum("btd,dhk->bthk", (2, 3, 8), (8, 4, 5))
      Size(shape=(6, 8, 20), batch=1)
    """
    parsed = parse(equation.replace(" ", ""), lhs, rhs)
    sizes = dict(zip(parsed.lhs + parsed.rhs, (*lhs, *rhs), strict=True))
    x, w = set(parsed.lhs_kept), set(parsed.rhs_kept)
    batch = x & w & set(parsed.output)
    k = (x & w) - batch
    m, n = x - k - batch, w - k - batch
    sides = [math.prod(sizes[name] for name in names) for names in (m, k, n, batch)]
    return Size((sides[0], sides[1], sides[2]), sides[3])
