"""The entry to the scaled matmul: two QuantizedTensors in, high precision out."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Attempt, Backend, dispatch
from jaxfp8.kernels.scaled_matmul import _cudnn, _reference, _xla
from jaxfp8.kernels.scaled_matmul._add_to import adding
from jaxfp8.kernels.scaled_matmul._call import MatmulCall


def _elsewhere(
    like: jax.ShapeDtypeStruct,
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    call: MatmulCall,
    *,
    add_to: Array | None = None,
    tiling: Any = None,
) -> Array:
    """The matmul that other platforms than CUDA run instead of a kernel."""
    del like, tiling
    return adding(_xla.scaled_matmul)(lhs, rhs, call, add_to=add_to)


BACKENDS: dict[str, Callable[..., Any]] = {
    "cudnn": _cudnn.scaled_matmul,
    "xla": _xla.scaled_matmul,
    "mosaic": Backend(
        "jaxfp8.kernels.scaled_matmul.hopper._scaled_matmul",
        "scaled_matmul",
        needs="Pallas Mosaic GPU",
        elsewhere=_elsewhere,
    ),
    "reference": _reference.scaled_matmul,
}


def multiply(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    call: MatmulCall,
    attempts: Iterable[str | Attempt],
    *,
    add_to: Array | None = None,
) -> Array:
    """`dequantize(lhs) @ dequantize(rhs)`, accumulated in float32.

    Args:
      lhs: [..., M, K], or with the axes that the call names.
      rhs: [K, N], or with the axes that the call names. Its sizes fit lhs.
      call: axes and options.
      attempts: names of backends, best first. A name may come with extra arguments.
      add_to: [..., M, N], added in float32 before the result is rounded.
    """
    if add_to is None:
        product: Array = dispatch("scaled_matmul", BACKENDS, attempts, lhs, rhs, call)
        return product
    # The kernel in Pallas (a `Backend`) adds C before it writes. The other backends write float32,
    # and XLA adds C.
    backends = {
        name: backend if isinstance(backend, Backend) else adding(backend)
        for name, backend in BACKENDS.items()
    }
    product = dispatch("scaled_matmul", backends, attempts, lhs, rhs, call, add_to=add_to)
    return product
