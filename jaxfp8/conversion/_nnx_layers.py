"""flax.nnx's layers with a kernel: the size of their matmul, and how they get another one."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfp8._typing import Array
from jaxfp8.conversion._flops import layer_scope
from jaxfp8.conversion._foreign import Compute, Foreign, Once, compute_of
from jaxfp8.conversion._layer import FP8, Layer, own_matmul
from jaxfp8.conversion._seen import Seen
from jaxfp8.conversion._size import Size, size_of_dot, size_of_einsum
from jaxfp8.nnx._dot_general import AbstractFP8Matmul, FP8DotGeneral, FP8EinsumOp
from jaxfp8.nnx._layers import FP8Einsum, FP8Linear, FP8LinearGeneral
from jaxfp8.ops._promotion import KeepsFP8


class Known(NamedTuple):
    """A type of layers that multiply by a kernel.

    Attributes:
      plug: the class of the matmul in FP8.
      attribute: the attribute in which the layer keeps its matmul.
      default: what flax computes it with.
      size: the size of a layer's matmul for one token, and the shape of its stack. None for a
        layer that is not flax's. Only a call shows its size.
      fp8: the class that replaces exactly this class of flax.
    """

    plug: type[AbstractFP8Matmul]
    attribute: str
    default: Callable[..., Array]
    size: Callable[[Any], tuple[Size, tuple[int, ...]]] | None
    fp8: type


def _shape(layer: Any) -> tuple[int, ...]:
    return tuple(layer.kernel.get_raw_value().shape)


def _linear_size(layer: nnx.Linear) -> tuple[Size, tuple[int, ...]]:
    *stacked, k, n = _shape(layer)
    return Size((1, k, n)), tuple(stacked)


def _general_size(layer: nnx.LinearGeneral) -> tuple[Size, tuple[int, ...]]:
    sides = (tuple(layer.batch_axis.values()), layer.in_features, layer.out_features)
    batch, k, n = map(math.prod, sides)
    shape = _shape(layer)
    return Size((1, k, n), batch), shape[: len(shape) - sum(map(len, sides))]


def _einsum_size(layer: nnx.Einsum) -> tuple[Size, tuple[int, ...]]:
    shape, own = _shape(layer), tuple(layer.kernel_shape)
    equation = layer.einsum_str.replace(" ", "").replace("...", "")
    before, _, after = (
        layer.einsum_str.replace(" ", "").split("->")[0].split(",")[1].partition("...")
    )
    named = own[: len(before)] + own[len(own) - len(after) :]  # without the axes of "..."
    sizes = dict(zip(before + after, named, strict=True))
    inputs = equation.split(",")[0]
    one = size_of_einsum(equation, tuple(sizes.get(name, 1) for name in inputs), named)
    return one, shape[: len(shape) - len(own)]


class _Attending(nnx.Embed):
    """`nnx.Embed` whose `attend` calls the attribute `dot_general`."""

    dot_general: Any

    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        query, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        dimension_numbers = (((query.ndim - 1,), (1,)), ((), ()))
        y: Array = self.dot_general(query, table, dimension_numbers, out_sharding=out_sharding)
        return y


@functools.cache
def _attending(kind: type) -> type:
    """The class of an embedding of the user, with the `attend` of `_Attending` as its parent's."""
    if kind is nnx.Embed:
        return _Attending
    return type(kind.__name__, (kind, _Attending), {"__module__": kind.__module__})


def _embed_size(layer: nnx.Embed) -> tuple[Size, tuple[int, ...]]:
    *stacked, n, k = layer.embedding.get_raw_value().shape
    return Size((1, k, n)), tuple(stacked)


KNOWN: dict[type, Known] = {
    nnx.Linear: Known(FP8DotGeneral, "dot_general", jax.lax.dot_general, _linear_size, FP8Linear),
    nnx.LinearGeneral: Known(
        FP8DotGeneral, "dot_general", jax.lax.dot_general, _general_size, FP8LinearGeneral
    ),
    nnx.Einsum: Known(FP8EinsumOp, "einsum_op", jnp.einsum, _einsum_size, FP8Einsum),
    nnx.Embed: Known(FP8DotGeneral, "dot_general", jax.lax.dot_general, _embed_size, _Attending),
}


def known_of(module: nnx.Module, foreign: Foreign) -> Known | None:
    """How to convert a module. None if it is no layer of a known type."""
    if (compute := compute_of(foreign, type(module))) is not None:
        return Known(FP8EinsumOp, _EINSUM, jnp.einsum, None, _computed(type(module), compute))
    known = next((known for kind, known in KNOWN.items() if isinstance(module, kind)), None)
    if isinstance(module, nnx.Embed) and known is not None:
        return known._replace(fp8=_attending(type(module)))
    return known


_EINSUM = "fp8_einsum"


@functools.cache
def _computed(kind: type, compute: Compute) -> type:
    """The class of a layer that is not flax's, with `compute` as its call."""

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return compute(layer, Once(getattr(layer, _EINSUM)), *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def give_matmul(layer: Any, known: Known, matmul: Any) -> None:
    """Let a layer multiply with `matmul`. The layer is a copy that the caller made.

    Classes of flax keep the matmul in an attribute. A layer of exactly such a class becomes one of
    ours, which also sums the gradient of the bias in the matmul. A class of the user stays.
    """
    converts = isinstance(matmul, AbstractFP8Matmul) and type(layer) in KNOWN
    if converts or known.size is None or isinstance(layer, nnx.Embed):
        # nnx would note an attribute "__class__" in the graph of the model.
        object.__setattr__(layer, "__class__", known.fp8)
    if isinstance(layer, FP8Linear | FP8Einsum):
        layer.prologue = None
    if isinstance(matmul, AbstractFP8Matmul) and hasattr(layer, "promote_dtype"):
        layer.promote_dtype = KeepsFP8.of(layer.promote_dtype)
    setattr(layer, known.attribute, nnx.data(matmul) if isinstance(matmul, nnx.Module) else matmul)


class Watch:
    """A matmul that notes its size, for a model that is only looked at."""

    def __init__(self, layer: Layer, seen: Seen, function: Any) -> None:
        self._layer, self._seen, self._function = layer, seen, function

    def __call__(self, *operands: Any, **options: Any) -> Array:
        if isinstance(operands[0], str):
            equation, x, w = operands[:3]
            size = size_of_einsum(equation, jnp.shape(x), jnp.shape(w))
        else:
            x, w, dimension_numbers = operands[:3]
            size = size_of_dot(jnp.shape(x), jnp.shape(w), dimension_numbers)
        self._seen.add(
            dataclasses.replace(self._layer, shape=size.shape, batch=size.batch, counted=True)
        )
        with layer_scope(self._layer.path):
            y: Array = self._function(*operands, **options)
        return y


def obstacle_of(layer: nnx.Module, known: Known) -> str:
    """Why a layer of a known type cannot run in FP8. "" if it can."""
    attributes = (known.attribute, "dot_general_cls")
    if any(isinstance(getattr(layer, name, None), AbstractFP8Matmul) for name in attributes):
        return FP8
    return own_matmul(layer, attributes, known.default)
