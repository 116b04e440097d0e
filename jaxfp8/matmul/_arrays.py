"""The arrays of a call: operands, and what the backward pass keeps of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfp8._check import check_bool
from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Matmul, Tensor
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.quantizers._base import Operand
from jaxfp8.recipes._recipe import PlannedCast
from jaxfp8.sharding._route import Route

# The names of what a matmul saves for its backward pass, and the remat policies that save it.

_RESIDUAL = "jaxfp8_residual"  # of the FP8 copies of x: values and scales
# A second name of the FP8 copies of x, and of amaxes. It is the name in the remat policies of
# MaxText, so that they save the residuals unchanged. A policy may list either name.
_ALIAS = "quantization"
_WEIGHT = "jaxfp8_weight"  # of the FP8 copies of w; the weight itself is there in every pass
_AMAX = "jaxfp8_amax"  # of amaxes of tensors and rows; a second cast then reads its tensor once


def save_fp8_residuals(*, inputs: bool = True, weights: bool = False) -> Callable[..., Any]:
    """A policy for `jax.checkpoint(policy=)`, `nn.remat` and `nnx.remat`.

    It saves FP8 copies of the inputs of matmuls, and recomputes the rest. It also saves amaxes of
    tensors and rows, so that a second cast neither reads a tensor twice nor asks other devices. To
    save more, join it with a policy of your own by
    `jax.checkpoint_policies.save_from_both_policies`.

    Args:
      inputs: whether to save the FP8 copy of x, the input of a matmul, from which the gradient of w
        is computed. It has 1 byte a value. Without it, x is computed and cast again. If the result
        of the matmul is computed again, it may read another copy, for instance with scales of rows
        or tiles. That copy is not saved, and x is cast again for it.
      weights: whether to save the FP8 copy of the weight w, too. The weight itself is in memory in
        any case, so the copy costs 1 byte a weight in every layer. It spares the backward pass one
        cast of w. It spares no gather, because only a shard is saved.

    Returns:
      The policy.

    Raises:
      TypeError: if an argument is no bool.

    Example:
      >>> import jax, jaxfp8 as fp8
      >>> block = jax.checkpoint(lambda x: x, policy=fp8.save_fp8_residuals())
    """
    for name, given in (("inputs", inputs), ("weights", weights)):
        check_bool(name, given)
    names = [_AMAX, *([_RESIDUAL] if inputs else []), *([_WEIGHT] if weights else [])]
    return jax.checkpoint_policies.save_only_these_names(*names)


def _named_copy(x: Array, tensor: Tensor) -> Array:
    if tensor == "w":
        return checkpoint_name(x, _WEIGHT)
    # The outer name saves it, or the inner one saves what the outer one reads.
    return checkpoint_name(checkpoint_name(x, _RESIDUAL), _ALIAS)


def name_amax(x: Array) -> Array:
    """An amax, or another small result of the forward pass, under both of its names."""
    return checkpoint_name(checkpoint_name(x, _AMAX), _ALIAS)


# Copies of a tensor as residuals: what is saved for the backward pass, and under which name.


@register_node
@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy of a tensor, and the matmuls that read it."""

    operand: Operand  # its scale is None if it is a stored one
    readers: tuple[Matmul, ...] = dataclasses.field(metadata=STATIC)
    # The row of the state, which has the scale in every pass; None if the copy has its scale. A
    # loop over layers would save the scale as one more residual, with a kernel that writes it and
    # one that reads it.
    row: int | None = dataclasses.field(default=None, metadata=STATIC)
    # Gathered. Else it is a shard, or is not split.
    is_whole: bool = dataclasses.field(default=False, metadata=STATIC)

    @classmethod
    def of(
        cls,
        operand: Operand,
        readers: tuple[Matmul, ...],
        planned: PlannedCast,
        stored: KnownScale | None,
    ) -> "Copy":
        if (
            stored is None
            or not isinstance(operand, QuantizedTensor)
            # Of an unset row, and of a quantizer of the user's, the scale may be another one.
            or operand.scale is not stored.scale
        ):
            return cls(operand, readers)
        return cls(_without_scale(operand), readers, planned.row)

    def gathered(self, operand: Operand) -> "Copy":
        """The same copy, if the forward pass has gathered it: `operand` is what fprop reads."""
        # A copy for the backward pass alone is another one. Bytes see `_as_bytes`.
        if "fprop" not in self.readers or _as_bytes():
            return self
        if self.row is not None:
            assert isinstance(operand, QuantizedTensor)
            operand = _without_scale(operand)
        return dataclasses.replace(self, operand=operand, is_whole=True)

    def with_scale(self, known: Array | None) -> Operand:
        """The copy with its scale, which may be one of `QuantizerArrays.known`."""
        if self.row is None:
            return self.operand
        assert isinstance(self.operand, QuantizedTensor)
        assert known is not None
        return dataclasses.replace(self.operand, scale=stored_scale(known, self.row).scale)


def _without_scale(operand: QuantizedTensor) -> QuantizedTensor:
    none: Any = None
    return dataclasses.replace(operand, scale=none)


def _as_bytes() -> bool:
    """Whether FP8 values are saved as bytes: where `jax.checkpoint` could make NaN of them."""
    # It applies a `lax.reduce_precision` to an array that it saves, if the forward pass reads it,
    # too. That operation treats E4M3FN as an IEEE format with infinities, so values above 240 would
    # become NaN. What `_fprop` reads inside its `jax.jit` is safe. Without jit, and with
    # `jax_remat3`, it is not. Bytes are safe everywhere, but XLA for TPUs copies an array to read
    # its bytes as FP8: a block of Llama 3 then took 10 % more cycles.
    return any(getattr(jax.config, name) for name in ("jax_disable_jit", "jax_remat3"))


def name_residuals(copies: list[Copy], tensor: Tensor) -> tuple[list[Copy], list[Copy]]:
    """The same copies with the names of residuals, twice: for this pass and the backward pass."""

    def one(leaf: Array) -> tuple[Array, Array]:
        if not (leaf.dtype.name.startswith("float8") and _as_bytes()):
            leaf = _named_copy(leaf, tensor)
            return leaf, leaf
        values = _named_copy(lax.bitcast_convert_type(leaf, jnp.uint8), tensor)
        now, later = (lax.bitcast_convert_type(values, leaf.dtype) for _ in range(2))
        return now, later

    def both(copy: Copy) -> tuple[Copy, Copy]:
        # A copy for fprop alone has no name: if remat runs fprop again, it casts it again. With a
        # name there would be two saved copies, as large as the tensor in bfloat16.
        if copy.readers == ("fprop",):
            return copy, copy
        leaves, structure = jax.tree.flatten(copy)
        now, later = zip(*map(one, leaves), strict=True)
        return jax.tree.unflatten(structure, now), jax.tree.unflatten(structure, later)

    now, later = zip(*map(both, copies), strict=True)
    return list(now), list(later)


# Rows of groups: which rows belong to which group, and how they come from other devices.

_RETURNS: dict[Matmul, str | None] = {"fprop": "g", "dgrad": "x", "wgrad": None}


@register_node
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a grouped matmul."""

    groups: Groups
    route: Route | None = None  # how rows come from other devices, if `routed` is not None
    # The tensor that is sent to the devices of the groups. The one that has its shape is sent back:
    # if x is sent, so is its gradient; if g is sent, it is that of y, which was sent. None if all
    # rows are here.
    routed: Literal["x", "g"] | None = dataclasses.field(default=None, metadata=STATIC)

    def returned(self, matmul: Matmul, result: Array) -> Array:
        """The result of a matmul, sent back to the devices of the tokens if they wait for it."""
        if self.route is None or _RETURNS[matmul] != self.routed:
            return result
        return self.route.to_tokens(result)


# The arrays of one call of a matmul, which JAX traces and differentiates.


@register_node
@dataclasses.dataclass(frozen=True)
class KnownAmaxes:
    """Amaxes of a tensor that were found before: a second cast does not look for them."""

    # (row of state, granularity)
    keys: tuple[tuple[int | None, AbstractGranularity], ...] = dataclasses.field(
        default=(), metadata=STATIC
    )
    amaxes: tuple[Array, ...] = ()  # f32[...], in the shape of the scale


class QuantizerArrays(NamedTuple):
    """The arrays that quantizers need besides a tensor. R are the rows of state."""

    known: Array | None = None  # f32[2R], see `state._identity.known_scales`
    ledger: Array | None = None  # f32[BINS, R], collects amaxes, see `state._ledger`
    key: Array | None = None
    amaxes: KnownAmaxes = KnownAmaxes()


def stored_scale(known: Array, row: int) -> KnownScale:
    """The multiplier and the scale of a row of state, each [...], of `QuantizerArrays.known`."""
    return KnownScale(known[..., row], known[..., known.shape[-1] // 2 + row])


class HeldCopies(NamedTuple):
    """The FP8 copies of a weight that the model holds, so that no matmul casts it."""

    copies: tuple[Copy, ...]  # one for each direction, with its scale
    seen: Array | None  # the amax of the weight for each of its rows of state


class Arrays(NamedTuple):
    """The arrays of a call. A field is None if the call has no such array."""

    x: Array  # with a prologue, the array that it makes; the gradient flows to it
    w: Array  # with `held` nobody reads it, and only the gradient flows to it
    bias: Array | None = None  # [batch axes, axes that w keeps]
    parts: tuple[Array, ...] | None = None  # the arrays that the prologue makes x from
    quantizers: QuantizerArrays = QuantizerArrays()
    held: HeldCopies | None = None
    rows: Rows | None = None  # which rows of x belong to which matrix of w
