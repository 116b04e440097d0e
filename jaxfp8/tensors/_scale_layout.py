"""Scale layouts: the compact form that tensors are kept and sent in, and the forms that matmul kernels read.

The **compact** form is that of `QuantizedTensor`: nothing is transposed or padded, so a concatenation of shards is the
whole. For values [.., A, B] in tiles of T:

  tiles (1, T), contracted along B      scale [.., A, ceil(B/T)]
  tiles (T, 1), contracted along A      scale [.., ceil(A/T), B]
  tiles (T, T), along either            scale [.., ceil(A/T), ceil(B/T)]

The **matmul-ready** forms are of an operand seen as [R, K], K contracted, with C = ceil(K/T) scales a row. pad4, pad128: up
to the next multiple.

  Hopper, T = 128      tiles (1, T)     scale [.., C, pad4(R)]; values [.., R, K]
                       tiles (T, T)     scale [.., ceil(R/T), pad4(C)]; values [.., R, K]
  Blackwell, T = 32    any              scale [.., pad128(R)/128, pad4(C)/4, 32, 4, 4]; values as they are

Padding is zero bits: 0.0 in float32, 2^-127 in E8M0. It never reaches a result, for what it would scale are rows that the
product does not have, or values beyond K, which count as zeros; only NaN would show (0 * NaN), and the cast of 0 to E8M0 is
NaN, hence bits.

References:
  TransformerEngine user guide, FP8 blockwise scaling, developer notes ("Swizzle of scaling factors"); TransformerEngine,
  jax/cpp_extensions/gemm.py (swizzled scales); cuBLAS documentation, "1D block scaling factors layout".
"""

import abc
import dataclasses
import functools
from typing import ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, DType
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.tensors._quantized_tensor import QuantizedTensor, validate

Contracted: TypeAlias = Literal[-1, -2]
"""The axis of the values that a matmul contracts: the last (row-wise) or the one before it (column-wise)."""


class AbstractScaleLayout(abc.ABC):
    """Where a kernel looks for the scales of an operand [R, K] in tiles of `tile` along K.

    Attributes:
      tile: T.
      contracted_last: whether the kernel reads values with K last.
    """

    tile: ClassVar[int]
    contracted_last: ClassVar[bool]

    @abc.abstractmethod
    def arrange(self, scale: Array, *, rows: int, square: bool) -> Array:
        """Scales [.., R, C], of square tiles [.., ceil(R/T), C], as the kernel reads them; `rows` is R."""

    @abc.abstractmethod
    def restore(self, arranged: Array, *, rows: int, cells: int, square: bool) -> Array:
        """The inverse of `arrange`, exact; `rows` is R and `cells` C."""


@dataclasses.dataclass(frozen=True)
class HopperLayout(AbstractScaleLayout):
    """Blockwise FP8 on Hopper: tiles of 128, the scales of a K tile beside each other, a multiple of 16 bytes (for TMA).

    Example:
      >>> HopperLayout().arrange(jnp.ones((6, 3)), rows=6, square=False).shape
      (3, 8)
      >>> HopperLayout().arrange(jnp.ones((2, 3)), rows=200, square=True).shape
      (2, 4)
    """

    tile: ClassVar[int] = 128
    contracted_last: ClassVar[bool] = True

    def arrange(self, scale: Array, *, rows: int, square: bool) -> Array:
        del rows
        return _from_bits(_padded(_bits(scale) if square else _bits(scale).mT, (1, 4)), scale.dtype)

    def restore(self, arranged: Array, *, rows: int, cells: int, square: bool) -> Array:
        if square:
            return arranged[..., :cells]
        return arranged[..., :rows].mT


@dataclasses.dataclass(frozen=True)
class BlackwellLayout(AbstractScaleLayout):
    """MXFP8 on Blackwell: tiles of 32, scales in blocks of 128 rows by 4 tiles, 512 bytes each.

    The scale of row r and tile c is at `[r // 128, c // 4, r % 32, r // 32 % 4, c % 4]`. Every row has scales of its own, so
    those of a square tile are repeated.

    Example:
      >>> BlackwellLayout().arrange(jnp.ones((130, 5), jnp.float8_e8m0fnu), rows=130, square=False).shape
      (2, 2, 32, 4, 4)
    """

    tile: ClassVar[int] = 32
    contracted_last: ClassVar[bool] = False

    def arrange(self, scale: Array, *, rows: int, square: bool) -> Array:
        if scale.dtype != E8M0.dtype:
            raise ValueError(
                f"scale has dtype {scale.dtype.name}, but Blackwell reads E8M0; quantize with scale_format=fp8.E8M0."
            )
        bits = _bits(scale)
        bits = jnp.repeat(bits, self.tile, axis=-2)[..., :rows, :] if square else bits
        bits = _padded(bits, (128, 4))
        batch = range(bits.ndim - 2)
        row_blocks, tile_blocks = bits.shape[-2] // 128, bits.shape[-1] // 4
        blocks = bits.reshape(*bits.shape[:-2], row_blocks, 4, 32, tile_blocks, 4)
        return _from_bits(blocks.transpose(*batch, *(len(batch) + axis for axis in (0, 3, 2, 1, 4))), scale.dtype)

    def restore(self, arranged: Array, *, rows: int, cells: int, square: bool) -> Array:
        bits = _bits(arranged)
        batch = range(bits.ndim - 5)
        blocks = bits.transpose(*batch, *(len(batch) + axis for axis in (0, 3, 2, 1, 4)))
        row_blocks, tile_blocks = bits.shape[-5:-3]
        bits = blocks.reshape(*bits.shape[:-5], row_blocks * 128, tile_blocks * 4)[..., :rows, :cells]
        return _from_bits(bits[..., :: self.tile, :] if square else bits, arranged.dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale"],
    meta_fields=["layout", "contracted", "granularity", "dtype", "power_of_two"],
)
@dataclasses.dataclass(frozen=True)
class MatmulReady:
    """A QuantizedTensor as a matmul kernel reads it; made by `matmul_ready`.

    Invariants, with q the tensor that it came from:
      values == (q.values with its last two axes swapped if layout.contracted_last and contracted == -2, else q.values)
      scale  == layout.arrange(q.scale with its last two axes swapped if contracted == -2)

    Attributes:
      values: [.., R, K] FP8 payload (see the table above).
      scale: in the order of the layout.
      layout: the kernel's (static).
      contracted: the axis of the compact values that the matmul contracts, -1 or -2 (static).
      granularity: of the compact values (static).
      dtype: the high-precision dtype that it stands for (static).
      power_of_two: as in `QuantizedTensor` (static).

    Example:
      >>> import jaxfp8 as fp8
      >>> q = fp8.quantize(jnp.ones((300, 72)), fp8.E4M3, fp8.PerBlock((128, 1)))
      >>> ready = matmul_ready(q, HopperLayout())
      >>> ready.contracted, ready.values.shape, ready.scale.shape
      (-2, (72, 300), (3, 72))
    """

    values: Array
    scale: Array
    layout: AbstractScaleLayout
    contracted: Contracted
    granularity: PerBlock
    dtype: DType
    power_of_two: bool

    def compact(self) -> QuantizedTensor:
        """The tensor [.., A, B] that it came from, to the bit."""
        swapped = self.contracted == -2
        values = self.values.mT if swapped and self.layout.contracted_last else self.values
        rows, contracted = values.shape[-1 if swapped else -2], values.shape[self.contracted]
        cells, square = -(-contracted // self.layout.tile), len(self.granularity.tiled_axes) == 2
        scale = self.layout.restore(self.scale, rows=rows, cells=cells, square=square)
        return QuantizedTensor(
            values, _swapped(scale) if swapped else scale, self.granularity, self.dtype, self.power_of_two
        )


def matmul_ready(
    tensor: QuantizedTensor, layout: AbstractScaleLayout, *, contracted: Contracted | None = None
) -> MatmulReady:
    """A tensor with its values and scales laid as a matmul kernel reads them; `.compact()` goes back.

    Args:
      tensor: values [.., A, B] in tiles of `layout.tile` along one of the last two axes, or square ones.
      layout: HopperLayout() or BlackwellLayout().
      contracted: the axis that the matmul contracts, -1 or -2. Tiles along one axis tell it; square ones do not.

    Raises:
      ValueError: for a tensor whose tiles the kernel does not read, and for a `contracted` that is missing or contradicts
        the tiles.

    Example:
      >>> import jaxfp8 as fp8
      >>> w = fp8.quantize(jnp.ones((256, 300)), fp8.E4M3, fp8.PerBlock((128, 128)), power_of_two=True)
      >>> matmul_ready(w, HopperLayout(), contracted=-2).scale.shape
      (3, 4)
      >>> x = fp8.quantize(jnp.ones((300, 72)), fp8.E4M3, fp8.PerBlock((1, 32)), scale_format=fp8.E8M0)
      >>> matmul_ready(x, BlackwellLayout()).scale.shape
      (3, 1, 32, 4, 4)
    """
    validate(tensor)
    if not isinstance(layout, AbstractScaleLayout):
        raise TypeError(f"layout={layout!r} is none; use HopperLayout() or BlackwellLayout().")
    if contracted not in (None, -1, -2):
        raise ValueError(f"contracted={contracted!r} must be -1 or -2, an axis of values [.., A, B].")
    granularity, size = tensor.granularity, layout.tile
    tile = granularity.along(tensor.ndim) if isinstance(granularity, PerBlock) else ()
    runs: dict[tuple[int, ...], tuple[Contracted, ...]] = {(1, size): (-1,), (size, 1): (-2,), (size, size): (-1, -2)}
    if not isinstance(granularity, PerBlock) or tile[-2:] not in runs or any(side > 1 for side in tile[:-2]):
        raise ValueError(
            f"tensor {list(tensor.shape)} has granularity {granularity!r}, but {layout!r} reads tiles of {size}; quantize "
            f"with PerBlock((1, {size})), PerBlock(({size}, 1)) or PerBlock(({size}, {size}))."
        )
    along = runs[tile[-2:]]
    if contracted is None:
        if len(along) > 1:
            raise ValueError(
                f"contracted is missing, and tiles of {tile[-2:]} serve both directions; pass contracted=-1 or contracted=-2."
            )
        (contracted,) = along
    if contracted not in along:
        raise ValueError(
            f"contracted={contracted} contradicts tiles of {tile[-2:]}, which run along axis {along[0]}; quantize the "
            "high-precision array in the other direction."
        )
    swapped = contracted == -2
    scale = _swapped(tensor.scale) if swapped else tensor.scale
    rows = tensor.shape[-1 if swapped else -2]
    return MatmulReady(
        tensor.values.mT if swapped and layout.contracted_last else tensor.values,
        layout.arrange(scale, rows=rows, square=len(along) > 1),
        layout, contracted, granularity, tensor.dtype, tensor.power_of_two,
    )  # fmt: skip


def _bits(scale: Array) -> Array:
    """E8M0 as bytes: what is only moved must not be converted."""
    return lax.bitcast_convert_type(scale, jnp.uint8) if scale.dtype == E8M0.dtype else scale


def _from_bits(bits: Array, dtype: DType) -> Array:
    return lax.bitcast_convert_type(bits, dtype) if bits.dtype != dtype else bits


def _swapped(scale: Array) -> Array:
    return _from_bits(_bits(scale).mT, scale.dtype)


def _padded(bits: Array, multiples: tuple[int, int]) -> Array:
    """Zeros behind the last two axes, up to multiples."""
    pads = [(0, -size % multiple) for size, multiple in zip(bits.shape[-2:], multiples, strict=True)]
    return jnp.pad(bits, [(0, 0)] * (bits.ndim - 2) + pads)
