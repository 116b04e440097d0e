"""Types of the arguments that our layers pass on to flax's."""

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict

from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn


class EinsumArguments(TypedDict, total=False):
    """Arguments that `flax.nnx.Einsum` and all other layers take."""

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
