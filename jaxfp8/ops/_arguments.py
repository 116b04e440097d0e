"""Checks of what users pass to a matmul."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, ArrayLike, Implementation
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.kernels._prologue import AbstractPrologue
from jaxfp8.numerics._dtypes import FLOAT_DTYPES
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def check_operands(
    lhs: ArrayLike, rhs: ArrayLike, recipe: Recipe, prologue: AbstractPrologue | None = None
) -> tuple[tuple[Array, ...], Array]:
    """lhs, one array or those of a prologue, and rhs, as arrays of a dtype that FP8 matmuls take.

    Raises:
      TypeError: naming the argument, its dtype and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> _ = check_operands(jnp.ones(2), jnp.ones(2), fp8.recipes.current())
    """
    check_recipe(recipe)
    if recipe.is_identity and prologue is None:  # nothing is quantized: what lax.dot_general takes
        return (_one_array("lhs", lhs),), _one_array("rhs", rhs)
    return check_arrays("lhs", lhs, prologue), check_float("rhs", rhs)


def check_arrays(name: str, given: ArrayLike, prologue: AbstractPrologue | None) -> tuple[Array, ...]:
    """What a prologue takes, or without one a single array, each of a dtype that can be quantized.

    Args:
      name: of the argument, for messages.
      given: the array, or a tuple of those of the prologue.
      prologue: or None.

    Raises:
      TypeError: naming the argument, what it is and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> len(check_arrays("x", jnp.ones(2), None)), len(check_arrays("x", (jnp.ones(2), jnp.ones(2)), fp8.SwiGLU()))
      (1, 2)
    """
    if prologue is None:
        return (check_float(name, given),)
    if not isinstance(prologue, AbstractPrologue):
        raise TypeError(
            f"prologue={prologue!r} is none; use fp8.SwiGLU() or fp8.RMSNorm(), or apply your function to {name}."
        )
    if not isinstance(given, tuple | list) or len(given) != len(prologue.names):
        raise TypeError(f"{name} is {_named(given)}; with prologue={prologue!r} it is the tuple {prologue.names}.")
    return tuple(check_float(f"{name}, {each}", array) for each, array in zip(prologue.names, given, strict=True))


def kernels_of(recipe: Recipe, implementation: Implementation | Implementations) -> Implementation | Implementations:
    """The kernels of a layer: none with a recipe that has no FP8, which rules may give to some layers of a model.

    Example:
      >>> import jaxfp8 as fp8
      >>> kernels_of(fp8.recipes.current(), "xla"), kernels_of(fp8.recipes.identity(), "xla")
      ('xla', None)
    """
    return None if recipe.is_identity else implementation


def check_float(name: str, x: ArrayLike) -> Array:
    """x as an array of a dtype that can be quantized.

    Raises:
      TypeError: naming the argument, its dtype and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> check_float("x", jnp.ones(2)).shape
      (2,)
    """
    x = _one_array(name, x)
    if x.dtype.name not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} has dtype {x.dtype.name}, which cannot be quantized; cast it to one of {list(FLOAT_DTYPES)}."
        )
    return x


def _one_array(name: str, x: ArrayLike) -> Array:
    """`as_array`, but a tuple of arrays is taken for the arrays of a prologue."""
    if isinstance(x, tuple) and any(isinstance(each, jax.Array) for each in x):
        raise TypeError(
            f"{name} is {_named(x)}, but one array is needed; pass one, or name the prologue= that makes one of them."
        )
    return as_array(name, x)


def as_array(name: str, x: ArrayLike) -> Array:
    """x as an array.

    Raises:
      TypeError: naming the argument, what it is and the cure.

    Example:
      >>> as_array("x", [1.0, 2.0]).shape
      (2,)
    """
    if isinstance(x, jax.Array):
        return x
    if (cure := _no_array(name, x)) is not None:
        raise TypeError(f"{name} is {_named(x)}, but one array is needed; {cure}")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is {_named(x)}, but one array is needed; pass an array of numbers. ({error})"
        ) from None


def _no_array(name: str, x: object) -> str | None:
    """What to write instead of something that is no array; None where only jax can tell."""
    if x is None:
        return "pass an array. If it is a parameter, the layer or the checkpoint may lack it."
    if isinstance(x, QuantizedTensor):
        return f"pass the high-precision array, or {name}.dequantize()."
    if isinstance(x, jax.ShapeDtypeStruct):
        return "it has a shape but no values. Call the function under jax.eval_shape, or pass an array."
    if hasattr(x, "unbox"):
        return "take the array out of its box: flax.linen.meta.unbox(variables)."
    if isinstance(x, dict):
        return f"pass one of its values. Its keys are {list(x)[:6]}."
    if callable(x) and not hasattr(x, "__jax_array__"):
        return "pass what it returns."
    return None


def _named(x: object) -> str:
    if x is None:
        return "None"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, jax.ShapeDtypeStruct | str | type):
        return repr(x)
    return f"of type {type(x).__name__}"


def fp8_precision(precision: Any) -> bool:
    """Whether `precision` lets fprop accumulate fast.

    Raises:
      ValueError: for a precision that FP8 matmuls cannot honour.

    Example:
      >>> fp8_precision(None), fp8_precision("highest")
      (True, False)
    """
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    try:
        canonical = {lax.Precision.DEFAULT if p is None else lax.Precision(p) for p in pair}
    except ValueError:
        canonical = set()
    if len(pair) != 2 or len(canonical) != 1:
        raise ValueError(
            f"precision={precision!r} cannot be honoured by an FP8 matmul; use None or 'default' (fast accumulation), "
            "'high' or 'highest' (full accumulation)."
        )
    return canonical == {lax.Precision.DEFAULT}
