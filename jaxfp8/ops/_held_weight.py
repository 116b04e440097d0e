"""A weight that the model holds in FP8, as the right operand of a matmul."""

from typing import Any

from jaxfp8._quantized_tensor import QuantizedTensor, check_scale, validate_types
from jaxfp8._typing import Axes, DotDimensionNumbers
from jaxfp8.numerics._formats import VALUE_FORMATS
from jaxfp8.ops._arrays import HeldCopies
from jaxfp8.ops._given import Given
from jaxfp8.ops._residuals import Copy
from jaxfp8.ops._tile_view import TileView, View, view_for
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.weights._quantized_weight import QuantizedWeight, WeightAxes, casts_of, handle


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


def view_of_weight(recipe: Recipe, axes: WeightAxes, shape: Axes) -> View:
    """The view of the matmul of a weight of this whole shape, with one row of activations.

    Example:
      >>> import jaxfp8 as fp8
      >>> view = view_of_weight(fp8.recipes.blockwise(), WeightAxes(contracted=(0, 1)), (12, 64, 8))
      >>> view.of_w.counts
      (2, 1)
    """
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
        mine = view_of_weight(weight.recipe, weight.axes, given.shapes[1])
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
