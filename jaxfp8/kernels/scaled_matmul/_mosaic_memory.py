"""What a block of threads of Hopper's matmul has in shared memory: steps, scales, results, barriers.

Letters: M N K matmul; T = 128.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels.scaled_matmul._mosaic_scaling import ALIGNED, Scaling, T, of_bytes
from jaxfp8.kernels.scaled_matmul._mosaic_tiling import ROWS, WARPGROUPS, Tiling

_LEAST = 32  # bytes of a permuted row in shared memory


def whole_row(n: int, itemsize: int) -> int:
    """N up to what global memory has to have for shared memory, multiples of 32 bytes.

    Example:
      >>> whole_row(200, 2), whole_row(200, 4)
      (208, 200)
    """
    return n + -n % (_LEAST // itemsize)


def shared_memory(
    n: int, formats: tuple[DType, DType], out_dtype: DType, tiling: Tiling, scaling: Scaling, add_to: DType | None
) -> list[Any]:
    """(values and scales of both operands), (results, C, its barriers), barriers of steps that are there and that are read.

    None stands for what there is not. `n`, columns of rhs; `add_to`, the dtype of C.
    """
    stages, tile, added = tiling.stages, tiling.tile, 0 if add_to is None else add_to.itemsize
    sizes: dict[str, Any] = {"scaling": scaling, "itemsize": out_dtype.itemsize, "added": added}
    slots, width = tiling.slots(**sizes), tiling.width(**sizes)
    boxes = [scaling.box(side, extent) for side, extent in enumerate(tile)]
    arrivals: dict[str, Any] = {"num_arrivals": WARPGROUPS, "num_barriers": stages}
    return [
        (
            *(_staged((stages, extent, T), format, scaling.tile) for extent, format in zip(tile, formats, strict=True)),
            *(None if box is None else _staged_scales(stages, *box) for box in boxes),
        ),
        (
            _staged((WARPGROUPS, slots, ROWS, width), out_dtype, whole_row(n, out_dtype.itemsize)),
            None if add_to is None else _staged((WARPGROUPS, ROWS, width), add_to, whole_row(n, added)),
            None if add_to is None else plgpu.Barrier(num_barriers=WARPGROUPS),
        ),
        plgpu.Barrier(num_arrivals=2 + sum(box is not None for box in boxes), num_barriers=stages),
        plgpu.Barrier(**arrivals)
        if tiling.cluster == 1
        else plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals),
    ]


def _staged(shape: Axes, dtype: DType, along: int) -> Any:
    """Tiles in shared memory as TMA writes and reads them, permuted.

    No box goes beyond `along` values, a row of global memory or a tile of K: what is multiplied has whole boxes.
    """
    itemsize = jnp.dtype(dtype).itemsize
    inner = math.gcd(128 // itemsize, shape[-1], along)
    transforms = (plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(inner * itemsize))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _staged_scales(stages: int, shape: Axes, dtype: Any) -> Any:
    """Scales of the steps in shared memory, each at a multiple of what TMA writes at."""
    *lead, last = shape
    return plgpu.SMEM((stages, *lead, max(last, ALIGNED // 4) if not lead else last), dtype)


def load(scales: Any, across: int) -> Array:
    """Scales in the registers of the threads that hold what they scale; `across`, the axis that they do not run along."""
    found = plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(across))  # type: ignore[call-arg]  # of jax before 0.11
    return of_bytes(found) if found.dtype == jnp.uint8 else found
