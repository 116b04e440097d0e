"""`FP8GroupedLinear`: a dense layer with a kernel for each group of rows, for experts."""

from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxfp8._call import option_names
from jaxfp8._typing import Array, DType, Tensor
from jaxfp8.nnx._dot_general import LATER, AbstractFP8Matmul
from jaxfp8.nnx._state import FP8State
from jaxfp8.ops._arguments import as_array
from jaxfp8.ops._options import LayerOptions, StateChannel
from jaxfp8.ops._ragged_dot import RaggedDotOptions, ragged_dot
from jaxfp8.plan._kernels import Kernels
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._unset import unset_state


class FP8RaggedDot(AbstractFP8Matmul):
    """The grouped matmul of an `FP8GroupedLinear`, with its state."""

    argument: ClassVar[str] = "ragged_dot"

    def __init__(
        self, recipe: Recipe | None, stacked: tuple[int, ...], **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(recipe, rngs=LATER, **options)
        if self.recipe.rows:
            self.state = FP8State(unset_state(self.recipe.rows, stacked))

    def __call__(
        self, x: Array, w: Array, group_sizes: Array, precision: Any, bias: Array | None
    ) -> Array:
        """Multiply rows x [T, K] by the matrices w [E, K, N] of their groups."""
        known = option_names(RaggedDotOptions)
        options: Any = {n: v for n, v in self.matmul_options().items() if n in known}
        return ragged_dot(
            x, w, group_sizes, recipe=self.recipe, state=self.matmul_state, precision=precision,
            bias=bias, **options,
        )  # fmt: skip


class FP8GroupedLinear(nnx.Module):
    """A dense layer of experts in FP8: the rows of group e are x_e @ kernel[e] + bias[e].

    x_e are the rows of group e. The layer is called with rows x [T, K] that are sorted by group,
    and with the number of rows of each group, i32[E]. Rows of no group, behind the others, give 0.
    See `fp8.ragged_dot`. Inside `jax.shard_map` E is the number of experts on this device.

    Args:
      groups: E, the number of groups (experts).
      in_features: K, the size of the contracted axis.
      out_features: N, the size of the last axis of the result.
      use_bias: whether each group has a bias. Default: True.
      dtype: dtype that input, kernel and bias are converted to before the cast to FP8. Default:
        None, the dtype that these arrays promote to.
      param_dtype: dtype in which kernel and bias are stored. Default: float32.
      precision: see `FP8Linear`. Default: None.
      kernel_init: initializer of the kernel [E, K, N]. Default: LeCun normal of each [K, N].
      bias_init: initializer of the bias [E, N]. Default: zeros.
      rngs: `nnx.Rngs` that draws the initial values, and keys as in `FP8Linear`. No default.
      recipe: which quantizer for which operand. Default: delayed scaling.
      state_per_group: whether each group has a quantizer state of its own, stacked along axis 0
        like the kernel. Otherwise one state records the largest amax of all groups. Default: True.
      reduce_axes: see `fp8.ragged_dot`. Default: None.
      kernels: what casts and multiplies, an `fp8.Kernels`. Default: None, XLA on every chip.
      state_channel: see `FP8Linear`. Default: None.
      save_original: see `FP8Linear`. Default: None.

    Raises:
      TypeError: if `recipe` is not a Recipe.
      ValueError: if `rngs` lacks a stream for stochastic rounding.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxfp8.nnx import FP8GroupedLinear
      >>> layer = FP8GroupedLinear(3, 8, 4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((6, 8)), jnp.array([3, 0, 2])).shape
      (6, 4)
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: Any = None,
        kernel_init: Any = None,
        bias_init: Any = None,
        recipe: Recipe | None = None,
        state_per_group: bool = True,
        reduce_axes: tuple[str, ...] | None = None,
        kernels: Kernels | None = None,
        state_channel: StateChannel | None = None,
        save_original: tuple[Tensor, ...] | None = None,
    ) -> None:
        kernel_init = kernel_init or nnx.initializers.lecun_normal(batch_axis=(0,))
        bias_init = bias_init or nnx.initializers.zeros_init()
        shape = groups, in_features, out_features
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias: Any = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (groups, out_features), param_dtype))
        self.dtype, self.precision = dtype, precision
        self.ragged_dot = FP8RaggedDot(
            recipe, (groups,) if state_per_group else (), reduce_axes=reduce_axes,
            kernels=kernels, state_channel=state_channel, save_original=save_original,
        )  # fmt: skip
        self.ragged_dot.start_keys(rngs)

    def __call__(self, inputs: Array, group_sizes: Array) -> Array:
        """Apply the layer to rows [T, K] in groups of these sizes, i32[E]. The result is [T, N]."""
        bias = None if self.bias is None else self.bias[...]
        arrays = as_array("inputs", inputs), self.kernel[...], bias
        x, kernel, bias = promote_dtype(arrays, dtype=self.dtype)
        return self.ragged_dot(x, kernel, group_sizes, self.precision, bias)
