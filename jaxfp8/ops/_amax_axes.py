"""The mesh axes over which the amaxes of one matmul are reduced inside `jax.shard_map`.

With `check_vma=True`, JAX's types say over which manual axes a tensor varies. If types are off or
cannot decide, the caller names the axes with `reduce_axes=`.
"""

import dataclasses

from jaxfp8._typing import FP8StateError, Matmul, Tensor
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import check_axes, manual_axes, types_tell


@dataclasses.dataclass(frozen=True)
class AmaxAxes:
    """What is known about the axes without the tensors of the call. Hashable.

    Attributes:
      named: the manual mesh axes that the caller named; None if the caller named none.
      typed: whether types say over which manual axes a tensor varies.
      manual: whether the call is inside `jax.shard_map`. Outside of it arrays are global, and so
        are their amaxes.
    """

    named: frozenset[str] | None
    typed: bool
    manual: bool

    @property
    def untyped(self) -> frozenset[str]:
        """The axes over which every per-tensor amax is reduced. Empty if types are on."""
        return frozenset() if self.typed else self.named or frozenset()


_GLOBAL = AmaxAxes(None, typed=True, manual=False)


@dataclasses.dataclass(frozen=True)
class Variation:
    """The manual mesh axes over which the operands of a call vary, by their types.

    Axes that an operand is gathered over do not count, because the matmul reads the whole operand.

    Attributes:
      x: the axes of the activations.
      w: the axes of the weights.
      g: the axes of the gradient; empty in the forward pass.
      summed: the axes over which the matmul sums its result, by `y_shard=`.
      named: see `AmaxAxes`.
      batched: whether the matmul has batch axes.
    """

    x: frozenset[str]
    w: frozenset[str]
    g: frozenset[str]
    summed: frozenset[str]
    named: frozenset[str] | None
    batched: bool

    def contracted(self, matmul: Matmul, tensor: Tensor) -> frozenset[str]:
        """The axes over which a matmul contracts a tensor across devices.

        All devices that contract one row must use one scale for it. If an operand varies over an
        axis and the result does not, the matmul contracts over that axis.

        For fprop, types cannot decide. An axis over which x and w both vary may split the
        contraction, pipeline stages or experts. Only the caller knows which, and `y_shard=` says
        the first.
        """
        if matmul == "fprop":
            named = frozenset() if self.named is None or self.batched else self.named
            return self.x & self.w & (named | self.summed)
        mine = {"x": self.x, "w": self.w, "g": self.g}[tensor]
        return (mine | self.x) - self.w if matmul == "wgrad" else (mine | self.w) - self.x

    @property
    def apart(self) -> frozenset[str]:
        """The axes over which each device has its own amaxes: those of pipeline stages or experts.

        x and w both vary over such an axis, and the caller did not name it.
        """
        return frozenset() if self.named is None else (self.x & self.w) - self.named - self.summed


_NONE: frozenset[str] = frozenset()
NO_VARIATION = Variation(_NONE, _NONE, _NONE, _NONE, None, batched=False)
"""The variation of a call outside of `jax.shard_map`."""


def amax_axes(
    recipe: Recipe, given: tuple[str, ...] | None, probed: tuple[str, ...] | None
) -> AmaxAxes:
    """The axes of a call.

    Args:
      recipe: the recipe of the call.
      given: `reduce_axes=` of the call.
      probed: `reduce_axes=` of `fp8.value_and_grad`.

    Raises:
      TypeError: if `given` is not a tuple of names, for instance one name.
      FP8StateError: if the axes are unknown, because an amax of one shard would be wrong. Also if
        axes are named that per-row amaxes would ignore.

    Example:
      >>> import jaxfp8 as fp8
      >>> amax_axes(fp8.recipes.current(), None, None)
      AmaxAxes(named=None, typed=True, manual=False)
    """
    if given is not None and not isinstance(given, tuple | list | frozenset | set):
        raise TypeError(
            f"reduce_axes={given!r} must be a tuple of mesh axis names; write ({given!r},)."
        )
    named = given if given is not None else probed
    if named is not None:
        check_axes(named)
    if not manual_axes():
        # flax also initializes layers for shard_map outside of it. Their named axes are ignored
        # here, so that `init` does not raise an error.
        return _GLOBAL
    typed = types_tell()
    if named is None:
        if not typed and recipe.combines_amaxes:
            raise _unknown(recipe)
        return AmaxAxes(None, typed, manual=True)
    manual = frozenset(named) & set(manual_axes())
    if manual and recipe.tensors_in_rows and not typed:
        raise _ignored(recipe, tuple(named))
    return AmaxAxes(manual, typed, manual=True)


def _unknown(recipe: Recipe) -> FP8StateError:
    where = (
        "fp8.value_and_grad, this call or this layer" if recipe.rows else "this call or this layer"
    )
    cure = f"Name the axes that an amax is reduced over with reduce_axes= of {where}."
    if recipe.tensors_in_rows:  # per-row amaxes do not accept reduce_axes=
        cure = (
            f"Recipe {recipe.name!r} has amaxes of tensors and of rows, which needs check_vma=True."
        )
    return FP8StateError(
        f"inside shard_map(check_vma=False) over {manual_axes()} types do not say which mesh axes "
        f"a tensor is split over. {cure}"
    )


def _ignored(recipe: Recipe, named: tuple[str, ...]) -> FP8StateError:
    cure = " If no mesh axis splits what a matmul contracts, leave reduce_axes= out."
    return FP8StateError(
        f"reduce_axes={named} is given to recipe {recipe.name!r}, which has a scale for each row "
        f"of {', '.join(recipe.tensors_in_rows)}, inside shard_map(check_vma=False) over "
        f"{manual_axes()}. Only types say which matmul contracts a row across devices. Use "
        f"check_vma=True.{'' if recipe.combines_amaxes else cure}"
    )
