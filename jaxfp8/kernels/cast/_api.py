"""The entry to the cast with known scales: high precision in, QuantizedTensors out.

The cast for XLA is here, too.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels._on_mesh import on_mesh, write_in_order
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.prologues._prologue import Source, value_of

# The cast for XLA. It is elementwise, so XLA fuses it with the producer of x and an amax of x.
#
# With barriers it is the reference: XLA cannot fuse or rewrite anything across them.


def cast_by_xla(
    x: Source,
    cast: Cast,
    scales: Sequence[tuple[Array, Array]],
    *,
    key: Array | None,
    barriers: bool,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `cast_copies`."""
    array = value_of(x)
    if not barriers and any(each.in_rows for each in cast.granularities):
        array = _in_its_layout(array)
    values, known = [], []
    for direction, (multiplier, scale) in zip(cast.directions, scales, strict=True):
        if barriers:
            multiplier, scale = jax.lax.optimization_barrier((multiplier, scale))
        spread = direction.granularity.expand(multiplier, array.shape)
        value = saturating_cast(array, spread, cast.format, rounding=cast.rounding, key=key)
        values.append(_in_order_on_mesh(value) if direction.transposed else value)
        known.append(scale)
    return cast.copies(tuple(values), tuple(known), array.dtype), CastExtras()


def _in_order_on_mesh(x: Array) -> Array:
    """`write_in_order` of each device's shard, in every kind of mesh and under `jax.vmap`."""
    return on_mesh(lambda x: (write_in_order(x),), (1,), ((1,),))(x)[0]


def _in_its_layout(x: Array) -> Array:
    """x, laid out in memory in the order of its axes."""
    # Otherwise XLA may give all of the cast the layout of the copy that cuBLASLt reads transposed.
    # Parts of the cast that both copies share are then written to memory, for instance masks.
    layout = Layout(tuple(range(x.ndim)))
    return lax.platform_dependent(
        x, cuda=lambda x: with_layout_constraint(x, layout), default=lambda x: x
    )


# The backends, and the entry.


class KnownScale(NamedTuple):
    """A scale that is known before the cast: `values = round(clip(x * multiplier))`.

    Attributes:
      multiplier: float32, of `granularity.scale_shape(x.shape)`, in [2^-126, 2^126].
      scale: of the same shape, `1 / multiplier`.

    Example:
      >>> import jax.numpy as jnp
      >>> KnownScale(multiplier=jnp.float32(4.0), scale=jnp.float32(0.25)).scale
      Array(0.25, dtype=float32)
    """

    multiplier: Array
    scale: Array


def _elsewhere(
    like: tuple[tuple[QuantizedTensor, ...], CastExtras],
    x: Source,
    cast: Cast,
    scales: tuple[KnownScale, ...],
    *,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The cast that other platforms run instead of a kernel."""
    copies, _ = cast_by_xla(x, cast, scales, key=key, barriers=False)
    return copies, CastExtras.of(value_of(x), like[1])


BACKENDS: dict[str, Backend] = {
    "xla": Backend(function=functools.partial(cast_by_xla, barriers=False)),
    "mosaic": Backend(
        "jaxfp8.kernels.cast._mosaic",
        "cast_copies",
        needs="Pallas Mosaic GPU",
        platform="cuda",
        elsewhere=_elsewhere,
        families=("Hopper", "Blackwell"),
        estimated=True,
        writes_transposed=True,
        rows=128,
    ),
    "reference": Backend(function=functools.partial(cast_by_xla, barriers=True)),
}


def cast_copies(
    x: Source, cast: Cast, scales: tuple[KnownScale, ...], *, key: Array | None = None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The copies of x that a cast asks for, in one call, so that a kernel can read x once.

    x is floating point, or the result of a prologue with its arrays. Of the cast's rule only
    `exact` is used: whether scales are powers of two. There is one scale for each direction. The
    key is for stochastic rounding.

    The extras are empty for XLA's cast: the caller computes the amax, and XLA fuses it with the
    cast.
    """
    result: tuple[tuple[QuantizedTensor, ...], CastExtras] = dispatch(
        "cast", BACKENDS, cast.backends, x, cast, scales, key=key
    )
    return result
