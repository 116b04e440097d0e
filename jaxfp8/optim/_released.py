"""Released parameters: what holds them and their optimizer state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.numerics._rounding import undifferentiable
from jaxfp8.optim._weights import is_float

# Integers as floats of the same bits, so that they can leave a backward pass as cotangents.
#
# JAX accepts a cotangent of floats only. A carrier is copied and never computed with. XLA may still
# convert a small float to a wider one and back where it copies. That changes the bits of a NaN with
# a payload. So each carrier has a dtype in which this cannot happen:
#
# - 8 bits travel as float8_e4m3fn. Its codes are 254 different numbers and two NaNs without
#   payload, so each code survives a conversion to a wider float and back.
# - 16 bits travel as two such arrays, and not as float16, whose NaNs have payloads.
# - 32 bits travel as float32, which XLA does not widen.
# - Floats travel as they are.

_BYTE = jnp.dtype(jnp.float8_e4m3fn)


def carriers_of(x: Array) -> tuple[Array, ...]:
    """The carriers of one array of an optimizer state: one or two floats of its shape.

    TypeError if no carrier has these bits: those of 8, 16 and 32 bits, and all floats, have one.
    """
    dtype = jnp.result_type(x)
    if is_float(x):
        return (x,)
    if dtype == jnp.bool_:
        return (_bits(x.astype(jnp.uint8), _BYTE),)
    if dtype in (jnp.int8, jnp.uint8):
        return (_bits(x, _BYTE),)
    if dtype in (jnp.int16, jnp.uint16):
        word = _bits(x, jnp.uint16)
        high, low = (word >> 8).astype(jnp.uint8), (word & jnp.uint16(0xFF)).astype(jnp.uint8)
        return _bits(high, _BYTE), _bits(low, _BYTE)
    if dtype in (jnp.int32, jnp.uint32):
        return (_bits(x, jnp.float32),)
    raise TypeError(
        f"an optimizer state with {dtype}{list(jnp.shape(x))} cannot leave a backward pass. Its "
        "arrays must be floats, bools, or integers of 8, 16 or 32 bits. Store keys of jax.random "
        "as jax.random.key_data."
    )


def _carried(carriers: tuple[Array, ...], dtype: DType) -> Array:
    """The array that `carriers_of` gave to these carriers."""
    if is_float(dtype):
        return carriers[0]
    if dtype == jnp.bool_:
        return _bits(carriers[0], jnp.uint8) != 0
    if len(carriers) == 2:
        high, low = (_bits(carrier, jnp.uint8).astype(jnp.uint16) for carrier in carriers)
        return _bits((high << 8) | low, dtype)
    return _bits(carriers[0], dtype)


def _bits(x: Array, dtype: DType) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


# `Released`: the parameters of all layers, with their optimizer state, for `Release.scan`.

# Arithmetic on gradients changes one of these. A sum of two changes the largest float32, also if it
# is divided afterwards. A sum of halves changes the smallest subnormal one. Adding 0 changes -0.
# What replaces NaN changes the last one. Carriers can be NaN, too.
SEAL = np.array([0x7F7FFFFF, 0x00000001, 0x80000000, 0x7FC00000], np.uint32)


@register_node
@dataclasses.dataclass(frozen=True)
class Released:
    """Stacked parameters of layers and their optimizer state, as a tree of floats.

    `Release.init` makes it, `Release.scan` uses it. The gradient of a loss with respect to it is
    the `Released` of the next step. So it is no gradient: do not scale, clip, add or average it.

    Attributes:
      carriers: the arrays of the optimizer state, [L, ...]. Integers are floats of the same bits.
        Read `opt_state`.
      seal: float32 [4], a constant that arithmetic changes. `check` reads it.
      dtypes: of the arrays of the optimizer state.
      treedef: of the optimizer state.

    Example:
      >>> import optax
      >>> from jaxfp8.optim import release
      >>> layers = release(optax.adam(1e-3)).init({"w": jnp.ones((3, 4, 4)), "b": jnp.ones((3, 4))})
      >>> layers.opt_state[0].count
      Array([0, 0, 0], dtype=int32)
    """

    _values: PyTree  # the parameters, [L, ...] for L layers
    carriers: list[tuple[Array, ...]]
    seal: Array
    dtypes: tuple[DType, ...] = dataclasses.field(metadata=STATIC)
    treedef: Any = dataclasses.field(metadata=STATIC)

    @property
    def params(self) -> PyTree:
        """The parameters, [L, ...] each: to evaluate, to export, to save.

        A loss must not differentiate them: their gradients and the next parameters would be added.
        """
        return _not_differentiated(self._values)

    @property
    def opt_state(self) -> PyTree:
        """The optimizer state, [L, ...] each, as `jax.vmap(tx.init)` makes it."""
        return unpack_state(self.carriers, self.dtypes, self.treedef)

    def check(self) -> None:
        """Raise ValueError if arithmetic changed this tree. It reads the seal, so not under jit.

        Example:
          >>> import optax
          >>> from jaxfp8.optim import release
          >>> layers = release(optax.sgd(0.1)).init({"w": jnp.ones((3, 4)), "b": jnp.ones(3)})
          >>> layers.check()
          >>> jax.tree.map(lambda x: x / 2, layers).check()
          Traceback (most recent call last):
          ...
          ValueError: a Released was changed by arithmetic. ...
        """
        if not bool(is_sealed(self.seal)):
            raise ValueError(
                "a Released was changed by arithmetic. It is no gradient, so it must not be "
                "scaled, clipped, added, averaged over microbatches or used by two scans of one "
                "loss. Take the Released that jax.grad returns as the next one, unchanged, and "
                "restart from the last good step."
            )


def unpack_state(
    carriers: list[tuple[Array, ...]], dtypes: tuple[DType, ...], treedef: Any
) -> PyTree:
    """The optimizer state of carriers, of one layer or of all."""
    return jax.tree.unflatten(treedef, map(_carried, carriers, dtypes))


def count_layers(tree: PyTree) -> int:
    """The number L of layers of a tree of arrays [L, ...]. ValueError without a common L."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    found = {shape[:1] for shape in shapes}
    if len(found) != 1 or found == {()}:
        raise ValueError(
            f"the arrays of released layers have shapes {shapes[:4]}. Each needs a first axis of "
            "the same size, the number of layers. Stack the parameters of all layers, and make "
            "their optimizer state by jax.vmap(tx.init)."
        )
    return int(next(iter(found))[0])


def is_sealed(seal: Array) -> Array:
    """bool [], whether nothing computed with a seal."""
    return jnp.all(lax.bitcast_convert_type(seal, jnp.uint32) == SEAL)


_not_differentiated = undifferentiable(
    lambda _: ValueError(
        "a loss differentiates Released.params. Their gradients would be added to the next "
        "parameters. Use them in Release.scan only. Keep tied parameters outside of Released, or "
        "pass jax.lax.stop_gradient(layers).params for a use that is not trained."
    )
)
