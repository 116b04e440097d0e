"""The arrays that the loop of released layers differentiates, and which of them have a gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.optim._carriers import is_float
from jaxfp8.sharding._amax import varying_type


class Operands(NamedTuple):
    """What the loop differentiates, as lists of arrays. All but `carry` and `consts` are [L, ...].

    Attributes:
      carry: the first carry.
      params: the parameters of the layers.
      xs: what the body gets beside them.
      consts: what the body closes over.
    """

    carry: list[Any]
    params: list[Any]
    xs: list[Any]
    consts: list[Any]


def has_float(x: Any) -> bool:
    """Whether an array has floats.

    Example:
      >>> has_float(1.0), has_float(1)
      (True, False)
    """
    return is_float(jnp.result_type(x))


def chosen(layer: Operands, flags: Operands) -> list[Any]:
    """The arrays with a gradient.

    Example:
      >>> layer = Operands([1.0], [2.0, 3.0], [4], [])
      >>> flags = Operands([True], [True, False], [False], [])
      >>> chosen(layer, flags)
      [1.0, 2.0]
    """
    pairs = (zip(xs, fs, strict=True) for xs, fs in zip(layer, flags, strict=True))
    return [x for pair in pairs for x, flag in pair if flag]


def merged(layer: Operands, flags: Operands, differentiated: tuple[Array, ...]) -> Operands:
    """A layer with other arrays in the place of those with a gradient.

    Example:
      >>> layer = Operands([1.0], [2.0, 3.0], [4], [])
      >>> flags = Operands([True], [True, False], [False], [])
      >>> merged(layer, flags, (5.0, 6.0))
      Operands(carry=[5.0], params=[6.0, 3.0], xs=[4], consts=[])
    """
    new = split(flags, differentiated)
    return Operands(
        *[
            [x if y is None else y for x, y in zip(old, placed(values, fs), strict=True)]
            for old, values, fs in zip(layer, new, flags, strict=True)
        ]
    )


def split(flags: Operands, values: Any) -> Operands:
    """The inverse of `chosen`, without the arrays that have no gradient.

    Example:
      >>> split(Operands([True], [True, False], [False], []), [1.0, 2.0])
      Operands(carry=[1.0], params=[2.0], xs=[], consts=[])
    """
    left = iter(values)
    return Operands(*[[next(left) for flag in fs if flag] for fs in flags])


def placed(values: list[Any], flags: list[bool]) -> list[Any]:
    """The values where a flag is set, and None elsewhere.

    Example:
      >>> placed([1.0], [False, True])
      [None, 1.0]
    """
    left = iter(values)
    return [next(left) if flag else None for flag in flags]


def floats(leaves: list[Any]) -> list[Any]:
    """The arrays of floats.

    Example:
      >>> floats([1, 2.0])
      [2.0]
    """
    return [x for x in leaves if has_float(x)]


def instantiated(cotangents: list[Any]) -> list[Array]:
    """The cotangents of floats. JAX gives symbolic zeros for those that are not used.

    Example:
      >>> instantiated([jnp.float32(1.0)])
      [Array(1., dtype=float32)]
    """

    def one(x: Any) -> Array:
        if not isinstance(x, jax.custom_derivatives.SymbolicZero):
            return x
        aval: Any = x.aval
        zeros = jnp.zeros(aval.shape, aval.dtype)
        axes = tuple(sorted(varying_type(aval)))
        return lax.pcast(zeros, axes, to="varying") if axes else zeros

    return [one(x) for x in cotangents if is_float(_dtype_of(x))]


def _dtype_of(cotangent: Any) -> Any:
    return getattr(cotangent, "aval", cotangent).dtype
