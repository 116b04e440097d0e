"""The PRNG key of a cast with stochastic rounding: each tensor and each shard has its own."""

import jax
from jax import lax

from jaxfp8._typing import Array, Tensor
from jaxfp8.ops._call import Call
from jaxfp8.sharding._amax import manual_axes, varying

_INDEX: dict[Tensor, int] = {"x": 0, "w": 1, "g": 2}


def rounding_key(key: Array | None, call: Call, tensor: Tensor, value: Array) -> Array:
    """The key for one tensor of one call.

    In Auto and Explicit meshes arrays are global. Random bits are global too, so they do not depend
    on the mesh.

    Inside `jax.shard_map` a device does not know the position of its shard in the array. There the
    index of the device is folded into the key. It is the index over the mesh axes that the tensor
    varies over. So each shard gets its own bits, and replicas get the same bits.

    Args:
      key: `key=` of the call.
      call: the static part of the call, with the recipe and the mesh axes of amaxes.
      tensor: which tensor `value` is.
      value: the tensor [...].

    Raises:
      ValueError: if the key is missing, or if types do not distinguish shards from replicas.
    """
    if key is None:
        raise ValueError(
            f"key=None, but recipe {call.recipe.name!r} rounds {tensor} stochastically. That "
            "needs a new PRNG key at each step. Functions: pass key= to fp8.dot, dot_general or "
            "einsum. linen: write model.apply(..., rngs={'fp8': key}), and pass "
            "split_rngs={'fp8': True} to nn.scan and nn.vmap. nnx: pass rngs=nnx.Rngs(0, fp8=1) "
            "to the layer, and call model.train() after model.eval()."
        )
    # Each tensor folds in its own index, so x, w and g of one call do not share random bits.
    key = jax.random.fold_in(key, _INDEX[tensor])
    if not call.amax_axes.manual:
        return key
    if not call.amax_axes.typed:
        raise ValueError(
            f"recipe {call.recipe.name!r} rounds {tensor} stochastically inside "
            f"shard_map(check_vma=False) over {manual_axes()}. There types do not distinguish "
            f"shards of {tensor} from replicas, which must get the same random bits. Use "
            "jax.shard_map(check_vma=True)."
        )
    if axes := tuple(sorted(varying(value))):
        key = jax.random.fold_in(key, lax.axis_index(axes))
    return key
