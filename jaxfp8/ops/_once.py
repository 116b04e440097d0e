"""Identities whose derivative is an error, since that of a cast is zero almost everywhere."""

from collections.abc import Callable
from typing import TypeVar

import jax

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import PyTree

T = TypeVar("T")


def _undifferentiable(error: Callable[[PyTree], Exception]) -> Callable[[T], T]:
    @jax.custom_jvp
    def identity(tree: T) -> T:
        return tree

    @identity.defjvp
    def refuse(primals: PyTree, tangents: PyTree) -> PyTree:
        del tangents
        raise error(primals)

    return identity


def _second_derivative(_: PyTree) -> Exception:
    return FP8StateError(
        "FP8 matmuls have no second derivative; use recipes.identity() where one is needed."
    )


def _of_quantize(arrays: PyTree) -> Exception:
    shapes = ", ".join(str(list(leaf.shape)) for leaf in jax.tree.leaves(arrays))
    return TypeError(
        f"fp8.quantize of x {shapes} is being differentiated, but it has no gradient. Use "
        "fp8.fake_quantize for a straight-through gradient, fp8.dot for a matmul in FP8, or "
        "jax.lax.stop_gradient(x)."
    )


once = _undifferentiable(_second_derivative)
"""Around the operands of a matmul, whose gradient can be taken once."""

constant = _undifferentiable(_of_quantize)
"""Around the arrays of `fp8.quantize`, which has no gradient."""
