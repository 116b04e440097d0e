"""The door of the scaled matmul: two QuantizedTensors in, high precision out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8._dimension_numbers import check
from jaxfp8._typing import Array, DotDimensionNumbers, DType, Implementation
from jaxfp8.kernels._dispatch import Backend, Chooser, dispatch
from jaxfp8.kernels.scaled_matmul import _cudnn, _reference, _xla
from jaxfp8.kernels.scaled_matmul._add_to import adding, check_add_to
from jaxfp8.kernels.scaled_matmul._matrices import matrix_shape
from jaxfp8.numerics._dtypes import check_out_dtype
from jaxfp8.numerics._formats import E5M2
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.tensors._quantized_tensor import QuantizedTensor, validate

# What no GPU has timed yet is taken only by name.
BACKENDS: dict[str, Callable[..., Any]] = {
    "cudnn": adding(_cudnn.scaled_matmul),
    "xla": adding(_xla.scaled_matmul),
    "mosaic": Backend("jaxfp8.kernels.scaled_matmul._mosaic", "scaled_matmul", needs="Pallas Mosaic GPU"),
    "reference": adding(_reference.scaled_matmul),
}


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers | None = None,
    preferred_element_type: DType | None = None,
    add_to: Array | None = None,
    fast_accumulation: bool = False,
    out_sharding: jax.sharding.NamedSharding | jax.P | None = None,
    chip: str | None = None,
    implementation: Implementation | Chooser = None,
) -> Array:
    """`dequantize(lhs) @ dequantize(rhs)`, accumulated in float32; with `add_to`, `add_to + dequantize(lhs) @ dequantize(rhs)`.

    Args:
      lhs: [..., M, K] or as `dimension_numbers` say; scaled per tensor, along axes that are not contracted, or in tiles, which
        run along a contracted axis. At most one operand has square tiles.
      rhs: [K, N] or as `dimension_numbers` say.
      dimension_numbers: as in `jax.lax.dot_general`; default: the last axis of lhs with the first of rhs.
      preferred_element_type: dtype of the result; default: that of `add_to`, or what the operands' dtypes promote to.
      add_to: [..., M, N], any float: what the product is added to, in float32 and before it is rounded, as gradients of
        microbatches are (cuBLAS: C with beta = 1). "mosaic" writes the result over it if it has its dtype; donate it then, or
        XLA copies it first.
      fast_accumulation: let Hopper's tensor cores keep about 14 bits of each partial sum (cuBLASLt's fast mode).
      out_sharding: as in `jax.lax.dot_general`, for Explicit meshes.
      chip: the chip that the program is compiled for, if its own block-scaled matmul shall be used ("b200"). An argument, never
        detected; None gives a program that is right on every chip.
      implementation: a backend by name, `fp8.Timings` for the one that was fastest, or None for the first that can.

    Returns:
      [..., M, N], batch axes first.

    Raises:
      TypeError: for operands that are no QuantizedTensors, or a result or `add_to` that is no float.
      ValueError: for shapes that do not fit, that of `add_to` too; for E5M2 x E5M2, which no hardware multiplies; for a scale
        that varies along a contracted axis other than in tiles; for tiles that do not match, or are square on both sides.

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
    validate(lhs, "lhs")
    validate(rhs, "rhs")
    if dimension_numbers is None:
        dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    if lhs.format == rhs.format == E5M2:
        raise ValueError("lhs and rhs are both E5M2, which no hardware multiplies; quantize one of them to E4M3.")
    dimension_numbers = check(lhs.shape, rhs.shape, dimension_numbers)
    _check_tiles(lhs, rhs, dimension_numbers)
    for name, operand, contracted in zip(("lhs", "rhs"), (lhs, rhs), dimension_numbers[0], strict=True):
        if not isinstance(operand.granularity, PerTensor | PerBlock) and any(
            operand.scale.shape[axis] != 1 for axis in contracted
        ):
            raise ValueError(
                f"{name} is scaled by {operand.granularity!r}, which varies along its contracted axes {tuple(contracted)}: "
                "such scales cannot leave the sum. Quantize it along the axes that are kept."
            )
    if add_to is not None:
        batch, kept, _ = matrix_shape(lhs.shape, dimension_numbers, 0)
        check_add_to(add_to, batch + kept + matrix_shape(rhs.shape, dimension_numbers, 1)[1])
    if preferred_element_type is None and add_to is not None:
        preferred_element_type = add_to.dtype
    if preferred_element_type is None:
        preferred_element_type = jnp.promote_types(lhs.dtype, rhs.dtype)
    return dispatch(
        "scaled_matmul", BACKENDS, implementation, lhs, rhs,
        dimension_numbers=dimension_numbers, out_dtype=check_out_dtype(preferred_element_type),
        add_to=add_to, fast_accumulation=fast_accumulation, out_sharding=out_sharding, chip=chip,
    )  # fmt: skip


def _check_tiles(lhs: QuantizedTensor, rhs: QuantizedTensor, dimension_numbers: DotDimensionNumbers) -> None:
    """Raise ValueError unless tiles run along a contracted axis, equally long on both sides."""
    tiles = []
    for name, operand, contracted in zip(("lhs", "rhs"), (lhs, rhs), dimension_numbers[0], strict=True):
        if not isinstance(operand.granularity, PerBlock):
            continue
        tile = operand.granularity.along(operand.ndim)
        tiles.append([tile[axis] for axis in contracted])
        if not contracted:
            raise ValueError(
                f"{name} {list(operand.shape)} is in tiles, but no axis is contracted; tiles need one to run along."
            )
        if all(size == 1 for size in tiles[-1]):
            raise ValueError(
                f"{name} {list(operand.shape)} in tiles of {operand.granularity.tile} is contracted along axes "
                f"{tuple(contracted)}, along which its tiles have one value: quantize it in the other direction."
            )
    if len(tiles) == 2 and tiles[0] != tiles[1]:
        raise ValueError(
            f"lhs has tiles of {tiles[0]} along its contracted axes {tuple(dimension_numbers[0][0])}, rhs tiles of {tiles[1]} "
            f"along {tuple(dimension_numbers[0][1])}: scales can leave a partial sum only if both sides have the same tiles."
        )
    if all(isinstance(t.granularity, PerBlock) and len(t.granularity.tiled_axes) > 1 for t in (lhs, rhs)):
        raise ValueError(
            f"lhs {lhs.granularity!r} and rhs {rhs.granularity!r} are both in 2D tiles, which no kernel multiplies; give one "
            "of them tiles along the contracted axis only, PerBlock((1, T)) for a contracted last axis."
        )
