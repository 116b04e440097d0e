"""Identities that raise an error when they are differentiated.

The derivative of a cast to FP8 is zero almost everywhere. JAX would return these zeros without a
message.
"""

from collections.abc import Callable
from typing import TypeVar

import jax

from jaxfp8._typing import FP8StateError, PyTree

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
        "FP8 matmuls have no second derivative. Where one is needed, use "
        "recipe=fp8.recipes.identity()."
    )


def _of_quantize(arrays: PyTree) -> Exception:
    shapes = ", ".join(str(list(leaf.shape)) for leaf in jax.tree.leaves(arrays))
    return TypeError(
        f"fp8.quantize of x {shapes} is being differentiated, but it has no gradient. Use "
        "fp8.fake_quantize for a straight-through gradient, fp8.dot for a matmul in FP8, or "
        "jax.lax.stop_gradient(x)."
    )


def _of_primary(arrays: PyTree) -> Exception:
    (w,) = arrays
    return TypeError(
        f"quantize_params of a weight {list(w.shape)} is being differentiated, but primary=True "
        "drops the weight that its gradient would flow to. Call it outside of the loss, and take "
        "gradients with fp8.value_and_grad. Or leave primary=True out."
    )


once = _undifferentiable(_second_derivative)
"""For the operands of a matmul, which has a first derivative and no second one."""

constant = _undifferentiable(_of_quantize)
"""For the arrays of `fp8.quantize`, which has no gradient."""

dropped = _undifferentiable(_of_primary)
"""For a weight of which only the FP8 copies are left."""
