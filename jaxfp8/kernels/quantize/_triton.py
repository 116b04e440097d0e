"""The quantizer in Triton, called through jax-triton: the portable one, which reads x once, whatever its shape.

Tiles of 128 or of 32, any set of 1xT, Tx1 and TxT in one read; and rows with one scale each. What runs along columns is
written as its transpose, [K, M], as matmuls read an operand that is contracted along its first axis. Scales of rows go out
along M, those of columns along K.

Letters: M, K the last two axes, those in front merged into M where that cuts no tile, else counted by L; T the side of a tile.

References:
  Tillet et al., Triton, MAPL 2019, triton-lang.org; jax-triton, github.com/jax-ml/jax-triton.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Rounding
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._on_mesh import mesh_of, on_mesh
from jaxfp8.kernels._platform import compute_capability_of
from jaxfp8.kernels._prologue import Produced, Source
from jaxfp8.kernels._triton_call import triton_call
from jaxfp8.kernels.quantize import _triton_kernels as kernels
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerAxis
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

Cell: TypeAlias = tuple[int, int]
"""How many values down and across have one scale."""
Call: TypeAlias = Callable[..., Any]
"""`triton_call`, with all that the format, the rule and the GPU decide."""

# Side of a tile -> side of the block that a program reads, and its warps. 32 values a thread or less: with twice as many, two
# directions take 205 registers of a thread and leave a multiprocessor 8 warps.
BLOCKS = {128: (128, 16), 32: (64, 8)}
# 32 values a thread, again. A block of threads has 32 warps at most, and 64 registers a thread then: longer rows spill.
ROW_VALUES = 8192
LONGEST_ROW = 32768
_WARP_VALUES = 1024
_OFFSETS = 2**31  # inside of a block they are int32
_FP8_SINCE = 89  # compute capability of the first GPUs with FP8 conversions, Ada (PTX ISA, cvt)


def quantize(
    x: Source,
    format: Format,
    granularities: tuple[AbstractGranularity, ...],
    rule: ScaleRule,
    *,
    transposed: tuple[bool, ...],
    column_sums: bool,
    rounding: Rounding,
    key: Array | None,
) -> tuple[tuple[QuantizedTensor, ...], Met]:
    """See `kernels.quantize._api.quantize`.

    Raises:
      NotImplementedError: for other granularities than tiles of 1xT, Tx1 and TxT of one T, 32 or 128, and PerAxis of all axes
        but the last, if that has no more than 32768 values; stochastic rounding, float64, empty arrays; GPUs without FP8;
        meshes that are manual in part, or whose parts cut tiles or rows (an Auto mesh gathers those).
    """
    del key, transposed, column_sums  # a layout: columns are transposed, squares are not; nothing is summed
    if isinstance(x, Produced):
        raise NotImplementedError(f"prologue={x.prologue!r}: it reads one array; quantize prologue(*arrays)")
    if rounding != "nearest" or x.dtype.itemsize > 4 or not x.size:
        raise NotImplementedError(f"rounding={rounding!r}, {x.dtype}{list(x.shape)}")
    return _quantize(x, format, granularities, rule), Met()


# One program where there is none around it; op by op, jax 0.12 cannot run what jax-triton 0.4.1 makes.
@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _quantize(
    x: Array, format: Format, granularities: tuple[AbstractGranularity, ...], rule: ScaleRule
) -> tuple[QuantizedTensor, ...]:
    capability = compute_capability_of(mesh_of(x))
    if capability is not None and capability < _FP8_SINCE:
        raise NotImplementedError(f"compute capability {capability}; FP8 came with {_FP8_SINCE}")
    call = functools.partial(triton_call, compute_capability=capability, **_constants(format, rule))
    scale_dtype = jnp.float32 if rule.scale_format is None else jnp.uint8

    asked = [_cell(granularity, x.shape) for granularity in granularities]
    cells = tuple(dict.fromkeys(asked))
    side, k = max(cells[0]), x.shape[-1]
    if side in BLOCKS and all(cell in ((1, side), (side, 1), (side, side)) for cell in cells):
        local = functools.partial(_tiles, call, format.dtype, scale_dtype, cells)
    elif cells == ((1, k),) and k <= LONGEST_ROW:
        local = functools.partial(_rows, call, format.dtype, scale_dtype)
    else:
        raise NotImplementedError(
            f"{granularities} of {list(x.shape)}; it has tiles 1xT, Tx1, TxT of one T of {[*BLOCKS]}, and rows of up to "
            f"{LONGEST_ROW} values"
        )

    def with_bytes(x: Array) -> tuple[Array, ...]:
        results = local(x)
        if rule.scale_format is None:
            return results
        dtype = rule.scale_format.dtype
        return tuple(lax.bitcast_convert_type(r, dtype) if r.dtype == jnp.uint8 else r for r in results)

    tiled = min(x.ndim, 2)
    largest = max(cell[0] for cell in cells), max(cell[1] for cell in cells)
    of_results = tuple(cell[-tiled:] for pair in cells for cell in ((1, 1), pair))
    results = on_mesh(with_bytes, largest[-tiled:], of_results)(x)
    copies = dict(zip(cells, zip(results[::2], results[1::2], strict=True), strict=True))
    return tuple(
        QuantizedTensor(*copies[cell], granularity, x.dtype, rule.exact)
        for granularity, cell in zip(granularities, asked, strict=True)
    )


def _cell(granularity: AbstractGranularity, shape: tuple[int, ...]) -> Cell:
    ndim = len(shape)
    if isinstance(granularity, PerBlock):
        *lead, down, across = (1, *granularity.along(ndim))
        if set(lead) <= {1}:
            return down, across
    if isinstance(granularity, PerAxis) and {axis % ndim for axis in granularity.axes} == {*range(ndim - 1)}:
        return 1, shape[-1]
    raise NotImplementedError(f"{granularity!r} of an array of {ndim} axes")


def _constants(format: Format, rule: ScaleRule) -> dict[str, Any]:
    """What the device code has to know of them, by the names of its arguments."""
    return {
        "LARGEST": format.max,
        "EXPONENT": format.max_exponent,
        "NAN": format.nan_byte,
        "E8M0": rule.scale_format is not None,
        "POWER_OF_TWO": rule.power_of_two,
        "CEIL": rule.scale_rounding == "rceil",
    }


def _rows(call: Call, dtype: Any, scale_dtype: Any, x: Array) -> tuple[Array, ...]:
    """x [.., K] with one scale a row: values [.., K] and scale [.., 1]."""
    k = x.shape[-1]
    m = x.size // k
    block = 1 << (k - 1).bit_length()
    rows = max(1, ROW_VALUES // block)
    values, scale = call(
        x, kernel=kernels.quantize_rows, M=m, K=k, ROWS=rows, BLOCK=block,
        grid=-(-m // rows), warps=rows * block // _WARP_VALUES,
        results=[jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct((*x.shape[:-1], 1), scale_dtype)],
    )  # fmt: skip
    return values, scale


def _tiles(call: Call, dtype: Any, scale_dtype: Any, cells: tuple[Cell, ...], x: Array) -> tuple[Array, ...]:
    """x [.., M, K] in tiles: values [.., M, K] and scale [.., ceil(M / down), ceil(K / across)] of each cell."""
    block, warps = BLOCKS[max(cells[0])]
    k = x.shape[-1]
    merged = all(x.shape[-2] % down == 0 for down, _ in cells if down > 1)
    m = x.size // k if merged else x.shape[-2]
    lead = x.size // (m * k)
    if max(m, k) * block >= _OFFSETS:
        raise NotImplementedError(f"an axis of {max(m, k)}: int32 does not hold the offsets in a block of {block}")
    results = []
    for down, across in cells:
        scale = -(-m // down), -(-k // across)
        results += [
            jax.ShapeDtypeStruct((lead, k, m) if across == 1 else (lead, m, k), dtype),
            jax.ShapeDtypeStruct((lead, *scale[::-1]) if down == 1 else (lead, *scale), scale_dtype),
        ]
    unused = {f"{name}_{n}": None for n in range(len(cells), 3) for name in ("values", "scale")}
    written = call(
        x, kernel=kernels.quantize_tiles, M=m, K=k, BLOCK=block, TILES=cells,
        grid=lead * -(-m // block) * -(-k // block), warps=warps, results=results, **unused,
    )  # fmt: skip
    shaped: list[Array] = []
    for n, (down, across) in enumerate(cells):
        values, scale = written[2 * n : 2 * n + 2]
        values = values.swapaxes(1, 2) if across == 1 else values
        scale = scale.swapaxes(1, 2) if down == 1 else scale
        downwards = x.shape[:-1] if down == 1 else (*x.shape[:-2], -(-x.shape[-2] // down))
        shaped += [values.reshape(x.shape), scale.reshape(*downwards, -(-k // across))]
    return tuple(shaped)
