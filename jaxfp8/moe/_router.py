"""Routers: which experts each token gets, with which weight, and losses that keep them in use.

Everything here is in float32, whatever the dtype of the logits.

Letters: T tokens, E experts, k choices of a token.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._check import check_int, check_one_of
from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array, ArrayLike
from jaxfp8.matmul._options import check_float
from jaxfp8.ops._dispatch_matmul import check_choices, to_int32

Scores: TypeAlias = Literal["softmax", "sigmoid"]
"""How logits become scores: over all experts together, or for each expert by itself."""


@register_node
class Choices(NamedTuple):
    """The experts of each token.

    Attributes:
      gates: f32[T, k], the weight of each choice.
      chosen: i32[T, k], the expert of each choice, best first. They differ in a row.

    Example:
      >>> import jax.numpy as jnp
      >>> top_k(jnp.array([[0.0, 2.0, 1.0]]), 2).chosen
      Array([[1, 2]], dtype=int32)
    """

    gates: Array
    chosen: Array


def top_k(
    logits: ArrayLike, k: int, *, scores: Scores = "softmax", normalized: bool = True
) -> Choices:
    """The k experts of each token with the highest scores.

    A token with a NaN gets gates of NaN, and k experts that differ.

    Args:
      logits: [T, E] floating point. They are computed on in float32. A router's matmul should be
        in float32, too: `jnp.dot(x.astype(jnp.float32), w, precision="highest")`. By default a GPU
        would round x and w to TF32, with 10 bits of a mantissa.
      k: how many experts each token gets.
      scores: "softmax" over all experts (Mixtral, Qwen), or "sigmoid" of each (DeepSeek-V3).
      normalized: whether gates are divided by their sum, so that they add up to 1. With k = 1 a
        gate is then always 1, and the result has no gradient for the router.

    Raises:
      TypeError, ValueError: for logits that are not [T, E], and a k that is not in 1 to E.

    Example:
      >>> import jax.numpy as jnp
      >>> top_k(jnp.log(jnp.array([[1.0, 3.0, 4.0]])), 2, normalized=False).gates
      Array([[0.5  , 0.375]], dtype=float32)

    References:
      Shazeer et al., arXiv:1701.06538; Mixtral, arXiv:2401.04088; DeepSeek-V3, arXiv:2412.19437,
      section 2.1.2.
    """
    logits = _checked(logits)
    check_int("k", k, "the choices of a token, an integer", most=logits.shape[1])
    check_one_of("scores", scores, get_args(Scores))
    score = jax.nn.softmax(logits, axis=1) if scores == "softmax" else jax.nn.sigmoid(logits)
    gates, chosen = lax.top_k(score, k)
    if normalized:
        # Scores of a sigmoid may all be 0. The smallest normal number keeps 0 / 0 away.
        total = jnp.sum(gates, axis=1, keepdims=True)
        gates = gates / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return Choices(gates, chosen)


def load(chosen: ArrayLike, experts: int, *, axes: tuple[str, ...] = ()) -> Array:
    """How many choices each expert gets, i32[E].

    Args:
      chosen: i32[T, k]. A number that is no expert is not counted.
      experts: E.
      axes: inside `jax.shard_map`, the mesh axes that split tokens.

    Raises:
      TypeError, ValueError: for choices that are no integers, or not [T, k].

    Example:
      >>> import jax.numpy as jnp
      >>> load(jnp.array([[0, 2], [2, 1]]), 4)
      Array([1, 1, 2, 0], dtype=int32)
    """
    chosen = to_int32(check_choices(chosen), experts)
    # Without a reshape, so that tokens may be split over an Explicit mesh.
    each = jnp.arange(experts, dtype=jnp.int32)[None, None]
    count = jnp.sum(chosen[:, :, None] == each, axis=(0, 1), dtype=jnp.int32)
    return lax.psum(count, axes) if axes else count


def load_balancing_loss(
    logits: ArrayLike, chosen: ArrayLike, *, axes: tuple[str, ...] = ()
) -> Array:
    """`E * sum_e f_e * p_e`: 1 if all experts are chosen equally often, up to E / k if not.

    f_e is the share of choices that expert e gets, and p_e the mean probability of the expert in
    the softmax of logits. The gradient flows through p_e.

    Args:
      logits: [T, E].
      chosen: i32[T, k].
      axes: inside `jax.shard_map`, the mesh axes that split tokens. The loss is then that of all
        tokens. Without it, each device balances its own.

    Returns:
      f32[]. Add it to the loss with a small factor, 0.01 for instance.

    Raises:
      TypeError, ValueError: for logits that are not [T, E], and choices that are not those of T
        tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> load_balancing_loss(jnp.zeros((2, 2)), jnp.array([[0], [1]]))
      Array(1., dtype=float32)

    References:
      Fedus et al., Switch Transformers, arXiv:2101.03961, section 2.2.
    """
    logits = _checked(logits)
    experts = logits.shape[1]
    if jnp.shape(chosen)[:1] != logits.shape[:1]:
        raise ValueError(
            f"logits have shape {list(logits.shape)}, and chosen {list(jnp.shape(chosen))}. Pass "
            "both for the same tokens."
        )
    count = load(chosen, experts, axes=axes).astype(jnp.float32)
    share = count / jnp.maximum(jnp.sum(count), 1.0)
    mean = jnp.mean(jax.nn.softmax(logits, axis=1), axis=0)
    if axes:
        mean = lax.pmean(mean, axes)
    return experts * jnp.sum(share * mean)


def z_loss(logits: ArrayLike, *, axes: tuple[str, ...] = ()) -> Array:
    """The mean square of `logsumexp(logits)`, which keeps logits small.

    Args:
      logits: [T, E].
      axes: inside `jax.shard_map`, the mesh axes that split tokens.

    Returns:
      f32[]. Add it to the loss with a small factor, 0.001 for instance.

    Example:
      >>> import jax.numpy as jnp
      >>> z_loss(jnp.zeros((3, 1)))
      Array(0., dtype=float32)

    References:
      Zoph et al., ST-MoE, arXiv:2202.08906, section 3.3.
    """
    square = jnp.mean(jax.nn.logsumexp(_checked(logits), axis=1) ** 2)
    return lax.pmean(square, axes) if axes else square


def _checked(given: ArrayLike) -> Array:
    """The logits in float32, [T, E]."""
    logits = check_float("logits", given)
    if logits.ndim != 2 or not all(logits.shape):
        raise ValueError(
            f"logits has shape {list(logits.shape)}. Pass [T, E]: a row of logits for each token."
        )
    return logits.astype(jnp.float32)
