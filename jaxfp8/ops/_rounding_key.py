"""The PRNG key of a cast with stochastic rounding: each tensor and each shard has its own."""

import jax
from jax import lax

from jaxfp8._typing import Array, Tensor
from jaxfp8.ops._call import Call
from jaxfp8.sharding._amax import manual_axes, varying

_INDEX: dict[Tensor, int] = {"x": 0, "w": 1, "g": 2}


def rounding_key(key: Array | None, call: Call, tensor: Tensor, value: Array) -> Array:
    """The key for one tensor of one call.

    In Auto and Explicit meshes arrays are global, and so are random bits: they do not depend on the
    mesh. Inside `jax.shard_map` a device does not know where in the array its shard is. There the
    index of the device over the mesh axes that the tensor varies over is folded into the key. So
    each shard gets bits of its own, and replicas get the same bits.

    Args:
      key: `key=` of the call.
      call: its recipe, and the mesh axes of its amaxes.
      tensor: which tensor `value` is.
      value: the tensor [...].

    Raises:
      ValueError: if the key is missing, or if types do not tell shards from replicas.
    """
    if key is None:
        raise ValueError(
            f"key=None, but recipe {call.recipe.name!r} rounds {tensor} stochastically, which "
            "needs a PRNG key at each step: pass key= to fp8.dot (dot_general, einsum); in linen "
            "model.apply(..., rngs={'fp8': key}), and split_rngs={'fp8': True} to nn.scan and "
            "nn.vmap; in nnx rngs=nnx.Rngs(0, fp8=1) to the layer, and call model.train() after "
            "model.eval()."
        )
    key = jax.random.fold_in(key, _INDEX[tensor])
    if not call.amax_axes.manual:
        return key
    if not call.amax_axes.typed:
        raise ValueError(
            f"recipe {call.recipe.name!r} rounds {tensor} stochastically inside "
            f"shard_map(check_vma=False) over {manual_axes()}, where types do not tell parts of "
            f"{tensor} from replicas, which must be rounded alike; use "
            "jax.shard_map(check_vma=True)."
        )
    if axes := tuple(sorted(varying(value))):
        key = jax.random.fold_in(key, lax.axis_index(axes))
    return key
