"""The cast of one weight that the model will hold in FP8."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, FP8StateError
from jaxfp8.ops._amax_axes import NO_VARIATION, AmaxAxes, Variation, amax_axes
from jaxfp8.ops._arguments import check_float
from jaxfp8.ops._arrays import QuantizerArrays
from jaxfp8.ops._call import Call, Places
from jaxfp8.ops._held_weight import view_of_weight
from jaxfp8.ops._once import dropped
from jaxfp8.ops._operands import quantize_operand
from jaxfp8.ops._tile_view import View
from jaxfp8.plan._backends import Backends
from jaxfp8.plan._kernels import Kernels
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import varying
from jaxfp8.sharding._place import Place, Whole
from jaxfp8.sharding._shard import place
from jaxfp8.state._identity import known_scales, matched
from jaxfp8.state._ledger import zero_ledgers
from jaxfp8.state._state import MatmulState
from jaxfp8.weights._quantized_weight import QuantizedWeight, WeightAxes, casts_of


def quantize_weight(
    w: Array,
    recipe: Recipe,
    axes: WeightAxes,
    *,
    state: MatmulState | None = None,
    primary: bool = False,
    name: str = "w",
) -> QuantizedWeight:
    """One weight [...] in FP8, for all matmuls of the recipe; see `fp8.quantize_params`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> quantize_weight(jnp.ones((4, 8)), fp8.recipes.mxfp8(), WeightAxes())
      QuantizedWeight(mxfp8, [4, 8] of float32, with its original)
    """
    return _quantize(w, recipe, axes, axes.stacked, state, primary=primary, name=name)


def requantize(
    weight: QuantizedWeight, w: Array, *, state: MatmulState | None = None, name: str = "w"
) -> QuantizedWeight:
    """The weight with new values w [...], cast as it was.

    Args:
      weight: the weight before. It may be one layer of a stack.
      w: the new values, in any float dtype. They are rounded to `weight.dtype` first.
      state: the quantizer state of its matmul, for recipes with state.
      name: of the weight, for messages.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> weight = quantize_weight(jnp.ones((4, 8)), fp8.recipes.current(), WeightAxes())
      >>> float(requantize(weight, jnp.full((4, 8), 7.0)).scales[0])
      0.015625
    """
    return _quantize(
        w.astype(weight.dtype), weight.recipe, weight.axes, weight.stacked, state,
        primary=weight.original is None, name=name,
    )  # fmt: skip


def _quantize(
    w: Array,
    recipe: Recipe,
    axes: WeightAxes,
    stacked: int,
    state: MatmulState | None,
    *,
    primary: bool,
    name: str,
) -> QuantizedWeight:
    w = check_float(name, w)
    if w.ndim <= stacked:
        raise ValueError(
            f"{name} {list(w.shape)} has no axes besides the {stacked} stacked ones. Lower "
            "WeightAxes.stacked."
        )
    cast: Callable[..., QuantizedWeight] = functools.partial(
        _cast, recipe=recipe, axes=axes, name=name
    )
    for _ in range(stacked):
        cast = jax.vmap(cast)
    if primary:
        w = dropped(w)
    # The gradient flows to the original, and not through the cast.
    weight = cast(*lax.stop_gradient((w, state)))
    return weight if primary else dataclasses.replace(weight, original=w)


def _cast(
    w: Array, state: MatmulState | None, *, recipe: Recipe, axes: WeightAxes, name: str
) -> QuantizedWeight:
    """One weight [...] that is not stacked, without its original."""
    if isinstance(state, MatmulState) and state.scale.ndim > 1:
        raise FP8StateError(
            f"{name} has stacked states, state.scale {list(state.scale.shape)}. If they are those "
            "of the layers of a scan, raise WeightAxes.stacked, the number of their axes. If they "
            "are those of experts, leave the kernel out by rules=: experts take it in high "
            "precision."
        )
    own = matched(state, recipe)
    where = place("w", w, axes.shard)
    view = view_of_weight(recipe, axes, where.whole_shape(w.shape))
    casts_of(recipe, view.geometry)  # raises an error for recipes that need the weight itself
    across = amax_axes(recipe, axes.reduce_axes, None)
    where = view.places(Places(Whole(), where, Whole())).w
    call = _call(recipe, view, where, across, own)
    arrays = QuantizerArrays()
    if own is not None:
        known = known_scales(own) if own.probe is None else own.probe.known
        arrays = QuantizerArrays(known, zero_ledgers(own))
    variation = _variation(w, where, across, recipe, name)
    cast = quantize_operand(call, "w", view.weight(w), arrays, variation)
    copies: dict[int, QuantizedTensor] = {}  # two matmuls may read one copy
    for operand in cast.now.values():
        assert isinstance(operand, QuantizedTensor)
        copies[id(operand)] = operand
    seen = [cast.seen[key] for key in sorted(cast.seen)]
    return QuantizedWeight(
        values=tuple(view.weight_again(each.values, w) for each in copies.values()),
        scales=tuple(each.scale for each in copies.values()),
        amaxes=jnp.stack(seen) if seen else None,
        original=None,
        recipe=recipe,
        axes=axes,
        dtype=w.dtype,
        scale_axes=tuple(_scale_axes(each, view.weight_axes(w.ndim)) for each in copies.values()),
    )


def _scale_axes(copy: QuantizedTensor, axes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The axis of the weight for each axis of a scale, from those of the values."""
    if not copy.scale.ndim:
        return ()
    cells = (copy.granularity.has_cells_along(i, copy.ndim) for i in range(copy.ndim))
    return tuple(axis if many else None for axis, many in zip(axes, cells, strict=True))


def _call(
    recipe: Recipe, view: View, where: Place, across: AmaxAxes, own: MatmulState | None
) -> Call:
    """A call that only casts a weight."""
    none: Any = None
    return Call(
        recipe=recipe, geometry=view.geometry, out_dtype=none, precision=none,
        fast_accumulation=False, out_sharding=none, collected=own is not None,
        in_gradient_channel=False, settled=own is not None and own.settled, amax_axes=across,
        places=Places(Whole(), where, Whole()), kernels=Kernels(), backends=Backends(),
        prologue=None, save_original=(), watched=None,
    )  # fmt: skip


def _variation(w: Array, where: Place, across: AmaxAxes, recipe: Recipe, name: str) -> Variation:
    """The mesh axes over which the weight varies inside `jax.shard_map`."""
    if not across.manual:
        return NO_VARIATION
    axes = varying(w) - where.manual_axes
    if axes and "w" in recipe.tensors_in_rows:
        raise ValueError(
            f"{name} varies over {sorted(axes)} inside jax.shard_map, and recipe {recipe.name!r} "
            "has a scale for each row of it. Types do not say whether these mesh axes split its "
            "rows. Call quantize_params outside of shard_map, or name the split in "
            "WeightAxes(shard=...)."
        )
    none: frozenset[str] = frozenset()
    # Axes that are not named hold apart stages or experts, as where x varies over them, too.
    x = none if across.named is None else axes
    return Variation(x, axes, none, none, across.named, batched=False)
