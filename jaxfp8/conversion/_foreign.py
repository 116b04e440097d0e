"""Layers that `layers=` of `fp8.convert` names, with what they compute."""

from collections.abc import Callable
from typing import Any, TypeAlias

from jaxfp8._typing import Array

Compute: TypeAlias = Callable[..., Array]
"""`compute(layer, einsum, *args, **kwargs)`: what the layer computes, with another `einsum`."""

Foreign: TypeAlias = tuple[tuple[type, Compute], ...]


def compute_of(foreign: Foreign, kind: type) -> Compute | None:
    """The function for a class or one of its bases, if any."""
    return next((compute for base, compute in foreign if issubclass(kind, base)), None)


class OneCallEinsum:
    """An einsum that may be called once: a layer has one quantizer state."""

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
