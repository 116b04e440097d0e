"""`scaled_matmul`: two QuantizedTensors in, high precision out."""

from typing import TypedDict, Unpack

import jax

from jaxfp8._call import check_options
from jaxfp8._geometry import Geometry, OperandAxes, check
from jaxfp8._quantized_tensor import QuantizedTensor, validate
from jaxfp8._typing import Array, DotDimensionNumbers, DType
from jaxfp8.kernels.scaled_matmul._api import check_add_to, multiply
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._formats import E5M2, check_out_dtype, product_dtype
from jaxfp8.plan._kernels import Kernels, check_kernels


class ScaledMatmulOptions(TypedDict, total=False):
    """Options of `fp8.scaled_matmul`: fields of `MatmulCall`."""

    fast_accumulation: bool
    out_sharding: jax.sharding.NamedSharding | jax.P | None


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers | None = None,
    preferred_element_type: DType | None = None,
    add_to: Array | None = None,
    kernels: Kernels | None = None,
    **options: Unpack[ScaledMatmulOptions],
) -> Array:
    """`dequantize(lhs) @ dequantize(rhs)`, accumulated in float32.

    With `add_to`, `add_to + dequantize(lhs) @ dequantize(rhs)`.

    Args:
      lhs: [..., M, K] or as `dimension_numbers` say. It has one scale, a scale for each index of
        the axes that are not contracted, or tiles along a contracted axis. At most one operand
        has square tiles.
      rhs: [K, N] or as `dimension_numbers` say.
      dimension_numbers: as in `jax.lax.dot_general`. By default the last axis of lhs is contracted
        with the first axis of rhs.
      preferred_element_type: dtype of the result. The default is the dtype of `add_to`. Without
        `add_to` it is that of `jax.lax.dot_general`, see `fp8.dot_general`.
      add_to: [..., M, N], any float dtype. It is added in float32, before the result is rounded.
        One use is to sum the gradients of microbatches. In cuBLAS it is C with beta = 1. If it has
        the dtype of the result, Hopper's kernel overwrites it. Donate it then, or XLA copies it
        first.
      kernels: the kernels that multiply. `fp8.Kernels("h200")` selects the kernel that is written
        for that chip. By default XLA multiplies, on every chip. See `fp8.Kernels`.
      **options: `fast_accumulation` and `out_sharding`, see below.

    Options:
      fast_accumulation: let Hopper's tensor cores keep about 14 bits of each partial sum
        (cuBLASLt's fast mode).
      out_sharding: as in `jax.lax.dot_general`, for Explicit meshes.

    Returns:
      [..., M, N], batch axes first.

    Raises:
      TypeError: if an operand is not a QuantizedTensor. Also if the dtype of the result or of
        `add_to` is not a float.
      ValueError: if the shapes of the operands or of `add_to` do not fit. Also in three other
        cases. Both operands are E5M2, which no hardware multiplies. A scale varies along a
        contracted axis, and is not the scale of a tile. The tiles of the two operands differ, or
        are square on both sides.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> q = fp8.quantize(7 * jnp.eye(2), fp8.E4M3)
      >>> fp8.scaled_matmul(q, q)
      Array([[49.,  0.],
             [ 0., 49.]], dtype=float32)
      >>> fp8.scaled_matmul(q, q, add_to=jnp.ones((2, 2), jnp.bfloat16))
      Array([[50, 1],
             [1, 50]], dtype=bfloat16)
    """
    check_options("fp8.scaled_matmul", ScaledMatmulOptions, options)
    if not isinstance(fast := options.get("fast_accumulation", False), bool):
        raise TypeError(f"fast_accumulation={fast!r} must be True or False.")
    given = check_kernels(kernels)
    validate(lhs, "lhs")
    validate(rhs, "rhs")
    if dimension_numbers is None:
        dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    if lhs.format == rhs.format == E5M2:
        raise ValueError(
            "lhs and rhs are both E5M2, which no hardware multiplies; quantize one of them to E4M3."
        )
    dimension_numbers = check(lhs.shape, rhs.shape, dimension_numbers)
    geometry = Geometry.of(dimension_numbers, lhs.ndim, rhs.ndim)
    # A scale is applied to a sum of products. All products of one sum must have the same scales.
    _check_tiles(lhs, rhs, geometry)
    _check_rows("lhs", lhs, geometry.lhs)
    _check_rows("rhs", rhs, geometry.rhs)
    if add_to is not None:
        check_add_to(add_to, geometry.out_shape(lhs.shape, rhs.shape))
    if preferred_element_type is None and add_to is not None:
        preferred_element_type = add_to.dtype
    if preferred_element_type is None:
        preferred_element_type = product_dtype(lhs.dtype, rhs.dtype)
    call = MatmulCall(
        geometry=geometry,
        out_dtype=check_out_dtype(preferred_element_type),
        **options,
    )
    attempts = given.attempts_of_one(lhs, rhs, call, add_to=add_to)
    return multiply(lhs, rhs, call, attempts, add_to=add_to)


def _check_rows(name: str, operand: QuantizedTensor, axes: OperandAxes) -> None:
    """Raise ValueError if per-row scales vary along a contracted axis."""
    if operand.granularity.in_rows and any(operand.scale.shape[a] != 1 for a in axes.contracted):
        raise ValueError(
            f"{name} is scaled by {operand.granularity!r}, which varies along its contracted axes "
            f"{axes.contracted}. Such scales cannot leave the sum. Quantize it along the axes "
            "that are kept."
        )


def _check_tiles(lhs: QuantizedTensor, rhs: QuantizedTensor, geometry: Geometry) -> None:
    """Raise ValueError unless tiles run along a contracted axis, with one length on both sides."""
    tiles = []
    for name, operand, axes in (("lhs", lhs, geometry.lhs), ("rhs", rhs, geometry.rhs)):
        if not operand.granularity.in_tiles:
            continue
        tile = operand.granularity.along(operand.ndim)
        tiles.append([tile[axis] for axis in axes.contracted])
        if not axes.contracted:
            raise ValueError(
                f"{name} {list(operand.shape)} is in tiles, but no axis is contracted. Tiles need "
                "a contracted axis. Quantize it with fp8.PerTensor() or fp8.PerAxis(...)."
            )
        if all(size == 1 for size in tiles[-1]):
            raise ValueError(
                f"{name} {list(operand.shape)} is in tiles of {tile}. The matmul contracts axes "
                f"{axes.contracted}, where its tiles have one value. Quantize it in the other "
                "direction."
            )
    if len(tiles) == 2 and tiles[0] != tiles[1]:
        raise ValueError(
            f"lhs has tiles of {tiles[0]} along its contracted axes {geometry.lhs.contracted}. rhs "
            f"has tiles of {tiles[1]} along {geometry.rhs.contracted}. Scales can leave a partial "
            "sum only if both sides have the same tiles. Quantize both with one tile length."
        )
    if lhs.granularity.is_square and rhs.granularity.is_square:
        raise ValueError(
            f"lhs {lhs.granularity!r} and rhs {rhs.granularity!r} are both in 2D tiles. No kernel "
            "multiplies them. Quantize one with tiles along the contracted axis only, for "
            "instance PerBlock((1, T)) if that is its last axis."
        )
