"""Adams with stored moments for `moment_accuracy.py`: formats of jaxfp8, and the rule of COAT."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfp8.optim import FP8, BFloat16, ExpandedFP8, Float16, Float32, Int8, scale_by_adam

GROUP = 128
B1 = 0.9
LARGEST_POWER = 8192.0
INT8, EXPANDED = Int8(min_size=0), ExpandedFP8(min_size=0)


class Pair(NamedTuple):
    """An Adam, and how to read its moments as float32."""

    adam: Callable[..., Any]  # of b2 and eps
    moments: Callable[[Any], tuple[Any, Any]]  # of the state
    store: Callable[[Any, bool], Any]  # float32 -> float32, for a moment that is signed or not


def of_formats(mu: Any, nu: Any) -> Pair:
    def read(format: Any, tree: Any) -> Any:
        return {name: format.unpack(tree[name]) for name in tree}

    def moments(state: Any) -> tuple[Any, Any]:
        return read(mu, state.inner.mu), read(nu, state.inner.nu)

    def store(x: Any, signed: bool) -> Any:
        format = mu if signed else nu
        return format.unpack(format.pack(x, None, signed=signed, key=None))

    return Pair(functools.partial(scale_by_adam, b1=B1, mu=mu, nu=nu), moments, store)


def coat(x: Any, signed: bool) -> Any:
    """What COAT's optimizer reads after it stored x (arXiv:2410.19313, section 4, and its kernel).

    The power is that which makes the range of a group 448^2 / 2, in steps of 1/16. Values are
    relative to the geometric mean of the largest and the smallest magnitude. COAT's code has no
    limit for the power. For equal values it would be infinite. Here it is at most 8192.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    magnitude = jnp.abs(groups)
    largest = jnp.max(magnitude, -1, keepdims=True) + 1e-20
    smallest = jnp.min(magnitude, -1, keepdims=True) + 1e-20
    power = np.log2(448.0**2 / 2) / jnp.log2(largest / smallest)
    power = jnp.minimum(jnp.floor(power * 16) / 16, LARGEST_POWER)
    center = jnp.sqrt(largest) * jnp.sqrt(smallest)  # their product may underflow
    scale = (largest / center) ** power / 448
    raised = jnp.minimum((magnitude / center) ** power / scale, 448)
    stored = jax.lax.optimization_barrier(raised.astype(jnp.float8_e4m3fn)).astype(jnp.float32)
    read = jnp.where(stored > 0, (stored * scale) ** (1 / power) * center, 0)
    return (jnp.sign(groups) * read).reshape(x.shape)


def of_coat() -> Pair:
    """Its state holds what it reads, in float32."""

    def adam(b2: Any, eps: Any) -> Any:
        plain = optax.scale_by_adam(b1=B1, b2=b2, eps=eps)

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            updates, state = plain.update(grads, state, params)
            mu = jax.tree.map(lambda x: coat(x, True), state.mu)
            nu = jax.tree.map(lambda x: coat(x, False), state.nu)
            return updates, state._replace(mu=mu, nu=nu)

        return optax.GradientTransformation(plain.init, update)

    return Pair(adam, lambda state: (state.mu, state.nu), coat)


PAIRS = {
    "Int8": of_formats(INT8, INT8),
    "ExpandedFP8": of_formats(EXPANDED, EXPANDED),
    "COAT's code": of_coat(),
    "FP8, Float16": of_formats(FP8(min_size=0), Float16()),
    "BFloat16": of_formats(BFloat16(), BFloat16()),
    "Float32": of_formats(Float32(), Float32()),
}
