"""`FP8GroupedLinear`: a dense layer with a kernel for each group of rows, for experts."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as flax_promote_dtype

from jaxfp8._typing import Array, Axes, DType, Tensor
from jaxfp8.linen._matmul_module import matmul_options
from jaxfp8.linen._state import matmul_state
from jaxfp8.ops._arguments import as_array
from jaxfp8.ops._options import (
    LayerOptions,
    StateChannel,
    check_save_original,
    check_state_channel,
)
from jaxfp8.ops._ragged_dot import ragged_dot
from jaxfp8.plan._kernels import Kernels
from jaxfp8.recipes._presets import check_recipe, delayed
from jaxfp8.recipes._recipe import Recipe


class FP8GroupedLinear(nn.Module):
    """A dense layer of experts in FP8: the rows of group e are x_e @ kernel[e] + bias[e].

    x_e are the rows of group e. The layer is called with rows x [T, K] that are sorted by group,
    and with the number of rows of each group, i32[E], from which `init` takes E. Rows of no group,
    behind the others, give 0. See `fp8.ragged_dot`. Inside `jax.shard_map` E is the number of
    experts on this device.

    Attributes:
      features: N, the size of the last axis of the result.
      use_bias: whether each group has a bias. Default: True.
      dtype: dtype of the result. Input, kernel and bias are converted to it before the cast to FP8.
        Default: None, the dtype that these arrays promote to.
      param_dtype: dtype in which kernel and bias are stored. Default: float32.
      precision: see `FP8Dense`. Default: None.
      kernel_init: initializer of the kernel [E, K, N]. Default: LeCun normal of each [K, N].
      bias_init: initializer of the bias [E, N]. Default: zeros.
      recipe: which quantizer for which operand. Default: delayed scaling.
      state_per_group: whether each group has a quantizer state of its own, stacked along axis 0
        like the kernel. Otherwise one state records the largest amax of all groups. Default: True.
      reduce_axes: see `fp8.ragged_dot`. Default: None.
      kernels: what casts and multiplies, an `fp8.Kernels`. Default: None, XLA on every chip.
      state_channel: see `FP8Dense`. Default: None.
      save_original: see `FP8Dense`. Default: None.

    Raises:
      TypeError: if `recipe` is not a Recipe, or see `fp8.ragged_dot`.
      ValueError: for an unknown `state_channel` or `save_original`, for sizes that are not [E] with
        the E of the kernel, or see `fp8.ragged_dot`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8GroupedLinear
      >>> layer, sizes = FP8GroupedLinear(4), jnp.array([3, 0, 2])
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((6, 8)), sizes)
      >>> y.shape, variables["params"]["kernel"].shape
      ((6, 4), (3, 8, 4))
    """

    features: int
    use_bias: bool = True
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal(batch_axis=(0,))
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    recipe: Recipe = delayed()
    state_per_group: bool = True
    reduce_axes: tuple[str, ...] | None = None
    kernels: Kernels | None = None
    state_channel: StateChannel | None = None
    save_original: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        check_state_channel(self.state_channel)
        check_save_original(self.save_original)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array, group_sizes: Array) -> Array:
        """Apply the layer to rows [T, K] in groups of these sizes, i32[E]. The result is [T, N]."""
        x = as_array("inputs", inputs)
        groups, k = self._groups(as_array("group_sizes", group_sizes).shape), x.shape[-1]
        kernel = self.param(
            "kernel", self.kernel_init, (groups, k, self.features), self.param_dtype
        )
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (groups, self.features), self.param_dtype)
        promote = functools.partial(flax_promote_dtype, dtype=self.dtype)
        x, kernel, bias = promote(x, kernel, bias)
        stacked = (groups,) if self.state_per_group else ()
        state = matmul_state(self, self.recipe, self.state_channel, stacked=stacked)
        given = LayerOptions(
            reduce_axes=self.reduce_axes, kernels=self.kernels, state_channel=self.state_channel,
            save_original=self.save_original,
        )  # fmt: skip
        options: Any = matmul_options(self, self.recipe, given)
        return ragged_dot(
            x, kernel, group_sizes, recipe=self.recipe, state=state, precision=self.precision,
            bias=bias, **options,
        )  # fmt: skip

    def _groups(self, shape: Axes) -> int:
        """E, from the shape of the sizes, if it is [E] with the E of the kernel."""
        kernel: Any = nn.meta.unbox(self.get_variable("params", "kernel"))
        made = None if kernel is None else jnp.shape(kernel)[:1]
        if len(shape) != 1 or made not in (None, shape):
            raise ValueError(
                f"group_sizes has shape {list(shape)}. Pass the number of rows of each group, "
                f"{['E'] if made is None else list(made)}."
            )
        return shape[0]
