"""Layers that are not flax's: what `layers=` of `fp8.convert` says of them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxfp8._typing import Array

Compute: TypeAlias = Callable[..., Array]
"""`compute(layer, einsum, *args, **kwargs)`: what the layer computes, with another `einsum`."""

Foreign: TypeAlias = tuple[tuple[type, Compute], ...]


def read_layers(layers: Mapping[type, Compute]) -> Foreign:
    """The types and functions of `layers=`.

    Raises:
      TypeError: for a key that is no class, or a value that is no function.

    Example:
      >>> read_layers({dict: lambda layer, einsum, x: einsum("bd,dk->bk", x, layer["w"])})[0][0]
      <class 'dict'>
    """
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"layers={layers!r} must map classes of layers to functions: "
            "{Einsum: lambda layer, einsum, x: einsum(layer.equation, x, layer.w)}."
        )
    for kind, compute in layers.items():
        if not isinstance(kind, type) or not callable(compute):
            raise TypeError(
                f"layers has {kind!r}: {compute!r}. A class and a function of (layer, einsum, "
                "*arguments) are needed."
            )
    return tuple(layers.items())


def compute_of(foreign: Foreign, kind: type) -> Compute | None:
    """The function for a class or one of its bases. None if there is none.

    Example:
      >>> compute_of((), dict) is None
      True
    """
    return next((compute for base, compute in foreign if issubclass(kind, base)), None)


class Once:
    """An einsum that may be called once: a layer has one quantizer state.

    Example:
      >>> import jax.numpy as jnp
      >>> einsum = Once(jnp.einsum)
      >>> einsum("i,i->", jnp.ones(2), jnp.ones(2)).item()
      2.0
    """

    def __init__(self, einsum: Callable[..., Array]) -> None:
        self._einsum, self._called = einsum, False

    def __call__(self, equation: str, x: Any, w: Any, **options: Any) -> Array:
        if self._called:
            raise ValueError(
                f"a function of layers= calls einsum twice in one call, {equation!r} again. A "
                "layer has one quantizer state. Split the layer, or write its matmuls as modules."
            )
        self._called = True
        return self._einsum(equation, x, w, **options)
