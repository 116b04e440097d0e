"""Types of the arguments that our layers pass on to flax's."""

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypeVar

from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jaxfp8._call_options import option_names
from jaxfp8.nnx._dot_general import LATER, AbstractFP8Matmul
from jaxfp8.ops._options import LayerOptions
from jaxfp8.recipes._recipe import Recipe

M = TypeVar("M", bound=AbstractFP8Matmul)


class EinsumArguments(LayerOptions, total=False):
    """Arguments that `flax.nnx.Einsum` and all other layers take, and ours."""

    recipe: Recipe | None
    rngs: Required[nnx.Rngs]
    dtype: Dtype | None
    param_dtype: Dtype
    precision: PrecisionLike
    kernel_init: Initializer
    bias_init: Initializer
    promote_dtype: PromoteDtypeFn
    preferred_element_type: Dtype | None
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]


class LinearArguments(EinsumArguments, total=False):
    """Arguments of `flax.nnx.Linear`."""

    use_bias: bool


class LinearGeneralArguments(LinearArguments, total=False):
    """Arguments of `flax.nnx.LinearGeneral`."""

    axis: int | Sequence[int]
    batch_axis: Mapping[int, int]


def take_matmul(
    kind: type[M], layer: str, arguments: Any, *refused: str
) -> tuple[M, dict[str, Any]]:
    """The matmul of a layer, of the arguments that are ours, and the arguments of flax's layer.

    The layer calls `start_keys` of the matmul after flax has drawn the kernel, so that the kernel
    does not depend on the recipe.

    Args:
      kind: of matmul.
      layer: its name, for the message.
      arguments: of our layer.
      *refused: names of flax's arguments that bring another matmul. None is flax's default.

    Raises:
      ValueError: if the caller brings another matmul.
    """
    for name in refused:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{layer} brings its own matmul; drop {name}={arguments[name]!r}, or use "
                f"nnx.{layer.removeprefix('FP8')}."
            )
    names = ("recipe", *option_names(LayerOptions))
    ours = {name: arguments[name] for name in names if name in arguments}
    rest = {name: arguments[name] for name in arguments if name not in (*names, *refused)}
    return kind(rngs=LATER, **ours), rest
