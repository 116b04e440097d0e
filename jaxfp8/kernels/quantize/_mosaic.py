"""The quantizer in Pallas (Mosaic GPU), for Hopper: x is read once, whatever the number of directions.

Each block of threads brings a tile of 128 x 128 to shared memory and reads it from there: by rows, and by columns through a
transposed view. What runs along columns is written as its transpose, [K, M], the only way in which Hopper's tensor cores
read an operand that is contracted along its first axis. Scales go out along M or K as TMA wants them. The rules are those of
numerics, called on registers.

Letters: M, K the last two axes, those in front merged into M; T = 128.

References:
  Pallas Mosaic GPU reference, docs.jax.dev/en/latest/pallas/gpu/reference.html.
"""

import inspect
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Rounding
from jaxfp8.kernels._on_mesh import on_mesh
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

T = 128
Direction: TypeAlias = Literal["rows", "columns", "squares"]
_DIRECTIONS: dict[tuple[int, ...], Direction] = {(1, T): "rows", (T, 1): "columns", (T, T): "squares"}
_SWIZZLE = 128  # bytes of a row of shared memory among which banks are permuted, and of the inner side of a TMA box


def quantize(
    x: Array,
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    rule: ScaleRule,
    *,
    rounding: Rounding,
    key: Array | None,
) -> tuple[QuantizedTensor, ...]:
    """See `kernels.quantize._api.quantize`.

    Raises:
      NotImplementedError: for what the kernel does not do: other granularities than 1x128, 128x1 and 128x128, E8M0 scales,
        stochastic rounding, float64, axes that are no multiples of 128, jax before 0.11.
    """
    del key
    directions = tuple(_direction(granularity, x.ndim) for granularity in granularities)
    if "idx" in inspect.signature(plgpu.load).parameters:
        raise NotImplementedError("jax before 0.11 does not load a transposed tile")
    if rule.scale_format is not None or rounding != "nearest" or x.dtype.itemsize > 4:
        raise NotImplementedError(f"scales in {rule.scale_format}, rounding={rounding!r}, input in {x.dtype}")
    if x.shape[-1] % T or x.shape[-2] % T or not x.size:
        raise NotImplementedError(f"shape {list(x.shape)}, whose last two axes are no multiples of {T}")

    def local(x: Array) -> tuple[Array, ...]:
        return _shaped(
            _kernel(math.prod(x.shape[:-1]), x.shape[-1], x.dtype, format, rule, directions)(_merged(x)), x, directions
        )

    tiles = {"rows": (1, T), "columns": (T, 1), "squares": (T, T)}
    cells = tuple(cell for direction in directions for cell in ((1, 1), tiles[direction]))
    results = on_mesh(local, (T, T), cells)(x)
    return tuple(
        QuantizedTensor(values, scale, granularity, x.dtype, rule.exact)
        for values, scale, granularity in zip(results[::2], results[1::2], granularities, strict=True)
    )


def _direction(granularity: AbstractGranularity, ndim: int) -> Direction:
    tile = granularity.along(ndim) if isinstance(granularity, PerBlock) else ()
    if ndim < 2 or tile[-2:] not in _DIRECTIONS or set(tile[:-2]) - {1}:
        raise NotImplementedError(f"{granularity!r} of an array of {ndim} axes")
    return _DIRECTIONS[tile[-2:]]


def _merged(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _shaped(results: tuple[Array, ...], x: Array, directions: tuple[Direction, ...]) -> tuple[Array, ...]:
    """What the kernel wrote, with the axes of x; turned by XLA, which then has nothing to move."""
    *lead, m, k = x.shape
    shapes = {"rows": (m, k // T), "columns": (m // T, k), "squares": (m // T, k // T)}
    shaped: list[Array] = []
    for direction, values, scale in zip(directions, results[::2], results[1::2], strict=True):
        if direction == "columns":
            values = values.T
        else:  # [K / T, M]
            scale = scale.T
        shaped += [values.reshape(x.shape), scale.reshape(*lead, *shapes[direction])]
    return tuple(shaped)


def _kernel(m: int, k: int, dtype: Any, format: Format, rule: ScaleRule, directions: tuple[Direction, ...]) -> Any:
    """The kernel for x [M, K]: for each direction values [M, K] or [K, M], scales [K/T, M], [M/T, K] or [K/T, M/T]."""

    def body(x: Any, *refs: Any) -> None:
        results, (tile, arrived, *staged) = refs[: 2 * len(directions)], refs[2 * len(directions) :]
        i, j = lax.axis_index("m"), lax.axis_index("k")
        rows, columns = pl.ds(i * T, T), pl.ds(j * T, T)
        plgpu.copy_gmem_to_smem(x.at[rows, columns], tile, arrived)
        plgpu.barrier_wait(arrived)
        for direction, values, scale, scale_out in zip(
            directions, staged[::2], staged[1::2], results[1::2], strict=True
        ):
            source = tile.transpose((1, 0)) if direction == "columns" else tile
            square = direction == "squares"
            values[...], scales = _tile(plgpu.load(source, layout=plgpu.Layout.WGMMA), format, rule, square=square)
            if square:
                scale_out[j, i] = jnp.max(scales)
            else:
                scale[...] = scales
            plgpu.commit_smem()
        for n, direction in enumerate(directions):
            turned = direction == "columns"
            plgpu.copy_smem_to_gmem(staged[2 * n], results[2 * n].at[(columns, rows) if turned else (rows, columns)])
            if direction != "squares":
                plgpu.copy_smem_to_gmem(staged[2 * n + 1], results[2 * n + 1].at[(i, columns) if turned else (j, rows)])
        plgpu.wait_smem_to_gmem(0)

    out_type, staging = [], []
    for direction in directions:
        turned = direction == "columns"
        out_type += [
            jax.ShapeDtypeStruct((k, m) if turned else (m, k), format.dtype),
            jax.ShapeDtypeStruct(
                (m // T, k) if turned else (k // T, m if direction == "rows" else m // T), jnp.float32
            ),
        ]
        staging += [_shared(format.dtype), plgpu.SMEM((T,), jnp.float32)]
    return plgpu.kernel(
        body, out_type=out_type, scratch_types=[_shared(dtype), plgpu.Barrier(), *staging],
        grid=(m // T, k // T), grid_names=("m", "k"),
    )  # fmt: skip


def _shared(dtype: Any) -> Any:
    """A tile in shared memory, laid out so that rows and columns are read without bank conflicts."""
    inner = _SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((T, T), dtype, transforms=(plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(_SWIZZLE)))


def _tile(x: Array, format: Format, rule: ScaleRule, *, square: bool) -> tuple[Array, Array]:
    """A tile [T, T] in FP8, scaled row by row or as a whole, and its scales [T]."""
    x = x.astype(jnp.float32)
    largest = jnp.max(magnitude(x), axis=1)
    if square:
        largest = lax.broadcast_in_dim(jnp.max(largest), largest.shape, ())
    multiplier, scale = rule.apply(largest, format)
    return saturating_cast(x, lax.broadcast_in_dim(multiplier, x.shape, (0,)), format), scale
