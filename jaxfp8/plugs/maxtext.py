"""FP8 for MaxText: an object with the methods of MaxText's `Quantization`.

MaxText's dense layers call `quant.dot_general_cls(mesh_axes=kernel_axes)()`, and its dense
mixture-of-experts layers call `quant.einsum(mesh_axes=kernel_axes)`. Its train step differentiates
all variables, and overwrites the collection `_overwrite_with_gradient` with its gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from flax.linen.spmd import logical_to_mesh_axes

from jaxfp8._typing import Array
from jaxfp8.linen._dot_general import FP8DotGeneral, FP8EinsumOp
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.ops._einsum import einsum
from jaxfp8.plan._kernels import Kernels
from jaxfp8.plugs._policy import Policy
from jaxfp8.recipes._presets import PRESETS, get
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard

PREFIX = "jaxfp8_"
"""MaxText's `quantization=` is this prefix and the name of a recipe: "jaxfp8_blockwise"."""

KernelAxes = Sequence[str | None]
AxisRules = Sequence[Sequence[Any]]


class Config(Protocol):
    """What a plug reads of MaxText's config."""

    quantization: str
    gradient_accumulation_steps: int
    logical_axis_rules: AxisRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Quantization:
    """A `Quantization` of MaxText that computes dense layers with a recipe of jaxfp8.

    Attributes:
      recipe: which quantizer for which operand.
      kernels: what casts and multiplies, an `fp8.Kernels`. None: XLA on every chip.
      gather_rules: MaxText's `logical_axis_rules`, as pairs of tuples. If given, kernels that fully
        sharded data parallelism splits are gathered in FP8. None: XLA gathers them in their dtype.
      quant_mode: what MaxText compares with its modes of serving.

    Raises:
      TypeError: if `recipe` is no Recipe, or `kernels` are no Kernels.
      ValueError: if the recipe needs keys.

    Example:
      >>> import jaxfp8 as fp8
      >>> quant = FP8Quantization(recipe=fp8.recipes.blockwise())
      >>> quant.dot_general_cls(mesh_axes=("embed", "mlp"))().recipe.name
      'blockwise'
    """

    recipe: Recipe
    kernels: Kernels | None = None
    gather_rules: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    quant_mode: str = "train"

    def __post_init__(self) -> None:
        Policy.of("MaxText", self.recipe, LayerOptions(kernels=self.kernels))  # raises errors

    def dot_general_cls(self, mesh_axes: KernelAxes = ()) -> Callable[..., FP8DotGeneral]:
        """The maker of the module that multiplies in a dense layer.

        Args:
          mesh_axes: the logical axes of the kernel, MaxText's `kernel_axes`.

        Returns:
          A callable without required arguments. It makes an `fp8.linen.FP8DotGeneral`.

        Example:
          >>> import jaxfp8 as fp8
          >>> quant = FP8Quantization(
          ...     recipe=fp8.recipes.delayed(),
          ...     gather_rules=(("activation_batch", ("data", "fsdp")), ("embed", ("fsdp",))),
          ... )
          >>> quant.dot_general_cls(mesh_axes=("embed", "mlp"))().w_shard
          Shard(axis=0, axis_name=('fsdp',))
        """
        options = LayerOptions(kernels=self.kernels, state_channel="gradient")
        if self.gather_rules is not None:
            options["w_shard"] = gathered(mesh_axes, self.gather_rules)
        return FP8DotGeneral.using(self.recipe, **options)

    def einsum(self, dtype: Any = None, mesh_axes: KernelAxes = ()) -> Callable[..., Array]:
        """The einsum of a dense mixture-of-experts layer.

        Args:
          dtype: the dtype of the computation. None: that of the activations.
          mesh_axes: the logical axes of the kernel. Experts are not gathered in FP8.

        Returns:
          `(equation, activations, kernel) -> result`. With a recipe that has state it is a linen
          module, so that it works inside a linen module only.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxfp8 as fp8
          >>> experts = FP8Quantization(recipe=fp8.recipes.current()).einsum(mesh_axes=())
          >>> experts("BSM,EMH->BSEH", jnp.ones((2, 3, 4)), jnp.ones((5, 4, 6))).shape
          (2, 3, 5, 6)
        """
        del mesh_axes
        if self.recipe.rows:
            multiply: Any = FP8EinsumOp(
                recipe=self.recipe, kernels=self.kernels, state_channel="gradient"
            )
        else:

            def multiply(equation: str, x: Array, w: Array) -> Array:
                return einsum(equation, x, w, recipe=self.recipe, kernels=self.kernels)

        def compute(equation: str, x: Array, w: Array, **_: Any) -> Array:
            to = x.dtype if dtype is None else dtype
            return multiply(equation, x.astype(to), w.astype(to))

        return compute

    @property
    def quant_dg(self) -> NoReturn:
        """MaxText's sparse mixture of experts reads it, for kernels of AQT."""
        raise NotImplementedError(
            "sparse_matmul=True passes AQT's quantizers to MaxText's own grouped matmul, and no "
            "other library can plug in. Write sparse_matmul=False, which calls einsum of this "
            "object, or call fp8.ragged_dot in your own layer."
        )


def configure(
    config: Config, *, kernels: Kernels | None = None, gather: bool = True
) -> FP8Quantization:
    """The quantization of a MaxText config, for MaxText's `configure_quantization`.

    Args:
      config: MaxText's config. `quantization` is "jaxfp8_" and the name of a recipe.
      kernels: what casts and multiplies, for instance `fp8.Kernels("h200")`.
      gather: whether kernels are gathered in FP8. With tiles each shard of a kernel needs whole
        tiles. If a model cannot be split so, write False.

    Returns:
      An `FP8Quantization`.

    Raises:
      ValueError: if the name is unknown, or if the config accumulates gradients of a recipe with
        state.

    Example:
      In MaxText's config, or on its command line:

      .. code-block:: yaml

        quantization: "jaxfp8_blockwise"
        remat_policy: "minimal_with_quantization"

      >>> import types
      >>> config = types.SimpleNamespace(
      ...     quantization="jaxfp8_mxfp8", gradient_accumulation_steps=1,
      ...     logical_axis_rules=[["activation_batch", ["data", "fsdp"]], ["embed", ["fsdp"]]],
      ... )
      >>> configure(config).recipe.name
      'mxfp8'
    """
    given = getattr(config.quantization, "value", config.quantization)  # MaxText has an enum
    name = str(given).removeprefix(PREFIX)
    # `static` needs a scale for each tensor, and `identity` quantizes nothing.
    known = sorted(set(PRESETS) - {"static", "identity"})
    if not str(given).startswith(PREFIX) or name not in known:
        raise ValueError(
            f"quantization={given!r} is no recipe of jaxfp8. Use one of "
            f"{[PREFIX + each for each in known]}."
        )
    recipe = get(name)
    if recipe.rows and config.gradient_accumulation_steps > 1:
        raise ValueError(
            f"quantization={given!r} with gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps}: MaxText adds the gradients of microbatches, "
            "and a sum of quantizer states is no state. Use gradient_accumulation_steps=1, or a "
            'recipe without state such as "jaxfp8_current".'
        )
    rules = tuple((rule[0], _names(rule[1])) for rule in config.logical_axis_rules)
    return FP8Quantization(recipe=recipe, kernels=kernels, gather_rules=rules if gather else None)


def gathered(kernel_axes: KernelAxes, rules: AxisRules) -> Shard | None:
    """How a kernel is split over mesh axes that also split the tokens, so that it is gathered.

    A mesh axis of fully sharded data parallelism splits both tokens and kernels. One axis of the
    kernel can be gathered in FP8. All mesh axes that split it must split tokens too: tensor
    parallelism must not be gathered.

    Args:
      kernel_axes: the logical axes of the kernel.
      rules: MaxText's `logical_axis_rules`: pairs of a logical axis and mesh axes.

    Returns:
      The first such axis of the kernel, or None.

    Example:
      >>> rules = [("activation_batch", ["data", "fsdp"]), ("embed", ["fsdp"]), ("mlp", ["tensor"])]
      >>> gathered(("mlp", "embed"), rules)
      Shard(axis=1, axis_name=('fsdp',))
      >>> gathered(("mlp", None), rules) is None
      True
    """
    tokens = {
        name
        for logical, names in rules
        if logical in ("activation_batch", "activation_length")
        for name in _names(names)
    }
    spec = logical_to_mesh_axes(tuple(kernel_axes), rules=tuple(map(tuple, rules)))
    for axis, names in enumerate(spec or ()):
        split = _names(names)
        if split and set(split) <= tokens:
            return Shard(axis, split)
    return None


def _names(names: Any) -> tuple[str, ...]:
    """Mesh axes as a tuple. A rule and a spec may have None, one name or several."""
    return (names,) if isinstance(names, str) else tuple(names or ())
