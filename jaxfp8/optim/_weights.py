"""What parameters can be, and the update that overwrites them.

A `QuantizedWeight` is a pytree node that holds FP8 tensors. It is one parameter: it has one master
weight, and one gradient, which is a plain array.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._pytrees import register_node
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.ops._quantize_params import find_state, path_name, states_by_path
from jaxfp8.state._state import MatmulState
from jaxfp8.weights._quantized_weight import is_weight

# What parameters can be: arrays, and weights in FP8.


class Parameters(NamedTuple):
    """A tree of parameters, flat. A quantized weight is one of its leaves.

    `paths` are for messages, `names` for the states of matmuls.
    """

    paths: list[str]
    names: list[str]
    leaves: list[Any]
    treedef: Any

    @staticmethod
    def of(params: PyTree) -> "Parameters":
        """The parameters of a tree."""
        found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_weight)
        paths = [jax.tree_util.keystr(path) for path, _ in found]
        names = [path_name(path) for path, _ in found]
        return Parameters(paths, names, [leaf for _, leaf in found], treedef)

    def like(self, tree: PyTree) -> list[Any]:
        """What another tree has in the place of each parameter."""
        return list(self.treedef.flatten_up_to(tree))

    def states(self, state: PyTree | None) -> list[MatmulState | None]:
        """The quantizer state of each weight in FP8, from those of the model."""
        found = states_by_path(state)
        return [
            find_state(name, found) if is_weight(leaf) and leaf.recipe.rows else None
            for name, leaf in zip(self.names, self.leaves, strict=True)
        ]

    def tree(self, leaves: list[Any]) -> PyTree:
        """The tree of parameters with other leaves."""
        return jax.tree.unflatten(self.treedef, leaves)


def dtype_of(leaf: Any) -> DType | None:
    """The dtype of a parameter; None for a quantized weight."""
    return None if is_weight(leaf) else jnp.result_type(leaf)


def is_float(x: Any) -> bool:
    """Whether an array, or a dtype, is one of floats."""
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return bool(jnp.issubdtype(dtype, jnp.floating))


def widened(x: Any, like: Any = None) -> Any:
    """A gradient or parameter in float32, or in float64 where `like` is. It is x by default."""
    if isinstance(x, QuantizedTensor):
        return x.dequantize(jnp.float32)
    if not is_float(x):
        return x
    wide = jnp.promote_types(jnp.result_type(x if like is None else like), jnp.float32)
    return jnp.asarray(x).astype(wide)


# `Overwrite`: an update that replaces a parameter, instead of being added to it.
#
# `optax.apply_updates` computes `p + u` in the dtype of p. In bfloat16 that sum is rounded once
# more, and in FP8 it has no meaning. With `u = Overwrite(value)` the sum is `value`: a JAX array
# does not know how to add an Overwrite, so Python asks `Overwrite.__radd__`.


@register_node
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
