"""The entry to the cast: high precision in, QuantizedTensors out.

The cast for XLA is here, too.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxfp8._pytrees import register_node
from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels._on_mesh import on_mesh, write_in_order
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.prologues._prologue import Source, value_of

# The cast for XLA: for each direction a reduction for the amax, and an elementwise cast.
#
# XLA fuses them. On a GPU x is read once for the amax and once for the cast, in each direction. If
# scales are known, the cast is fused with the producer of x and an amax of x.
#
# With barriers it is the reference: XLA cannot fuse or rewrite anything across them.


def cast_by_xla(
    x: Source,
    cast: Cast,
    scales: Sequence[tuple[Array, Array]] | None,
    *,
    key: Array | None,
    barriers: bool,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `cast_copies`."""
    array = value_of(x)
    cut = lax.optimization_barrier if barriers else lambda arrays: arrays
    if scales is None:
        amaxes = (cut(amax(array, each)) for each in cast.granularities)
        scales = [cast.rule.apply(each, cast.format) for each in amaxes]
    if not barriers and any(each.in_rows for each in cast.granularities):
        array = _in_its_layout(array)
    values, known = [], []
    for direction, pair in zip(cast.directions, scales, strict=True):
        multiplier, scale = cut(pair)
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


@register_node
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
    scales: tuple[KnownScale, ...] | None,
    *,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The cast that other platforms run instead of a kernel."""
    copies, _ = cast_by_xla(x, cast, scales, key=key, barriers=False)
    return copies, CastExtras.of(value_of(x), like[1])


BACKENDS: dict[str, Backend] = {
    "xla": Backend(function=functools.partial(cast_by_xla, barriers=False)),
    "mosaic": Backend(
        "jaxfp8.kernels.quantize._mosaic",
        "cast_copies",
        needs="Pallas Mosaic GPU",
        platform="cuda",
        elsewhere=_elsewhere,
        families=("Hopper", "Blackwell"),
        estimated=True,
        writes_transposed=True,
        rows=128,
    ),
    # jax-triton before 0.4 cannot be imported without the CUDA wheels.
    "triton": Backend(
        "jaxfp8.kernels.quantize._triton",
        "cast_copies",
        needs="Triton (pip install 'jaxfp8[triton]', with cuda12 or cuda13)",
        platform="cuda",
        elsewhere=_elsewhere,
        families=("Ada", "Hopper", "Blackwell"),
    ),
    "reference": Backend(function=functools.partial(cast_by_xla, barriers=True)),
}


def cast_copies(
    x: Source, cast: Cast, scales: tuple[KnownScale, ...] | None = None, *, key: Array | None = None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """The copies of x that a cast asks for, all of them from the high-precision x.

    It is one call, so that a kernel can do all of it in one read of x. x is floating point, or the
    result of a prologue with its arrays. XLA fuses the prologue, and kernels in Pallas read the
    arrays. The key is for stochastic rounding.

    There is one scale for each direction. Of the cast's rule then only `exact` is used: whether
    scales are powers of two. Without scales they come from the amax of the array on this device.
    Scales that span devices must be known.

    The extras are empty for XLA's cast: the caller computes the amax, and XLA fuses it with the
    cast.
    """
    operation = "quantize" if scales is None else "cast"
    result: tuple[tuple[QuantizedTensor, ...], CastExtras] = dispatch(
        operation, BACKENDS, cast.backends, x, cast, scales, key=key
    )
    return result
