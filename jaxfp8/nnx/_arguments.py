"""Types of the arguments that the nnx layers pass on to flax's layers."""

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypeVar

from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jaxfp8._call import option_names
from jaxfp8.nnx._dot_general import LATER, AbstractFP8Matmul
from jaxfp8.ops._options import LayerOptions
from jaxfp8.recipes._recipe import Recipe

M = TypeVar("M", bound=AbstractFP8Matmul)


class EinsumArguments(LayerOptions, total=False):
    """Arguments of jaxfp8, and those that all three layers of flax take."""

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
    """Arguments of `FP8Linear`."""

    use_bias: bool


class LinearGeneralArguments(LinearArguments, total=False):
    """Arguments of `FP8LinearGeneral`."""

    axis: int | Sequence[int]
    batch_axis: Mapping[int, int]


def take_matmul(
    kind: type[M], layer: str, arguments: Any, *refused: str
) -> tuple[M, dict[str, Any]]:
    """Split the arguments of a layer, and make its matmul.

    The layer calls `start_keys` of the matmul after flax has drawn the kernel. So the kernel does
    not depend on the recipe.

    Args:
      kind: class of the matmul.
      layer: name of the layer, for the message.
      arguments: of the layer.
      *refused: names of flax's arguments that replace the matmul.

    Returns:
      The matmul, made from the arguments of jaxfp8, and the arguments for flax's layer.

    Raises:
      ValueError: if a refused argument is given and is not None, flax's default.
    """
    for name in refused:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{layer} brings its own matmul. Drop {name}={arguments[name]!r}, or use "
                f"nnx.{layer.removeprefix('FP8')}."
            )
    names = ("recipe", *option_names(LayerOptions))
    ours = {name: arguments[name] for name in names if name in arguments}
    rest = {name: arguments[name] for name in arguments if name not in (*names, *refused)}
    return kind(rngs=LATER, **ours), rest
