"""The entry to the grouped matmul: two stacks of QuantizedTensors in, high precision out.

A stack is a `QuantizedTensor` whose values and scales have one more axis in front: it holds one
tensor for each group, or for each tile of rows. Its granularity is that of one of these tensors, as
under `jax.vmap`.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Backend, dispatch
from jaxfp8.kernels.grouped_matmul import _reference, _xla
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul._call import MatmulCall


def _elsewhere(
    like: jax.ShapeDtypeStruct,
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    groups: Groups,
    call: MatmulCall,
    *,
    tiling: Any = None,
) -> Array:
    """The grouped matmul that other platforms than CUDA run instead of a kernel."""
    del like, tiling
    return _xla.grouped_matmul(lhs, rhs, groups, call, backend="xla")


BACKENDS: dict[str, Callable[..., Any]] = {
    "cudnn": functools.partial(_xla.grouped_matmul, backend="cudnn"),
    "xla": functools.partial(_xla.grouped_matmul, backend="xla"),
    "mosaic": Backend(
        "jaxfp8.kernels.grouped_matmul._mosaic",
        "grouped_matmul",
        needs="Pallas Mosaic GPU",
        elsewhere=_elsewhere,
    ),
    "reference": _reference.grouped_matmul,
}


def multiply(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    groups: Groups,
    call: MatmulCall,
    attempts: Iterable[str],
) -> Array:
    """The matmul of each group: of its rows with its matrix, or of its rows with its rows.

    Letters: T rows, E groups, P rows of a tile, R tiles.

    Args:
      lhs: tiles of rows [R, P, K].
      rhs: matrices [E, K, N], or with the axes that the call names. If the call sums over rows
        (`MatmulCall.sums_rows`), tiles of rows [R, P, N].
      groups: which rows belong to which group.
      call: axes and options of the matmul of one group, as if it stood alone.
      attempts: names of backends, best first.

    Returns:
      [T, N], with 0 in the rows of no group. If the call sums over rows, [E, K, N], with 0 for a
      group without rows.
    """
    product: Array = dispatch("grouped_matmul", BACKENDS, attempts, lhs, rhs, groups, call)
    return product
