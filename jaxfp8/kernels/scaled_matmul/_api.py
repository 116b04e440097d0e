"""The entry to the scaled matmul: two QuantizedTensors in, high precision out.

The scaled matmul by its definition is here, too.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._dispatch import Attempt, Backend, Route, dispatch
from jaxfp8.kernels.scaled_matmul import _cudnn, _xla
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul.hopper._tiling import search_space

# C + product: a matmul that adds its product to an array C, like cuBLAS with beta = 1.
#
# Letters: M N the axes of the product.


def _adding(backend: Callable[..., Array]) -> Callable[..., Array]:
    """The backend of a scaled matmul, with an argument `add_to` for C, which XLA adds."""

    @functools.wraps(backend)
    def scaled_matmul(
        lhs: QuantizedTensor,
        rhs: QuantizedTensor,
        call: MatmulCall,
        *,
        add_to: Array | None = None,
    ) -> Array:
        if add_to is None:
            return backend(lhs, rhs, call)
        product = backend(lhs, rhs, call.in_float32)  # so the sum is rounded once
        return (add_to.astype(jnp.float32) + product).astype(call.out_dtype)

    return scaled_matmul


# The scaled matmul by its definition: dequantize in float32, then multiply in float32.


def _multiply_by_definition(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """See `fp8.scaled_matmul`; float32 throughout, on every chip."""
    product = lax.dot_general(
        lhs.dequantize(jnp.float32),
        rhs.dequantize(jnp.float32),
        call.geometry.dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=call.out_sharding,
    )
    return product.astype(call.out_dtype)


# The backends, and the entry.


def _elsewhere(like: Any, *operands: Any, tiling: Any = None, **how: Any) -> Array:
    """The matmul that other platforms run instead of a kernel. It has no tilings."""
    del like, tiling
    product: Array = BACKENDS["xla"](*operands, **how)
    return product


BACKENDS: dict[str, Backend] = {
    # XLA compiles the same function for other platforms.
    "cudnn": Backend(
        function=_adding(_cudnn.scaled_matmul),
        platform="cuda",
        families=("Blackwell",),
        route=Route.BLOCK_SCALED,
    ),
    "xla": Backend(function=_adding(_xla.scaled_matmul)),
    "mosaic": Backend(
        "jaxfp8.kernels.scaled_matmul.hopper._door",
        "scaled_matmul",
        needs="Pallas Mosaic GPU",
        platform="cuda",
        elsewhere=_elsewhere,
        families=("Hopper",),
        route=Route.HOPPER_PALLAS,
        tilings=search_space,
    ),
    "reference": Backend(function=_adding(_multiply_by_definition)),
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

    lhs is [..., M, K] and rhs [K, N], or they have the axes that the call names. Attempts are names
    of backends, best first. A name may come with extra arguments. `add_to` [..., M, N] is added in
    float32 before the result is rounded.
    """
    addend = {} if add_to is None else {"add_to": add_to}
    product: Array = dispatch("scaled_matmul", BACKENDS, attempts, lhs, rhs, call, **addend)
    return product
