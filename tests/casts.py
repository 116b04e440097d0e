"""Casts as kernels take them, written in one line."""

import functools

import jax

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import Cast, Direction
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.numerics._scale import inverse


def cast_in(format, *granularities, transposed=None, **fields):
    """A cast with a copy in each granularity; `fields` are those of `Cast`."""
    transposed = transposed or (False,) * len(granularities)
    directions = tuple(map(Direction, granularities, transposed))
    return Cast(format=format, directions=directions, **fields)


def known(*multipliers):
    """The scales of these multipliers."""
    return tuple(KnownScale(multiplier, inverse(multiplier)) for multiplier in multipliers)


def cast_one(x, multiplier, format, granularity, *, key=None, **fields):
    """The one copy of x that a cast with a known multiplier gives."""
    cast = cast_in(format, granularity, **fields)
    (copy,), _ = cast_copies(x, cast, known(multiplier), key=key)
    return copy


@functools.partial(jax.jit, static_argnums=(1, 2))
def quantized(x, format=fp8.E4M3, granularity=fp8.PerTensor()):
    """x in FP8. It is one program: `fp8.quantize` outside of `jax.jit` is thirty."""
    return fp8.quantize(x, format, granularity)
