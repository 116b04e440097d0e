"""The mesh axes over which the amaxes of one matmul are combined inside `jax.shard_map`.

Types (`check_vma=True`) say over which manual axes a tensor varies. Where they are off or cannot
decide, the caller names the axes with `reduce_axes=`.
"""

import dataclasses

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Matmul, Tensor
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import check_axes, manual_axes, types_tell


@dataclasses.dataclass(frozen=True)
class AmaxAxes:
    """What is known of the axes before the tensors are seen. Hashable.

    Attributes:
      named: the manual mesh axes that the caller named; None if it is left to types.
      typed: whether types say over which manual axes a tensor varies.
      manual: whether the call is inside `jax.shard_map`. Outside of it an array is global, and so
        is its amax.
    """

    named: frozenset[str] | None
    typed: bool
    manual: bool

    @property
    def untyped(self) -> frozenset[str]:
        """The axes over which every amax is combined, because types say nothing."""
        return frozenset() if self.typed else self.named or frozenset()


_GLOBAL = AmaxAxes(None, typed=True, manual=False)


@dataclasses.dataclass(frozen=True)
class Variation:
    """The manual mesh axes over which the operands of a call vary, by their types.

    Axes that an operand is gathered over do not count: the matmul reads the whole.

    Attributes:
      x: the axes of the activations.
      w: the axes of the weights.
      g: the axes of the gradient; empty in the forward pass.
      named: see `AmaxAxes`.
      batched: the matmul has batch axes.
    """

    x: frozenset[str]
    w: frozenset[str]
    g: frozenset[str]
    named: frozenset[str] | None
    batched: bool

    def contracted(self, matmul: Matmul, tensor: Tensor) -> frozenset[str]:
        """The axes over which a matmul contracts a tensor across devices.

        Scales of rows have to span them. If an operand varies over an axis and the result does not,
        the matmul contracts over that axis. For fprop types cannot decide. An axis over which x and
        w both vary may split the contraction, or stages, or experts. Only the caller knows which.
        """
        if matmul == "fprop":
            if self.named is None or self.batched:
                return frozenset()
            return self.x & self.w & self.named
        mine = {"x": self.x, "w": self.w, "g": self.g}[tensor]
        return (mine | self.x) - self.w if matmul == "wgrad" else (mine | self.w) - self.x

    @property
    def apart(self) -> frozenset[str]:
        """The axes over which devices hold tensors with amaxes of their own: stages, experts."""
        return frozenset() if self.named is None else (self.x & self.w) - self.named


NO_VARIATION = Variation(frozenset(), frozenset(), frozenset(), None, batched=False)
"""Of a call outside of `jax.shard_map`."""


def amax_axes(
    recipe: Recipe, given: tuple[str, ...] | None, probed: tuple[str, ...] | None
) -> AmaxAxes:
    """The axes of a call.

    Args:
      recipe: of the call.
      given: `reduce_axes=` of the call.
      probed: `reduce_axes=` of `fp8.value_and_grad`.

    Raises:
      TypeError: if `given` is a name and not a tuple of names.
      FP8StateError: if the axes are unknown, because a local amax would be wrong. Also for axes
        that per-row amaxes would ignore.

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
        return _GLOBAL  # also while flax initializes a layer for shard_map, outside of it
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
    cure = f"Name the axes that an amax is combined over with reduce_axes= of {where}."
    if recipe.tensors_in_rows:  # per-row amaxes do not accept reduce_axes=
        cure = (
            f"Recipe {recipe.name!r} has amaxes of tensors and of rows, which needs check_vma=True."
        )
    return FP8StateError(
        f"inside shard_map(check_vma=False) over {manual_axes()} types do not tell which mesh axes "
        f"a tensor is split over. {cure}"
    )


def _ignored(recipe: Recipe, named: tuple[str, ...]) -> FP8StateError:
    cure = " If no mesh axis splits what a matmul contracts, leave reduce_axes= out."
    return FP8StateError(
        f"reduce_axes={named} is given to recipe {recipe.name!r}, which has a scale for each row "
        f"of {', '.join(recipe.tensors_in_rows)}, inside shard_map(check_vma=False) over "
        f"{manual_axes()}. Only types tell which matmul contracts a row across devices. Use "
        f"check_vma=True.{'' if recipe.combines_amaxes else cure}"
    )
