"""FP8 for MaxText: an object with the methods of MaxText's `Quantization`.

MaxText's dense layers call `quant.dot_general_cls(mesh_axes=kernel_axes)()`. Its train step
differentiates all variables, and overwrites the collection `_overwrite_with_gradient` with its
gradient. Its layer of experts is an nnx module that multiplies itself, so it gets a quantization of
its own, which holds the states of its matmuls: `FP8Quantization.of_experts`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import logical_to_mesh_axes
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.linen._dot_general import FP8DotGeneral
from jaxfp8.linen._state import COLLECTION
from jaxfp8.matmul._options import LayerOptions
from jaxfp8.ops._einsum import einsum
from jaxfp8.ops._ragged_dot import ragged_dot
from jaxfp8.plan._kernels import Kernels
from jaxfp8.plugs._policy import Policy
from jaxfp8.recipes._presets import PRESETS, get
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import manual_axes, pmax, vary_everywhere
from jaxfp8.sharding._shard import Shard
from jaxfp8.state._gradient_channel import in_gradient_channel
from jaxfp8.state._init import unset_state
from jaxfp8.state._state import MatmulState

PREFIX = "jaxfp8_"
"""MaxText's `quantization=` is this prefix and the name of a recipe: "jaxfp8_blockwise"."""

KernelAxes = Sequence[str | None]
AxisRules = Sequence[Sequence[Any]]


class Config(Protocol):
    """What a plug reads of MaxText's config."""

    quantization: str
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

    def of_experts(self, layer: Any) -> "ExpertsQuantization":
        """The quantization of a layer of experts, MaxText's `RoutedMoE`, which holds its states.

        Args:
          layer: the layer. It is called when its weights are made.

        Returns:
          An nnx module. As an attribute of the layer it is saved and differentiated with it.

        Example:
          In MaxText's `RoutedMoE.__init__`:

          .. code-block:: python

            self.quant = nnx.data(quant.of_experts(self))
        """
        return ExpertsQuantization(self, layer)

    def einsum(self, *_: Any, **__: Any) -> NoReturn:
        """MaxText's layers of experts call it, if the patch is an older one."""
        raise NotImplementedError(f"FP8Quantization.einsum: {_OLD_PATCH}")

    @property
    def quant_dg(self) -> NoReturn:
        """MaxText's layers of experts read it with `sparse_matmul=True`, if the patch is older."""
        raise NotImplementedError(f"FP8Quantization.quant_dg: {_OLD_PATCH}")


_OLD_PATCH = (
    "MaxText's layer of experts has no quantization of its own. Apply the patch of "
    "docs/maxtext.md again: RoutedMoE.__init__ must call quant.of_experts(self)."
)


class ExpertsQuantization(nnx.Module):
    """The quantization of one layer of experts, with the states of its matmuls.

    MaxText calls the matmuls of a layer in one order: gate, up, down (with `prefuse_moe_weights`
    gate and up are one). It gives them no names, so they are counted.

    Attributes:
      states: for each matmul its quantizer state, if the recipe has state. With
        `sparse_matmul=True` there is a state for each expert.
    """

    quant_mode = "train"

    def __init__(self, plug: FP8Quantization, layer: Any) -> None:
        config = layer.config
        self.plug, self.dtype = plug, layer.dtype
        self.experts = layer.num_experts
        self.apart = _names(layer._expert_parallelism_name)
        matmuls = 2 if config.prefuse_moe_weights and config.sparse_matmul else 3
        self.matmuls, self.called = matmuls, 0
        rows, stacked = plug.recipe.rows, (self.experts,) if config.sparse_matmul else ()
        states = [_variable()(unset_state(rows, stacked)) for _ in range(matmuls if rows else 0)]
        self.states = nnx.List(states)

    def einsum(self, mesh_axes: KernelAxes = ()) -> Callable[..., Array]:
        """The next einsum of a layer with `sparse_matmul=False`.

        Args:
          mesh_axes: the logical axes of the right operand. If these are axes of activations, it is
            a mask of tokens, which holds weights of the router. It is multiplied without FP8.

        Returns:
          `(equation, activations, kernel) -> result`.

        Example:
          .. code-block:: python

            y = quant.einsum(mesh_axes=("exp", "embed_moe", "mlp_moe"))("BSM,EMH->BSEH", x, w)
        """
        is_mask = any(str(name).startswith("activation_") for name in mesh_axes)

        def compute(equation: str, x: Array, w: Array, **_: Any) -> Array:
            w = w.astype(x.dtype)
            if is_mask:
                return jnp.einsum(equation, x, w)
            number, self.called = self.called, (self.called + 1) % self.matmuls
            try:
                return einsum(
                    equation, x, w, recipe=self.plug.recipe, kernels=self.plug.kernels,
                    state=self.states[number].get_value() if self.states else (),
                    state_channel="gradient",
                )  # fmt: skip
            except Exception:
                self.called = 0  # else the next call would take the states of other matmuls
                raise

        return compute

    def gmm_states(self) -> list[MatmulState]:
        """The states that `gmm` takes, in the gradient channel.

        Call it outside of MaxText's `shard_map`. JAX adds the cotangents of all devices, and a sum
        of states is no state. What the probes of these states bring back can be added.

        Returns:
          A state for each matmul; none if the recipe has no state.

        Example:
          .. code-block:: python

            states = quant.gmm_states()
        """
        return [in_gradient_channel(each.get_value()) for each in self.states]

    def gmm(self, states: Sequence[MatmulState]) -> Callable[..., Array]:
        """The grouped matmul of a layer with `sparse_matmul=True`, inside MaxText's `shard_map`.

        Args:
          states: the result of `gmm_states`, as an argument of the function that is mapped.

        Returns:
          What MaxText calls `gmm`. It takes its arguments by the same names.

        Raises:
          ValueError: later, for arguments that split a matmul, or experts of a recipe with state.

        Example:
          .. code-block:: python

            y = quant.gmm(states)(tokens, kernel, group_sizes=group_sizes)
        """
        recipe, following = self.plug.recipe, itertools.cycle(states or [None])

        def gmm(
            inputs: Array,
            kernel: Array,
            *,
            group_sizes: Array,
            weight_gather_axes: Sequence[Any] = (),
            group_offset: Any = 0,
            partial_sum: Array | None = None,
            **_: Any,  # tiles of MaxText's kernels, and what AQT needs
        ) -> Array:
            state = next(following)  # MaxText names no matmul
            _check_gmm(weight_gather_axes, group_offset, partial_sum)
            if recipe.rows and kernel.shape[0] != self.experts:
                raise ValueError(
                    f"recipe {recipe.name!r} has a state for each of {self.experts} experts, but a "
                    f"device has {kernel.shape[0]} of them. Use ici_expert_parallelism=1, or a "
                    'recipe without state such as "jaxfp8_current".'
                )
            # An expert's amaxes are those of its tokens on all devices. Devices of another part of
            # the experts have none of them. Scales of rows and tiles are those of one device.
            axes = tuple(name for name in manual_axes() if name not in self.apart)
            return ragged_dot(
                inputs.astype(self.dtype), kernel.astype(self.dtype), group_sizes, recipe=recipe,
                state=() if state is None else _leaves_once(state), kernels=self.plug.kernels,
                reduce_axes=axes if axes and recipe.combines_amaxes else None,
            )  # fmt: skip

        return gmm


def _variable() -> type[nnx.Variable[Any]]:
    """The type of the variables that MaxText's train step overwrites with their gradients."""
    kind: type[nnx.Variable[Any]] = nnx.variable_type_from_name(COLLECTION, allow_register=True)
    return kind


def _leaves_once(state: MatmulState) -> MatmulState:
    """A state whose amaxes leave `jax.shard_map` as the maximum of all devices.

    JAX adds the ledgers of devices. A sum of ledgers may give an amax that is 1/8 too large.
    """
    probe, axes = state.probe, manual_axes()
    if probe is None or probe.ledger is None or not axes:
        return state
    ledger = _one_ledger(axes, vary_everywhere(probe.ledger))
    return dataclasses.replace(state, probe=dataclasses.replace(probe, ledger=ledger))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _one_ledger(axes: tuple[str, ...], ledger: Array) -> Array:
    """The ledger. Its cotangent is the maximum over the devices on one of them, and 0 on others."""
    del axes
    return ledger


def _forward_rule(axes: tuple[str, ...], ledger: Array) -> tuple[Array, None]:
    del axes
    return ledger, None


def _backward_rule(axes: tuple[str, ...], _: None, cotangent: Array) -> tuple[Array]:
    return (jnp.where(lax.axis_index(axes) == 0, pmax(cotangent, axes), 0.0),)


_one_ledger.defvjp(_forward_rule, _backward_rule)


def _check_gmm(gather_axes: Sequence[Any], group_offset: Any, partial_sum: Array | None) -> None:
    """Raise ValueError for what `fp8.ragged_dot` does not do."""
    cures = {
        f"weight_gather_axes={gather_axes}": (len(gather_axes) > 0, "shard_exp_on_fsdp=False"),
        f"group_offset={group_offset}": (
            isinstance(group_offset, jax.Array) or group_offset not in (0, None),
            "use_ragged_sort=False or use_ring_of_experts=False",
        ),
        "partial_sum": (partial_sum is not None, "num_moe_emb_chunks=0"),
    }
    for given, (is_given, cure) in cures.items():
        if is_given:
            raise ValueError(
                f"MaxText's layer of experts passes {given} to its grouped matmul, which FP8 of "
                f"jaxfp8 does not take. Write {cure}."
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
      ValueError: if the name is unknown.

    Example:
      In MaxText's config, or on its command line:

      .. code-block:: yaml

        quantization: "jaxfp8_blockwise"
        remat_policy: "minimal_with_quantization"

      >>> import types
      >>> config = types.SimpleNamespace(
      ...     quantization="jaxfp8_mxfp8",
      ...     logical_axis_rules=[["activation_batch", ["data", "fsdp"]], ["embed", ["fsdp"]]],
      ... )
      >>> configure(config).recipe.name
      'mxfp8'
    """
    given = getattr(config.quantization, "value", config.quantization)  # MaxText has an enum
    name = str(given).removeprefix(PREFIX)
    known = sorted(set(PRESETS) - {"static"})  # `static` needs a scale for each tensor
    if not str(given).startswith(PREFIX) or name not in known:
        raise ValueError(
            f"quantization={given!r} is no recipe of jaxfp8. Use one of "
            f"{[PREFIX + each for each in known]}."
        )
    recipe = get(name)
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
