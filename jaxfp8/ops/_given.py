"""The operands of a matmul, checked: the arrays, their places in the mesh, and their axes."""

import dataclasses
from typing import Any

from jax import lax

from jaxfp8._geometry import TrainingGeometry, check
from jaxfp8._typing import Array, Axes, DotDimensionNumbers, DType
from jaxfp8.numerics._formats import check_out_dtype, product_dtype
from jaxfp8.ops._arguments import check_key, check_operands
from jaxfp8.ops._bias import check_bias
from jaxfp8.ops._call import Places
from jaxfp8.ops._options import Options
from jaxfp8.prologues._prologue import produce
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._place import Place, Whole
from jaxfp8.sharding._shard import place, place_of_result
from jaxfp8.sharding._specs import parts_of


@dataclasses.dataclass(frozen=True)
class Given:
    """The operands of one call.

    Attributes:
      x: activations [...]; with a prologue, the array that it makes.
      w: weights [...].
      parts: the arrays that the prologue makes x from; None without a prologue.
      bias: [batch axes, axes that w keeps], or None.
      places: where x, w and g are in the mesh.
      shapes: the shapes of x and w before a mesh splits them.
      geometry: the axes of the three matmuls.
    """

    x: Array
    w: Array
    parts: tuple[Array, ...] | None
    bias: Array | None
    places: Places
    shapes: tuple[Axes, Axes]
    geometry: TrainingGeometry

    @property
    def size(self) -> tuple[int, int, int]:
        """The size (M, K, N) of the matmul [M, K] @ [K, N]. Batch axes count as rows.

        Inside `jax.shard_map` and in Explicit meshes it is the size on one device. In an Auto mesh
        types do not say how an array is split, so it is the size on all devices together.
        """
        lhs, rhs = self.geometry.fprop.sides
        x, w = (
            tuple(size // parts for size, parts in zip(shape, parts_of(array), strict=True))
            for shape, array in zip(self.shapes, (self.x, self.w), strict=True)
        )
        batch, m, _ = lhs.matrix_shape(x)
        # If only one operand is split along K, it is resharded before the matmul.
        k = max(lhs.matrix_shape(x)[2], rhs.matrix_shape(w)[2])
        return batch * m, k, rhs.matrix_shape(w)[1]

    def high_precision(
        self, precision: Any, preferred_element_type: DType | None, out_sharding: Any
    ) -> Array:
        """`jax.lax.dot_general` of the whole operands, in high precision."""
        y = lax.dot_general(
            self.places.x.gather(self.x), self.places.w.gather(self.w),
            self.geometry.fprop.dimension_numbers, precision, preferred_element_type,
            out_sharding=out_sharding,
        )  # fmt: skip
        return self.places.g.scatter(y)

    def out_dtype(self, preferred_element_type: DType | None) -> DType:
        """The dtype of the result."""
        if preferred_element_type is None:
            preferred_element_type = product_dtype(self.x.dtype, self.w.dtype)
        return check_out_dtype(preferred_element_type)


def read_operands(
    lhs: Any, rhs: Any, dimension_numbers: DotDimensionNumbers, recipe: Recipe, how: Options
) -> Given:
    """Check the operands that the user passed to a matmul.

    Raises:
      TypeError: if an operand is no float array, or `recipe` is no recipe.
      ValueError: for shapes, axes or shards that do not fit.
    """
    arrays, w = check_operands(lhs, rhs, recipe, how.prologue)
    if how.key is not None:
        check_key(how.key)
    made = None if how.prologue is None else produce(how.prologue, *arrays)
    x = arrays[0] if made is None else made.value
    places = Places(place("x", x, how.x_shard), place("w", w, how.w_shard), Whole())
    check_whole(x, places.x, how)
    shapes = places.x.whole_shape(x.shape), places.w.whole_shape(w.shape)
    geometry = TrainingGeometry.of(_axes(shapes, dimension_numbers, how), x.ndim, w.ndim)
    y_shape = geometry.fprop.out_shape(*shapes)
    places = places._replace(g=place_of_result(y_shape, (x, w), how.y_shard))
    bias = None
    if how.bias is not None:
        batch, kept, _ = geometry.fprop.rhs.shape(shapes[1])
        bias = check_bias(how.bias, batch + kept)
    # The gradient flows to `made.value`. `three_matmuls` returns no cotangent for these arrays.
    parts = None if made is None else lax.stop_gradient(made.operands)
    return Given(x, w, parts, bias, places, shapes, geometry)


def _axes(
    shapes: tuple[Axes, Axes], dimension_numbers: DotDimensionNumbers, how: Options
) -> DotDimensionNumbers:
    try:
        return check(*shapes, dimension_numbers)
    except ValueError as error:
        if how.x_shard is None and how.w_shard is None:
            raise
        raise ValueError(
            f"{error} (These are the shapes of whole operands: x_shard={how.x_shard!r}, "
            f"w_shard={how.w_shard!r}.)"
        ) from None


def check_whole(x: Array, x_place: Place, how: Options) -> None:
    """Raise ValueError if a prologue needs a whole axis that is split over devices.

    Args:
      x: the array that the prologue makes, or an array of the same shape.
      x_place: where x is in the mesh.
      how: the options of the call.

    Example:
      >>> import jax.numpy as jnp
      >>> check_whole(jnp.ones(2), Whole(), Options())
    """
    if how.prologue is None or how.x_shard is None or not x_place.manual_axes:
        return
    axis = how.x_shard.axis % x.ndim - x.ndim
    if axis in how.prologue.whole:
        raise ValueError(
            f"prologue={how.prologue!r} needs all of axis {axis} of lhs, but "
            f"x_shard={how.x_shard!r} splits it; split another axis."
        )
