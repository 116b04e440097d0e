"""What finds a wrong use of a `Released`. JAX would add, scale or average the next parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array, FP8StateError
from jaxfp8.optim._operands import has_float
from jaxfp8.optim._released import is_sealed
from jaxfp8.state._uses import Use


def check_use(use: Use, perturbed: list[bool]) -> None:
    """Raise ValueError for a second use, or if a part of the Released is differentiated.

    Example:
      >>> check_use(Use.of(jnp.ones(3)), [True, True])
    """
    if not any(perturbed):
        return
    if not all(perturbed):
        raise ValueError(
            "a loss is differentiated with respect to a part of a Released. Its gradient is the "
            "next Released, so differentiate with respect to all of it, or to nothing of it."
        )
    try:
        use.differentiate()
    except FP8StateError:
        raise ValueError(
            "a Released is used by two scans of one loss. JAX would add the next parameters of "
            "both. Use tied layers without release: jax.lax.scan and one update after the backward "
            "pass. For a use that is not trained, pass jax.lax.stop_gradient(layers)."
        ) from None


def unless_broken(carry: list[Array], seal: Array) -> list[Array]:
    """The carry, or NaN in its floats if arithmetic changed the Released.

    Example:
      >>> unless_broken([jnp.float32(1.0)], jnp.zeros(4))
      [Array(nan, dtype=float32)]
    """
    # A product with a scalar keeps the sharding of x on an Explicit mesh.
    factor = jnp.where(is_sealed(seal), 1.0, jnp.nan)
    return [x * factor.astype(x.dtype) if has_float(x) else x for x in carry]


@custom_vmap
def of_one_batch(seal: Array, params: list[Array]) -> Array:
    """The seal. It raises an error under `jax.vmap` if the next parameters are mapped alone.

    Example:
      >>> of_one_batch(jnp.ones(1), [jnp.ones(2)])
      Array([1.], dtype=float32)
    """
    return seal


@of_one_batch.def_vmap
def _(size: int, mapped: Any, seal: Array, params: list[Array]) -> tuple[Array, bool]:
    if any(mapped[1]) and not mapped[0]:
        raise ValueError(
            f"jax.vmap maps {size} examples over one Released. Each example would update the "
            "layers. Map examples inside of f, as in stack.scan(lambda x, p: (jax.vmap(layer, "
            "(0, None))(x, p), None), ...). For an ensemble, map the Released too."
        )
    return seal, mapped[0]


@jax.custom_jvp
def once(cotangents: list[Array]) -> list[Array]:
    """The cotangents, which cannot be differentiated.

    Example:
      >>> once([jnp.float32(1.0)])
      [Array(1., dtype=float32)]
    """
    return cotangents


@once.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "a loss with a Released is differentiated twice. Its gradient is the next Released, which "
        "has no derivative. Where one is needed, use jax.lax.scan over Released.params."
    )
