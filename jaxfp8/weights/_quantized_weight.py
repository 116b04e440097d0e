"""`QuantizedWeight`: the FP8 copies of a weight that a model holds, and its gradient's way."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jaxfp8._check import check_int, check_type
from jaxfp8._geometry import TrainingGeometry
from jaxfp8._pytrees import STATIC, register_node, register_value
from jaxfp8._typing import Array, Axes, DType, Matmul
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.recipes._recipe import PlannedCast, Recipe, plan_casts
from jaxfp8.sharding._shard import Shard


@register_value
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightAxes:
    """What the forward matmul does with the axes of a weight. The default is a kernel [K, N].

    Axes are counted without the stacked ones, and from 0.

    Attributes:
      contracted: the axes that the forward matmul contracts, in the order of its dimension numbers.
        All axes that are neither contracted nor batch axes are kept.
      batch: the batch axes of the matmul, for instance that of experts [E, K, N].
      stacked: how many leading axes stack the weights of several layers, as `nn.scan` and
        `jax.lax.scan` want them. Each layer has its own scales.
      shard: how the mesh splits the weight where it is cast: the `w_shard` of the matmul. It is
        needed inside `jax.shard_map`. Without a mesh it is ignored.
      reduce_axes: inside `jax.shard_map`, the mesh axes that an amax is reduced over. None: all
        axes that the weight varies over. Name them if some separate stages or experts.

    Raises:
      TypeError: if a field has another type.
      ValueError: if an axis is named twice, or if `stacked` is no number of axes.

    Example:
      >>> WeightAxes(contracted=(0, 1))  # the kernel [heads, features, D] after attention
      WeightAxes(contracted=(0, 1), batch=(), stacked=0, shard=None, reduce_axes=None)
    """

    contracted: Axes = (0,)
    batch: Axes = ()
    stacked: int = 0
    shard: Shard | None = None
    reduce_axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        axes = self.contracted, self.batch
        if not all(isinstance(each, tuple) for each in axes) or not all(
            type(axis) is int and axis >= 0 for axis in sum(axes, ())
        ):
            raise TypeError(
                f"contracted={self.contracted!r} and batch={self.batch!r} must be tuples of axes, "
                "counted from 0: contracted=(0,)."
            )
        check_int("stacked", self.stacked, "a number of leading axes, an integer", least=0)
        check_type("shard", self.shard, Shard | None, "an fp8.Shard or None")
        check_type(
            "reduce_axes", self.reduce_axes, tuple | None, "a tuple of names of mesh axes, or None"
        )
        named = self.contracted + self.batch
        if not self.contracted or len(set(named)) < len(named):
            raise ValueError(
                f"contracted={self.contracted} and batch={self.batch} must name at least one "
                "contracted axis, and each axis once."
            )

    def geometry(self, ndim: int) -> TrainingGeometry:
        """The axes of the matmul x [*batch, M, *contracted] @ w, for a weight of `ndim` axes.

        Raises:
          ValueError: if an axis is out of range.
        """
        if max(self.contracted + self.batch) >= ndim:
            raise ValueError(
                f"{self} does not fit a weight of {ndim} axes without the stacked ones. Name its "
                "axes in WeightAxes(contracted=...)."
            )
        batches = len(self.batch)
        contracted = tuple(range(batches + 1, batches + 1 + len(self.contracted)))
        numbers = (contracted, self.contracted), (tuple(range(batches)), self.batch)
        return TrainingGeometry.of(numbers, batches + 1 + len(self.contracted), ndim)


@register_node
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight in FP8, as the matmuls of one recipe read it: a pytree in the place of an array.

    A matmul or a layer of jaxfp8 takes it in the place of the weight, and does not cast it. Its
    gradient is that of the weight, in `dtype`: `fp8.value_and_grad` returns it.

    It has no arithmetic: `2 * w` raises an error. `jax.tree.map` sees the values and scales. It may
    copy, move, stack or index them. It must not compute with them: `jax.tree.map(lambda x: 2 * x,
    w)` stands for 4 times the weight.

    It has one copy if the recipe has a scale for each tensor or square tiles, because the forward
    matmul and the one of the gradient of x read the same values then. Otherwise it has two. The
    values of a copy have the shape of the weight. Stacked layers are leading axes of all arrays.

    Attributes:
      values: FP8 [...], one for each copy.
      scales: their scales, as the matmul reads them.
      amaxes: f32[], the amax of the weight, if the recipe has state; else None. Matmuls record it.
      original: the weight [...], to which the gradient flows; None if only the FP8 copies are in
        memory. No matmul reads it.
      recipe: the recipe whose matmuls read the copies (static).
      axes: what these matmuls do with the axes of the weight (static).
      dtype: the dtype of the weight before the cast (static).
      scale_axes: for each copy and each axis of its scale in one matmul, the axis of the weight
        whose shards it follows; None for an axis that is whole (static).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.blockwise()
      >>> params = fp8.quantize_params({"kernel": jnp.ones((256, 128))}, recipe, primary=True)
      >>> params["kernel"].shape, params["kernel"].nbytes / (256 * 128)
      ((256, 128), 1.000244140625)
    """

    values: tuple[Array, ...]
    scales: tuple[Array, ...]
    amaxes: Array | None
    original: Array | None
    recipe: Recipe = dataclasses.field(metadata=STATIC)
    axes: WeightAxes = dataclasses.field(metadata=STATIC)
    dtype: DType = dataclasses.field(metadata=STATIC)
    scale_axes: tuple[tuple[int | None, ...], ...] = dataclasses.field(metadata=STATIC)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, with its stacked axes."""
        return self.values[0].shape

    @property
    def ndim(self) -> int:
        return self.values[0].ndim

    @property
    def stacked(self) -> int:
        """How many leading axes stack layers here. A loop over layers has sliced them off."""
        return self.scales[0].ndim - len(self.scale_axes[0])

    @property
    def size(self) -> int:
        return self.values[0].size

    @property
    def nbytes(self) -> int:
        """The bytes of the FP8 copies and their scales."""
        return sum(each.size * each.dtype.itemsize for each in (*self.values, *self.scales))

    def specs(self, spec: jax.P) -> "QuantizedWeight":
        """The partition specs of all arrays, from the spec of the weight.

        They are for `jax.jit(out_shardings=)`, with `jax.NamedSharding`, and for `jax.shard_map`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jaxfp8 as fp8
          >>> params = {"kernel": jnp.ones((256, 512))}
          >>> weight = fp8.quantize_params(params, fp8.recipes.blockwise(), primary=True)["kernel"]
          >>> weight.specs(jax.P("fsdp", None)).scales == (jax.P("fsdp", None),)
          True
        """
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        leading, of_axes = entries[: self.stacked], entries[self.stacked :]
        scales: Any = tuple(
            jax.P(*leading, *(None if axis is None else of_axes[axis] for axis in axes))
            for axes in self.scale_axes
        )
        array: Any = spec
        amaxes: Any = None if self.amaxes is None else jax.P(*leading)
        return dataclasses.replace(
            self, values=(array,) * len(self.values), scales=scales, amaxes=amaxes,
            original=None if self.original is None else array,
        )  # fmt: skip

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        """The weight itself, for `weight[...]`. nnx layers read their kernel so."""
        if index is not Ellipsis:
            raise TypeError(
                f"{self} cannot be indexed by {index!r}. Index stacked layers with "
                "jax.tree.map(lambda leaf: leaf[i], weight)."
            )
        return self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Refuses. Python's own error for arithmetic would not say what to write."""
        raise TypeError(
            f"{self} is no array, and only matmuls and layers of jaxfp8 with its recipe take it. "
            "Everywhere else use the weight in high precision, and leave it out of quantize_params "
            "where it has other uses. To change it, change its master weight (optim.master_weights)"
            " or the weight before the cast, and quantize the result. An optimizer changes it as "
            "optim.with_master_weights(tx, master=...)."
        )

    # jnp calls the first one for an operand that is no array, and NumPy the second one.
    __jax_array__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse
    __neg__ = __pos__ = __abs__ = _refuse

    def __repr__(self) -> str:
        kept = "" if self.original is None else ", with its original"
        shape = list(getattr(self.values[0], "shape", ()))
        return (
            f"QuantizedWeight({self.recipe.name}, {shape} of {jax.numpy.dtype(self.dtype)}{kept})"
        )


def is_weight(node: object) -> bool:
    """Whether a tree node is a `QuantizedWeight`."""
    return isinstance(node, QuantizedWeight)


def plan_weight_casts(recipe: Recipe, geometry: TrainingGeometry) -> tuple[PlannedCast, ...]:
    """The casts of a weight for the matmuls of a recipe.

    ValueError if the recipe reads the weight in high precision, or rounds it stochastically.
    """
    planned = plan_casts(recipe, geometry, "w", ("xla",))
    for each in planned:
        if each.cast is None:
            raise ValueError(
                f"recipe {recipe.name!r} reads weights in high precision in "
                f"{', '.join(sum(each.readers, ()))}. FP8 copies cannot take their place; leave "
                "these weights out of quantize_params."
            )
        if each.quantizer.rounding == "stochastic":
            raise ValueError(
                f"recipe {recipe.name!r} rounds weights stochastically. quantize_params rounds to "
                "nearest; use a recipe that rounds gradients only."
            )
    return planned


class WeightCopy(NamedTuple):
    """One FP8 copy of a weight, in the order of `QuantizedWeight.values`."""

    granularity: AbstractGranularity
    exact: bool  # whether its scales are powers of two
    readers: tuple[Matmul, ...]


def weight_copies(recipe: Recipe, geometry: TrainingGeometry) -> list[WeightCopy]:
    """The copies that a weight in FP8 has for the matmuls of a recipe, the forward pass first."""
    return [
        WeightCopy(granularity, planned.cast.rule.exact, readers)
        for planned in plan_weight_casts(recipe, geometry)
        if planned.cast is not None
        for granularity, readers in zip(planned.cast.granularities, planned.readers, strict=True)
    ]


# Handles: the arrays that the gradients of FP8 weights flow to.
#
# JAX would give FP8 values a cotangent in FP8. So a weight is differentiated with respect to
# another array of its shape, which no matmul reads: its original, or zeros. XLA makes no array of
# zeros that nobody reads.


def handle(weight: QuantizedWeight) -> Array:
    """The array [...] that the gradient of a weight flows to."""
    if weight.original is not None:
        return weight.original
    # Multiplied from the values, because `jnp.zeros` would have another sharding and type.
    return weight.values[0].astype(weight.dtype) * 0
