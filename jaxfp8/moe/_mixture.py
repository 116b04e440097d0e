"""`apply_mixture`: a layer of experts without its parameters, which linen and nnx share."""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._check import check_int, check_one_of
from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array, ArrayLike, PyTree
from jaxfp8.matmul._options import check_float
from jaxfp8.moe._experts import ExpertParallel, check_clamp, check_parallel, swiglu_experts
from jaxfp8.moe._router import Scores, load, load_balancing_loss, top_k, z_loss
from jaxfp8.numerics._per_block import is_explicit, merge_axes
from jaxfp8.ops._dispatch_matmul import check_experts
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import manual_axes, types_show_varying, varying_axes


@register_node
class MoEStats(NamedTuple):
    """What a layer of experts says about its router, over all tokens of all devices.

    Attributes:
      load_balancing_loss: f32[], see `fp8.moe.load_balancing_loss`.
      z_loss: f32[], see `fp8.moe.z_loss`.
      load: i32[E], how many choices each expert got.
      dropped: i32[], how many choices found no slot; see `ExpertParallel.capacity_factor`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> layer = fp8.linen.FP8MoE(4, 16, 2)
      >>> (y, stats), _ = layer.init_with_output(jax.random.key(0), jnp.ones((6, 8)))
      >>> loss = jnp.mean(y**2) + 0.01 * stats.load_balancing_loss + 0.001 * stats.z_loss
      >>> int(stats.load.sum())
      12
    """

    load_balancing_loss: Array
    z_loss: Array
    load: Array
    dropped: Array


def apply_mixture(
    x: Array,
    promoted: Array,
    router: Array,
    matrices: tuple[Array, Array],
    *,
    k: int,
    recipe: Recipe,
    states: PyTree,
    parallel: ExpertParallel | None,
    scores: Scores,
    normalized: bool,
    clamp: tuple[float, float] | None,
    **options: Any,
) -> tuple[Array, MoEStats]:
    """The results y [..., N] of the experts that a router f32[K, E] chooses, and its stats.

    The router reads tokens x [..., K]. `promoted` is x in the dtype of the experts, whose matrices
    on this device are w_in [E, K, 2 F] and w_out [E, F, N]. See `top_k` for `k`, `scores` and
    `normalized`, and `swiglu_experts` for the others.
    """
    parallel = parallel or ExpertParallel()
    experts = router.shape[1]
    _check_experts(experts, matrices[0].shape[0], parallel)
    tokens = _flat(x)
    logits = _logits(tokens, router)
    gates, chosen = top_k(logits, k, scores=scores, normalized=normalized)
    axes = _axes_of_tokens(logits, router, parallel)
    y, dropped = swiglu_experts(
        _flat(promoted), gates, chosen, *matrices, recipe=recipe, states=states, parallel=parallel,
        clamp=clamp, **options,
    )  # fmt: skip
    stats = MoEStats(
        load_balancing_loss=load_balancing_loss(logits, chosen, axes=axes),
        z_loss=z_loss(logits, axes=axes),
        load=load(chosen, experts, axes=axes),
        dropped=dropped,
    )
    return _restored(y, x), stats


def count_local_experts(experts: int, parallel: ExpertParallel | None) -> int:
    """The number of experts of this device: fewer inside `jax.shard_map` over their axis.

    ValueError if the devices do not divide the number of experts.
    """
    axis = None if parallel is None else parallel.axis
    if axis is None or axis not in manual_axes():
        return experts
    devices = lax.axis_size(axis)
    check_experts(experts, devices, axis)
    return experts // devices


def check_tokens(inputs: ArrayLike) -> Array:
    """The input of a layer as tokens [..., K] of floating point, at least one."""
    x = check_float("inputs", inputs)
    if x.ndim < 1 or not all(x.shape):
        raise ValueError(
            f"inputs has shape {list(x.shape)}. Pass tokens [..., K], with a token at least."
        )
    return x


def check_mixture(
    experts: Any, hidden: object, k: Any, shared: object, parallel: object, scores: object,
    clamp: object,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError for fields of a layer of experts that cannot be."""
    for name, size, least in (
        ("experts", experts, 1), ("hidden", hidden, 1), ("k", k, 1), ("shared", shared, 0),
    ):  # fmt: skip
        check_int(name, size, least=least)
    if k > experts:
        raise ValueError(f"k={k} is more than experts={experts}. Each choice is another expert.")
    check_parallel(parallel)
    check_one_of("scores", scores, get_args(Scores))
    check_clamp(clamp)


# The backward pass reads the tokens in their own dtype. Without the checkpoint it would keep a
# copy in float32, four times the bytes of the FP8 copy that the experts keep.
@jax.checkpoint
def _logits(tokens: Array, router: Array) -> Array:
    # By default GPUs multiply float32 in TF32, with 10 bits of a mantissa.
    return jnp.dot(tokens.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)


def _axes_of_tokens(logits: Array, router: Array, parallel: ExpertParallel) -> tuple[str, ...]:
    """The manual mesh axes that split tokens.

    Types say it: tokens vary over them, and the router does not. It varies over the stages of a
    pipeline, which have routers of their own. With `check_vma=False` `parallel` must name the axes.
    It may name an axis over which a router varies for another reason.
    """
    named = parallel.tokens or (() if parallel.axis is None else (parallel.axis,))
    manual = set(named) & set(manual_axes())
    if types_show_varying():
        manual = manual & varying_axes(logits) | varying_axes(logits) - varying_axes(router)
    return tuple(sorted(manual))


def _flat(x: Array) -> Array:
    """Tokens [T, K] of x [..., K]."""
    return merge_axes(x, (x.ndim - 1, 1))


def _restored(y: Array, x: Array) -> Array:
    """y [T, N] with the leading axes of x [..., K]. An Explicit mesh splits both alike."""
    shape = (*x.shape[:-1], y.shape[-1])
    if not is_explicit(y):
        return y.reshape(shape)
    spec, flat = (jax.typeof(each).sharding.spec for each in (x, _flat(x)))
    y = jax.sharding.reshard(y, jax.P(flat[0], None))
    mesh = jax.typeof(y).sharding.mesh
    return lax.reshape(y, shape, out_sharding=jax.NamedSharding(mesh, jax.P(*spec[:-1], None)))


def _check_experts(experts: int, here: int, parallel: ExpertParallel) -> None:
    wanted = count_local_experts(experts, parallel)
    if here != wanted:
        raise ValueError(
            f"the kernels have {here} experts, but {wanted} of the router's {experts} experts are "
            "on this device. Inside jax.shard_map over the axis of experts, split the kernels and "
            "the states of experts over it with in_specs, and replicate the router."
        )
