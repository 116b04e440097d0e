"""The grouped matmul for XLA: a loop over tiles, with the scaled matmul of one tile inside.

`jax.lax.ragged_dot` is not used: for GPUs and CPUs XLA compiles it to a dense product, with the
work of E groups for each row.
"""

import functools

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.grouped_matmul._over_tiles import groups_product, rows_product
from jaxfp8.kernels.scaled_matmul import _api as scaled_matmul
from jaxfp8.kernels.scaled_matmul._call import MatmulCall


def grouped_matmul(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall, *, backend: str
) -> Array:
    """See `kernels.grouped_matmul._api.multiply`.

    Args:
      lhs: tiles of rows.
      rhs: matrices, or tiles of rows.
      groups: which rows belong to which group.
      call: axes and options of the matmul of one group.
      backend: the scaled matmul that multiplies a tile, "xla" or "cudnn".
    """
    multiply = functools.partial(scaled_matmul.multiply, attempts=(backend,))
    rows, columns = call.geometry.out_shape(lhs.shape[1:], rhs.shape[1:])
    if call.sums_rows:
        product = functools.partial(multiply, call=call.in_float32)
        return groups_product(product, lhs, rhs, groups, (rows, columns), call.out_dtype)
    product = functools.partial(multiply, call=call)
    return rows_product(product, lhs, rhs, groups, columns, call.out_dtype)
