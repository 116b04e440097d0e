"""The quantizer in Triton, called through jax-triton.

It is written for every NVIDIA GPU with FP8. It reads x once, whatever its shape.

It makes copies in tiles with T = 128 or 32, in one read: any set of 1xT, Tx1 and TxT. It also takes
one scale for each row. A copy in tiles of Tx1 is written transposed, [K, M]. Matmuls that contract
the first axis of the operand read it like that. Scales of tiles of 1xT are written with M as the
last axis, those of Tx1 with K.

Letters: M, K the last two axes; T the side of a tile; L the axes in front. If M has whole tiles,
  the axes in front are merged into M, and L is 1.

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

from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels._dispatch import compute_capability_of
from jaxfp8.kernels._on_mesh import mesh_of, on_mesh
from jaxfp8.kernels._triton_call import triton_call
from jaxfp8.kernels.quantize import _triton_kernels as kernels
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.prologues._prologue import Produced, Source, value_of

_Cell: TypeAlias = tuple[int, int]
"""How many values share a scale, along M and along K."""

# Side of a tile -> side of the block of values that a program reads, and its warps. That is at most
# 32 values for each thread. With 64 values, two directions take 205 registers of a thread, and only
# 8 warps fit on a multiprocessor.
_BLOCKS = {128: (128, 16), 32: (64, 8)}
# Values that a program reads in whole rows: several short rows, or one row that is longer.
_ROW_VALUES = 8192
# A program has at most 32 warps, which are 32768 values at 32 values a thread. A thread then has 64
# registers, so longer rows would spill.
_LONGEST_ROW = 32768
_WARP_VALUES = 1024  # 32 threads of 32 values
_OFFSETS = 2**31  # offsets inside a block are int32
_FP8_SINCE = 89  # compute capability of the first GPUs with FP8 conversions, Ada (PTX ISA, cvt)


def cast_copies(
    x: Source, cast: Cast, scales: Any, *, key: Array | None
) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
    """See `kernels.cast._api.cast_copies`. It ignores `transposed`, and sums no columns.

    It takes tiles of 1xT, Tx1 and TxT with one T, 32 or 128, or PerAxis of all axes but the last,
    of at most 32768 values. It takes no known scales, no prologue, no stochastic rounding, no
    float64 and no empty array. `on_mesh` refuses some meshes, and an Auto mesh gathers x if its
    shards cut tiles.
    """
    del key
    if scales is not None:
        raise NotImplementedError(
            "The scales are known, and this kernel finds scales. Write casts='xla' in fp8.Kernels."
        )
    if isinstance(x, Produced):
        raise NotImplementedError(
            f"The cast has prologue={x.prologue!r}. This kernel reads one array. Quantize "
            "prologue(*arrays)."
        )
    x = value_of(x)  # XLA gathers rows before the kernel reads them
    if cast.rounding != "nearest" or x.dtype.itemsize > 4 or not x.size:
        raise NotImplementedError(
            f"The cast has rounding={cast.rounding!r}, x is {x.dtype}{list(x.shape)}. This kernel "
            "needs rounding='nearest', at most 4 bytes a value, and an array that is not empty. "
            "Write casts='xla' in fp8.Kernels."
        )
    return _quantize(x, cast), CastExtras()


# Outside `jax.jit` this makes one program. Op by op, jax 0.12 cannot run the calls of jax-triton
# 0.4.1.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _quantize(x: Array, cast: Cast) -> tuple[QuantizedTensor, ...]:
    capability = compute_capability_of(mesh_of(x))
    if capability is not None and capability < _FP8_SINCE:
        raise NotImplementedError(
            f"The GPU has compute capability {capability}. FP8 needs {_FP8_SINCE} or more. Write "
            "casts='xla' in fp8.Kernels."
        )
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


def _cell(granularity: AbstractGranularity, shape: Axes) -> _Cell:
    ndim = len(shape)
    if granularity.in_tiles:
        *lead, down, across = (1, *granularity.along(ndim))
        if set(lead) <= {1}:
            return down, across
    varies = [granularity.has_cells_along(axis, ndim) for axis in range(ndim)]
    if granularity.in_rows and varies == [True] * (ndim - 1) + [False]:
        return 1, shape[-1]
    raise NotImplementedError(
        f"The cast has {granularity!r} for an array of {ndim} axes. This kernel takes tiles along "
        "the last two axes, or one scale for each row. Write casts='xla' in fp8.Kernels."
    )


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel for one cast and one GPU."""

    cast: Cast
    cells: tuple[_Cell, ...]  # the kinds of tiles, one for each copy that it writes
    compute_capability: int | None  # of the GPU to compile for; None asks the GPU

    def in_format(self, result: Array) -> Array:
        """A result of the kernel; if it is a scale in E8M0, in that format instead of bytes."""
        scale_format = self.cast.rule.scale_format
        if scale_format is None or result.dtype != jnp.uint8:
            return result
        return lax.bitcast_convert_type(result, scale_format.dtype)

    def launcher(self, shape: Axes) -> Callable[[Array], tuple[Array, ...]]:
        """The method that launches the kernel for tiles, or the one for rows."""
        side, k = max(self.cells[0]), shape[-1]
        if side in _BLOCKS and {*self.cells} <= {(1, side), (side, 1), (side, side)}:
            return self._in_tiles
        if self.cells == ((1, k),) and k <= _LONGEST_ROW:
            return self._in_rows
        raise NotImplementedError(
            f"The cast has {self.cast.granularities} for {list(shape)}. This kernel takes tiles "
            f"1xT, Tx1, TxT of one T in {[*_BLOCKS]}, or rows of up to {_LONGEST_ROW} values. "
            "Write casts='xla' in fp8.Kernels."
        )

    @property
    def _scale_dtype(self) -> DType:
        """The dtype in which the kernel writes scales. It writes E8M0 as bytes."""
        return jnp.float32 if self.cast.rule.scale_format is None else jnp.uint8

    def _results(self, *shapes: tuple[Axes, Axes]) -> list[jax.ShapeDtypeStruct]:
        """The types of the results, from the shapes of values and of scales of each cell."""
        dtypes = self.cast.format.dtype, self._scale_dtype
        return [
            jax.ShapeDtypeStruct(*each)
            for pair in shapes
            for each in zip(pair, dtypes, strict=True)
        ]

    def _call(self, x: Array, **launch: Any) -> Sequence[Array]:
        """`triton_call` with the constants of the format and of the rule."""
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
        block = 1 << (k - 1).bit_length()  # Triton's blocks are powers of two
        rows = max(1, _ROW_VALUES // block)
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
        """Values [.., M, K] and scale [.., ceil(M / down), ceil(K / across)] of each cell."""
        cells = self.cells
        block, warps = _BLOCKS[max(cells[0])]
        k = x.shape[-1]
        merged = all(x.shape[-2] % down == 0 for down, _ in cells if down > 1)
        m = x.size // k if merged else x.shape[-2]
        lead = x.size // (m * k)
        if max(m, k) * block >= _OFFSETS:
            raise NotImplementedError(
                f"x has an axis of {max(m, k)} values. The offsets in a block of {block} must fit "
                "in int32. Write casts='xla' in fp8.Kernels."
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
        self, shape: Axes, cell: _Cell, values: Array, scale: Array
    ) -> tuple[Array, Array]:
        """The values and scales that the kernel wrote, with the axes of x."""
        down, across = cell
        values = values.swapaxes(1, 2) if across == 1 else values
        scale = scale.swapaxes(1, 2) if down == 1 else scale
        rows = shape[:-1] if down == 1 else (*shape[:-2], -(-shape[-2] // down))
        return values.reshape(shape), scale.reshape(*rows, -(-shape[-1] // across))
