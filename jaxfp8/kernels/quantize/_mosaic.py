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
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, Rounding
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
TILES: dict[Direction, tuple[int, int]] = {"rows": (1, T), "columns": (T, 1), "squares": (T, T)}
# Bytes of the inner side of a TMA box, within which shared memory is permuted so that banks do not collide.
_SWIZZLE = 128
_ROWS = 64  # the least that four warps load together


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
      NotImplementedError: for other granularities than 1x128, 128x1 and 128x128, E8M0 scales, stochastic rounding, float64,
        last axes that are no multiples of 128, meshes that are manual in part, jax before 0.11.
    """
    del key
    directions = tuple(_direction(granularity, x.ndim) for granularity in granularities)
    if "idx" in inspect.signature(plgpu.load).parameters:
        raise NotImplementedError("jax before 0.11 cannot load a transposed tile")
    if rule.scale_format is not None or rounding != "nearest" or x.dtype.itemsize > 4:
        raise NotImplementedError(f"scales in {rule.scale_format}, rounding={rounding!r}, {x.dtype}")
    if x.shape[-1] % T or x.shape[-2] % T or not x.size:
        raise NotImplementedError(f"shape {list(x.shape)}, whose last two axes are no multiples of {T}")

    def local(x: Array) -> tuple[Array, ...]:
        m, k = x.size // x.shape[-1], x.shape[-1]
        results = _kernel(m, k, x.dtype, format, rule, directions)(x.reshape(m, k))
        return _shaped(results, x.shape, directions)

    cells = tuple(cell for direction in directions for cell in ((1, 1), TILES[direction]))
    results = on_mesh(local, (T, T), cells)(x)
    return tuple(
        QuantizedTensor(values, scale, granularity, x.dtype, rule.exact)
        for values, scale, granularity in zip(results[::2], results[1::2], granularities, strict=True)
    )


def _direction(granularity: AbstractGranularity, ndim: int) -> Direction:
    if isinstance(granularity, PerBlock) and ndim >= 2:
        *lead, m, k = granularity.along(ndim)
        for direction, tile in TILES.items():
            if tile == (m, k) and set(lead) <= {1}:
                return direction
    raise NotImplementedError(f"{granularity!r} of an array of {ndim} axes")


def _shaped(results: Sequence[Array], shape: Axes, directions: Sequence[Direction]) -> tuple[Array, ...]:
    """What the kernel wrote, with the axes of x. XLA turns nothing for that whose reader turns it back."""
    *lead, m, k = shape
    shaped: list[Array] = []
    for direction, values, scale in zip(directions, results[::2], results[1::2], strict=True):
        down, across = TILES[direction]
        values, scale = (values.T, scale) if direction == "columns" else (values, scale.T)
        shaped += [values.reshape(shape), scale.reshape(*lead, m // down, k // across)]
    return tuple(shaped)


def _kernel(
    m: int, k: int, dtype: Any, format: Format, rule: ScaleRule, directions: Sequence[Direction]
) -> Callable[[Array], Sequence[Array]]:
    """The kernel for x [M, K], which gives values and scales of each direction, scales in float32.

    rows: [M, K], [K/T, M]. columns: [K, M], [M/T, K]. squares: [M, K], [K/T, M/T].
    """

    def body(x: Any, *refs: Any) -> None:
        results, (tile, arrived, *staged) = refs[: 2 * len(directions)], refs[2 * len(directions) :]
        i, j = lax.axis_index("m"), lax.axis_index("k")
        rows, columns = pl.ds(i * T, T), pl.ds(j * T, T)
        plgpu.copy_gmem_to_smem(x.at[rows, columns], tile, arrived)
        plgpu.barrier_wait(arrived)
        for n, direction in enumerate(directions):
            (values_out, scale_out), (values, scale) = results[2 * n : 2 * n + 2], staged[2 * n : 2 * n + 2]
            source = tile.transpose((1, 0)) if direction == "columns" else tile
            # In parts, or a thread would hold more values than it has registers; a square has one amax for all of them.
            part = T if direction == "squares" else _ROWS
            for first in range(0, T, part):
                taken = pl.ds(first, part)
                loaded = plgpu.load(source.at[taken], layout=plgpu.Layout.WGMMA)  # type: ignore[call-arg]  # of jax before 0.11
                values[taken], scales = _tile(loaded, format, rule, square=direction == "squares")
                if direction == "squares":
                    scale_out[j, i] = jnp.max(scales)
                else:
                    scale[taken] = scales
            plgpu.commit_smem()  # so that TMA sees what threads stored
            turned = direction == "columns"
            plgpu.copy_smem_to_gmem(values, values_out.at[(columns, rows) if turned else (rows, columns)])
            if direction != "squares":
                plgpu.copy_smem_to_gmem(scale, scale_out.at[(i, columns) if turned else (j, rows)])
        plgpu.wait_smem_to_gmem(0)

    out_type, staging = [], []
    for direction in directions:
        shape = (k, m) if direction == "columns" else (m, k)
        scales = {"rows": (k // T, m), "columns": (m // T, k), "squares": (k // T, m // T)}[direction]
        out_type += [jax.ShapeDtypeStruct(shape, format.dtype), jax.ShapeDtypeStruct(scales, jnp.float32)]
        staging += [_shared(format.dtype), plgpu.SMEM((T,), jnp.float32)]
    return plgpu.kernel(
        body, out_type=out_type, scratch_types=[_shared(dtype), plgpu.Barrier(), *staging],
        grid=(m // T, k // T), grid_names=("m", "k"),
    )  # fmt: skip


def _shared(dtype: Any) -> Any:
    """A tile in shared memory, as TMA writes it and `ldmatrix` reads it, by rows or by columns."""
    inner = _SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((T, T), dtype, transforms=(plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(_SWIZZLE)))


def _tile(x: Array, format: Format, rule: ScaleRule, *, square: bool) -> tuple[Array, Array]:
    """Rows [R, T] in FP8, scaled row by row or as a whole, and their scales [R]."""
    x = x.astype(jnp.float32)
    largest = jnp.max(magnitude(x), axis=1)
    if square:
        largest = lax.broadcast_in_dim(jnp.max(largest), largest.shape, ())
    multiplier, scale = rule.apply(largest, format)
    return saturating_cast(x, lax.broadcast_in_dim(multiplier, x.shape, (0,)), format), scale
