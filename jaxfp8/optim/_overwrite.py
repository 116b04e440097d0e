"""`Overwrite`: an update that replaces a parameter, instead of being added to it.

`optax.apply_updates` computes `p + u` in the dtype of p. In bfloat16 that sum is rounded once more,
and in FP8 it has no meaning. With `u = Overwrite(value)` the sum is `value`: a JAX array does not
know how to add an Overwrite, so Python asks `Overwrite.__radd__`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overwrite:
    """The update of a parameter whose new value is known: `p + Overwrite(value)` is `value`.

    Invariant: `value` has the shape and dtype of p.

    `written` detects arithmetic. A transformation that scales, clips or adds updates also changes
    `written`, which is then no bool. `p + update` then raises an error. A transformation that
    selects updates may set `written` to False. Then p keeps its value, as with an update of zeros.
    `optax.MultiSteps` does this.

    Attributes:
      value: [...], the new value.
      written: bool [], whether p gets the new value. Outside of a `jax.vmap` of `update` it has the
        axis of the models, which must be the first.

    Example:
      >>> import optax
      >>> optax.apply_updates({"w": jnp.zeros(2)}, {"w": Overwrite(jnp.ones(2))})
      {'w': Array([1., 1.], dtype=float32)}
    """

    value: Array
    written: Any = True

    # NumPy would otherwise add an Overwrite to each element of p.
    __array_ufunc__ = None

    def __radd__(self, p: Array) -> Array:
        if jnp.result_type(self.written) != jnp.bool_:
            raise ValueError(
                "Overwrite: a transformation after with_master_weights changed the new weights "
                f"(written={self.written!r} must be a bool). Put that transformation inside, as in "
                "with_master_weights(optax.chain(tx, optax.scale(0.5)))."
            )
        mine, theirs = jax.typeof(self.value), jax.typeof(p)
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise ValueError(
                f"Overwrite: a new weight {mine.str_short()} cannot replace a parameter "
                f"{theirs.str_short()}. Apply updates to the params that `update` was given."
            )
        if self.written is True:
            return self.value
        # `written` has more than one element if `update` ran under `jax.vmap`: one for each model.
        models = jnp.asarray(self.written)
        written = lax.expand_dims(models, range(models.ndim, self.value.ndim))
        return jnp.where(written, self.value, p)
