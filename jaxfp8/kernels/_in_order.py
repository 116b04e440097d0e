"""FP8 values that XLA writes in the order of their axes, before a kernel reads them transposed."""

from jax import lax

from jaxfp8._typing import Array
from jaxfp8.kernels._on_mesh import on_mesh


def in_order(x: Array) -> Array:
    """x [...], written to memory in the order of its axes, on one device.

    A kernel may read x transposed. Without the barrier XLA moves the transposition in front of the
    cast that made x. Then XLA also writes masks, magnitudes and the copy of the other direction in
    the transposed order, in wider dtypes. Layers for Hopper move three times the bytes, and layers
    for Blackwell a third more. The barrier holds a flat array, because no transposition passes a
    reshape to one axis.
    """
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def in_order_on_mesh(x: Array) -> Array:
    """`in_order` of each device's shard, in every kind of mesh and under `jax.vmap`."""
    return on_mesh(lambda x: (in_order(x),), (1,), ((1,),))(x)[0]
