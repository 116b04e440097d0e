"""The quantizer in Triton, called through jax-triton.

The portable one. It reads x once, whatever its shape.

It has tiles of 128 or of 32, any set of 1xT, Tx1 and TxT in one read; and rows with one scale each.
A copy that runs along columns is written as its transpose, [K, M], as matmuls read an operand that
is contracted along its first axis. Scales of rows go out along M, those of columns along K.

Letters: M, K the last two axes. The axes in front are merged into M where that cuts no tile, else
  counted by L; T the side of a tile.

References:
  Tillet et al., Triton, MAPL 2019, triton-lang.org; jax-triton, github.com/jax-ml/jax-triton.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels._on_mesh import mesh_of, on_mesh
from jaxfp8.kernels._platform import compute_capability_of
from jaxfp8.kernels.quantize import _triton_kernels as kernels
from jaxfp8.kernels.triton._call import triton_call
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.prologues._prologue import Produced, Source
from jaxfp8.tensors._cast import Cast
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

Cell: TypeAlias = tuple[int, int]
"""How many values down and across have one scale."""

# Side of a tile -> side of the block that a program reads, and its warps. 32 values a thread or
# less: with twice as many, two directions take 205 registers of a thread and leave a multiprocessor
# 8 warps.
BLOCKS = {128: (128, 16), 32: (64, 8)}
# 32 values a thread, again. A block of threads has 32 warps at most, and 64 registers a thread
# then: longer rows spill.
ROW_VALUES = 8192
LONGEST_ROW = 32768
_WARP_VALUES = 1024
_OFFSETS = 2**31  # inside of a block they are int32
_FP8_SINCE = 89  # compute capability of the first GPUs with FP8 conversions, Ada (PTX ISA, cvt)


def quantize(
    x: Source, cast: Cast, *, key: Array | None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.quantize._api.quantize`. It ignores `transposed`, and sums no columns.

    Raises:
      NotImplementedError: for other granularities than tiles of 1xT, Tx1 and TxT of one T, 32 or
        128, and PerAxis of all axes but the last, if that has no more than 32768 values; stochastic
        rounding, float64, empty arrays; GPUs without FP8; meshes that are manual in part, or whose
        shards cut tiles or rows (an Auto mesh gathers those).
    """
    del key
    if isinstance(x, Produced):
        raise NotImplementedError(
            f"prologue={x.prologue!r}: it reads one array; quantize prologue(*arrays)"
        )
    if cast.rounding != "nearest" or x.dtype.itemsize > 4 or not x.size:
        raise NotImplementedError(f"rounding={cast.rounding!r}, {x.dtype}{list(x.shape)}")
    return _quantize(x, cast), CastExtras()


# One program where there is none around it; op by op, jax 0.12 cannot run what jax-triton 0.4.1
# makes.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _quantize(x: Array, cast: Cast) -> tuple[QuantizedTensor, ...]:
    capability = compute_capability_of(mesh_of(x))
    if capability is not None and capability < _FP8_SINCE:
        raise NotImplementedError(f"compute capability {capability}; FP8 came with {_FP8_SINCE}")
    cells = [_cell(granularity, x.shape) for granularity in cast.granularities]
    # Two granularities may be one kind of tile: PerBlock((1, 32)) and PerBlock((32,)).
    kernel = _Kernel(cast, tuple(dict.fromkeys(cells)), capability)
    launch = kernel.launcher(x.shape)

    def local(x: Array) -> tuple[Array, ...]:
        return tuple(kernel.in_format(result) for result in launch(x))

    tiled = min(x.ndim, 2)
    largest = tuple(max(sides) for sides in zip(*kernel.cells, strict=True))
    of_results = tuple(cell[-tiled:] for pair in kernel.cells for cell in ((1, 1), pair))
    results = on_mesh(local, largest[-tiled:], of_results)(x)
    of_cells = dict(zip(kernel.cells, zip(results[::2], results[1::2], strict=True), strict=True))
    values, scales = zip(*(of_cells[cell] for cell in cells), strict=True)
    return cast.copies(values, scales, x.dtype)


def _cell(granularity: AbstractGranularity, shape: Axes) -> Cell:
    ndim = len(shape)
    if granularity.in_tiles:
        *lead, down, across = (1, *granularity.along(ndim))
        if set(lead) <= {1}:
            return down, across
    varies = [granularity.has_cells_along(axis, ndim) for axis in range(ndim)]
    if granularity.in_rows and varies == [True] * (ndim - 1) + [False]:
        return 1, shape[-1]
    raise NotImplementedError(f"{granularity!r} of an array of {ndim} axes")


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel, with all that the cast and the GPU decide.

    Attributes:
      cast: how.
      cells: the kinds of tiles that it writes copies in.
      compute_capability: of the GPU to compile for; None asks the GPU.
    """

    cast: Cast
    cells: tuple[Cell, ...]
    compute_capability: int | None

    def in_format(self, result: Array) -> Array:
        """A result of the kernel; if it is a scale in E8M0, in that format instead of bytes."""
        scale_format = self.cast.rule.scale_format
        if scale_format is None or result.dtype != jnp.uint8:
            return result
        return lax.bitcast_convert_type(result, scale_format.dtype)

    def launcher(self, shape: Axes) -> Callable[[Array], tuple[Array, ...]]:
        """The method that launches the kernel for tiles, or the one for rows.

        Raises:
          NotImplementedError: for other cells.
        """
        side, k = max(self.cells[0]), shape[-1]
        if side in BLOCKS and {*self.cells} <= {(1, side), (side, 1), (side, side)}:
            return self._in_tiles
        if self.cells == ((1, k),) and k <= LONGEST_ROW:
            return self._in_rows
        raise NotImplementedError(
            f"{self.cast.granularities} of {list(shape)}; it has tiles 1xT, Tx1, TxT of one T of "
            f"{[*BLOCKS]}, and rows of up to {LONGEST_ROW} values"
        )

    @property
    def _scale_dtype(self) -> DType:
        """The dtype in which the kernel writes scales. It writes E8M0 as bytes."""
        return jnp.float32 if self.cast.rule.scale_format is None else jnp.uint8

    def _results(self, *shapes: tuple[Axes, Axes]) -> list[jax.ShapeDtypeStruct]:
        """What the kernel writes, from the shapes of values and of scales of each cell."""
        dtypes = self.cast.format.dtype, self._scale_dtype
        return [
            jax.ShapeDtypeStruct(*each)
            for pair in shapes
            for each in zip(pair, dtypes, strict=True)
        ]

    def _call(self, x: Array, **launch: Any) -> Sequence[Array]:
        """`triton_call` with what the device code has to know of the format and the rule."""
        format, rule = self.cast.format, self.cast.rule
        return triton_call(
            x,
            compute_capability=self.compute_capability,
            LARGEST=format.max,
            EXPONENT=format.max_exponent,
            NAN=format.nan_byte,
            E8M0=rule.scale_format is not None,
            POWER_OF_TWO=rule.power_of_two,
            CEIL=rule.scale_rounding == "rceil",
            **launch,
        )

    def _in_rows(self, x: Array) -> tuple[Array, ...]:
        """x [.., K] with one scale a row: values [.., K] and scale [.., 1]."""
        k = x.shape[-1]
        m = x.size // k
        block = 1 << (k - 1).bit_length()
        rows = max(1, ROW_VALUES // block)
        values, scale = self._call(
            x,
            kernel=kernels.quantize_rows,
            M=m,
            K=k,
            ROWS=rows,
            BLOCK=block,
            grid=-(-m // rows),
            warps=rows * block // _WARP_VALUES,
            results=self._results((x.shape, (*x.shape[:-1], 1))),
        )
        return values, scale

    def _in_tiles(self, x: Array) -> tuple[Array, ...]:
        """x [.., M, K] in tiles.

        Values [.., M, K] and scale [.., ceil(M / down), ceil(K / across)] of each cell.
        """
        cells = self.cells
        block, warps = BLOCKS[max(cells[0])]
        k = x.shape[-1]
        merged = all(x.shape[-2] % down == 0 for down, _ in cells if down > 1)
        m = x.size // k if merged else x.shape[-2]
        lead = x.size // (m * k)
        if max(m, k) * block >= _OFFSETS:
            raise NotImplementedError(
                f"an axis of {max(m, k)}: int32 does not hold the offsets in a block of {block}"
            )
        shapes = []
        for down, across in cells:
            scale = -(-m // down), -(-k // across)
            shapes.append((
                (lead, k, m) if across == 1 else (lead, m, k),
                (lead, *scale[::-1]) if down == 1 else (lead, *scale),
            ))  # fmt: skip
        unused = {f"{name}_{n}": None for n in range(len(cells), 3) for name in ("values", "scale")}
        written = self._call(
            x,
            kernel=kernels.quantize_tiles,
            M=m,
            K=k,
            BLOCK=block,
            TILES=cells,
            grid=lead * -(-m // block) * -(-k // block),
            warps=warps,
            results=self._results(*shapes),
            **unused,
        )
        shaped: list[Array] = []
        for n, cell in enumerate(cells):
            shaped += self._with_axes_of_x(x.shape, cell, *written[2 * n : 2 * n + 2])
        return tuple(shaped)

    def _with_axes_of_x(
        self, shape: Axes, cell: Cell, values: Array, scale: Array
    ) -> tuple[Array, Array]:
        """What the kernel wrote, with the axes of x."""
        down, across = cell
        values = values.swapaxes(1, 2) if across == 1 else values
        scale = scale.swapaxes(1, 2) if down == 1 else scale
        rows = shape[:-1] if down == 1 else (*shape[:-2], -(-shape[-2] // down))
        return values.reshape(shape), scale.reshape(*rows, -(-shape[-1] // across))
