"""One weight that a model holds in FP8: how it is quantized, and how a matmul reads it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor, check_scale, validate_types
from jaxfp8._typing import Array, Axes, DotDimensionNumbers, FP8StateError
from jaxfp8.matmul._arrays import Copy, HeldCopies, QuantizerArrays, dropped
from jaxfp8.matmul._call import NO_VARIATION, AmaxAxes, Call, Places, Variation, amax_axes
from jaxfp8.matmul._given import Given
from jaxfp8.matmul._operands import quantize_operand
from jaxfp8.matmul._options import check_float
from jaxfp8.matmul._tile_view import TileView, View, view_for
from jaxfp8.numerics._formats import VALUE_FORMATS
from jaxfp8.plan._backends import Backends
from jaxfp8.plan._kernels import Kernels
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import varying
from jaxfp8.sharding._place import Place, Whole
from jaxfp8.sharding._shard import place
from jaxfp8.state._identity import known_scales, matched
from jaxfp8.state._ledger import zero_ledgers
from jaxfp8.state._state import MatmulState
from jaxfp8.weights._quantized_weight import QuantizedWeight, WeightAxes, casts_of, handle

# A weight that the model holds in FP8, as the right operand of a matmul.


def array_of(
    weight: Any, recipe: Recipe, numbers: DotDimensionNumbers
) -> tuple[Any, QuantizedWeight | None]:
    """The right operand as an array, and the weight if it is a `QuantizedWeight`.

    Args:
      weight: what was passed as rhs.
      recipe: the recipe of the call.
      numbers: the dimension numbers of the call.

    Raises:
      ValueError: if the weight was quantized for another recipe or for other axes.

    Example:
      >>> import jaxfp8 as fp8
      >>> array_of(1.0, fp8.recipes.current(), (((), ()), ((), ())))
      (1.0, None)
    """
    if not isinstance(weight, QuantizedWeight):
        return weight, None
    if weight.recipe.uses("w") != recipe.uses("w"):
        names = [f"{each.name!r}" for each in (weight.recipe, recipe)]
        if weight.recipe.name == recipe.name:  # recipes of one function with other arguments
            names = [
                f"{each.name!r} with {each.uses('w')[0][1]}" for each in (weight.recipe, recipe)
            ]
        raise ValueError(
            f"rhs was quantized for recipe {names[0]}, but this matmul has recipe {names[1]}, "
            "which casts weights in another way. Quantize each weight with the recipe of its "
            "matmul: fp8.quantize_params(params, recipe)."
        )
    (_, contracted), (_, batch) = numbers
    given = WeightAxes(
        contracted=_positive(contracted, weight.ndim), batch=_positive(batch, weight.ndim)
    )
    mine = weight.axes
    if (set(given.contracted), given.batch) != (set(mine.contracted), mine.batch):
        raise ValueError(
            f"this matmul contracts axes {given.contracted} of rhs {list(weight.shape)}, with "
            f"batch axes {given.batch}. But rhs was quantized for {mine}. Pass "
            f"WeightAxes(contracted={given.contracted}, batch={given.batch}) to quantize_params."
        )
    return handle(weight), weight


def _positive(axes: Any, ndim: int) -> Axes:
    return tuple(axis % ndim for axis in axes)


def _view_of_weight(recipe: Recipe, axes: WeightAxes, shape: Axes) -> View:
    """The view of the matmul of a weight of this whole shape, with one row of activations."""
    geometry = axes.geometry(len(shape))  # first, because it checks the axes
    x_shape = tuple(shape[axis] for axis in axes.batch)
    x_shape = (*x_shape, 1, *(shape[axis] for axis in axes.contracted))
    return view_for(recipe.tile, geometry, (x_shape, shape))


def held_copies(weight: QuantizedWeight, view: View, given: Given) -> HeldCopies:
    """The FP8 copies of a weight, as operands of the view.

    Raises:
      ValueError: if the tiles of the weight do not fit the matmul, if layers are stacked, or if a
        scale that is not traced cannot be that of a cast.

    Example: see `fp8.quantize_params`.
    """
    if isinstance(view, TileView):
        mine = _view_of_weight(weight.recipe, weight.axes, given.shapes[1])
        assert isinstance(mine, TileView)
        if mine.of_w != view.of_w:
            raise ValueError(
                f"rhs was quantized for {weight.axes}, but this matmul contracts its axes in "
                "another order, so its tiles run along other axes. Give contracted= in the order "
                "of the axes of lhs."
            )
    copies: list[Copy] = []
    for planned in casts_of(weight.recipe, view.geometry):
        assert planned.cast is not None
        for granularity, readers in zip(planned.cast.granularities, planned.readers, strict=True):
            i = len(copies)
            values, rule = view.weight(weight.values[i]), planned.cast.rule
            tensor = QuantizedTensor(
                values, weight.scales[i], granularity, weight.dtype, rule.exact
            )
            _check(tensor, weight)
            copies.append(Copy(tensor, readers))
    return HeldCopies(tuple(copies), weight.amaxes)


def _check(tensor: QuantizedTensor, weight: QuantizedWeight) -> None:
    name, cure = f"rhs, a {weight},", "fp8.quantize_params(params, recipe)"
    if (dtype := tensor.values.dtype) not in [format.dtype for format in VALUE_FORMATS]:
        raise ValueError(
            f"{name} has values of dtype {dtype}, and they must be FP8. jax.tree.map has cast or "
            f"replaced its arrays. Do so before the cast, and quantize the result: {cure}."
        )
    try:
        validate_types(tensor, "rhs")
    except ValueError as error:
        raise ValueError(
            f"rhs was quantized for {weight.axes}, and its scales do not fit this matmul: {error} "
            "If its layers are stacked, for instance for a scan, quantize with "
            "WeightAxes(stacked=1). Then scan or map over the stacked weights, or index them: "
            "jax.tree.map(lambda leaf: leaf[i], weight)."
        ) from None
    check_scale(tensor, name, cure)


# The cast of one weight that the model will hold in FP8.


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
    view = _view_of_weight(recipe, axes, where.whole_shape(w.shape))
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
