"""`FP8MoE` and `FP8GroupedLinear`, layers of experts in flax.linen."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as flax_promote_dtype

from jaxfp8._layer_arguments import documented
from jaxfp8._typing import Array, Axes, DType
from jaxfp8.linen._layers import FP8Dense
from jaxfp8.linen._matmul_module import ExpertsModule, init_local_shard, matmul_options
from jaxfp8.linen._state import matmul_state
from jaxfp8.matmul._options import (
    StateChannel,
    UnshardedOptions,
    as_array,
    check_high_precision,
    options_of,
)
from jaxfp8.moe._experts import ExpertParallel, split_gate
from jaxfp8.moe._mixture import (
    MoEStats,
    apply_mixture,
    check_mixture,
    check_tokens,
    count_local_experts,
)
from jaxfp8.moe._router import Scores
from jaxfp8.ops._ragged_dot import ragged_dot
from jaxfp8.prologues._prologue import SwiGLU
from jaxfp8.recipes._presets import delayed
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard
from jaxfp8.state._state import MatmulState

# `FP8MoE`: a layer of experts with its router.


class ExpertKernels(nn.Module):
    """The matrices of all experts of one matmul, with its quantizer state."""

    shape: tuple[int, int, int]
    kernel_init: Callable[..., Any]
    param_dtype: DType
    recipe: Recipe
    state_per_expert: bool
    state_channel: StateChannel | None
    axis: str | None

    @nn.compact
    def __call__(self) -> tuple[Array, MatmulState | tuple[()]]:
        """The kernel [E, K, N] and its state. With `axis` they are those of this device."""
        init, here = self.kernel_init, self.shape[0]
        if self.axis is not None:
            init, here = (
                init_local_shard(init, Shard(0, self.axis)),
                here // jax.lax.axis_size(self.axis),
            )
        kernel = self.param("kernel", init, self.shape, self.param_dtype)
        stacked = (here,) if self.state_per_expert else ()
        return kernel, matmul_state(self, self.recipe, self.state_channel, stacked=stacked)


@documented
class FP8MoE(ExpertsModule):
    """A layer of experts in FP8: a router sends each token to k of E experts, which are SwiGLUs.

    The result is `sum_j gate_j * (silu(a) * b) @ w_out[e_j]`, with `[a, b] = x @ w_in[e_j]`, over
    the experts e_j that the router chose for token x. The router is in float32, and computes
    `x @ router` (`fp8.moe.top_k`). The experts are `fp8.moe.swiglu_experts`, which explains the
    last arguments.

    `parallel` splits experts over a mesh axis. Outside of `jax.shard_map`, `init` does not read its
    axes, so that it may run without a mesh.

    Attributes:
      param_dtype: dtype in which kernels are stored. The router is stored in float32.
      kernel_init: initializer of the kernels [E, K, 2 F] and [E, F, K]. Default: LeCun normal of
        each matrix.
      save_original: see `fp8.moe.swiglu_experts`.

    Raises:
      TypeError, ValueError: for a field that cannot be, or see `fp8.moe.swiglu_experts`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8MoE
      >>> layer = FP8MoE(experts=4, hidden=16, k=2)
      >>> (y, stats), variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 3, 8)))
      >>> y.shape, variables["params"]["w_in"]["kernel"].shape
      ((2, 3, 8), (4, 8, 32))

    References:
      Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    experts: int
    hidden: int
    k: int
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    recipe: Recipe = delayed()
    parallel: ExpertParallel | None = None
    scores: Scores = "softmax"
    normalized: bool = True
    clamp: tuple[float, float] | None = None
    shared: int = 0
    router_init: Callable[..., Any] = nn.initializers.lecun_normal()
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal(batch_axis=(0,))
    state_per_expert: bool = True

    def __post_init__(self) -> None:
        check_mixture(
            self.experts, self.hidden, self.k, self.shared, self.parallel, self.scores, self.clamp
        )
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> tuple[Array, MoEStats]:
        """Apply the layer to tokens [..., K]. The result has their shape and order."""
        inputs = check_tokens(inputs)
        features, options = inputs.shape[-1], options_of(self, UnshardedOptions)
        router = self.param("router", self.router_init, (features, self.experts), jnp.float32)
        parallel = self.parallel
        is_global = count_local_experts(self.experts, parallel) == self.experts
        kernels = functools.partial(
            ExpertKernels, kernel_init=self.kernel_init, param_dtype=self.param_dtype,
            recipe=self.recipe, state_per_expert=self.state_per_expert,
            state_channel=self.state_channel,
            axis=None if is_global or parallel is None else parallel.axis,
        )  # fmt: skip
        w_in, state_in = kernels((self.experts, features, 2 * self.hidden), name="w_in")()
        w_out, state_out = kernels((self.experts, self.hidden, features), name="w_out")()
        check_high_precision("FP8MoE", w_in=w_in, w_out=w_out)
        x, w_in, w_out = flax_promote_dtype(inputs, w_in, w_out, dtype=self.dtype)
        keys: Any = matmul_options(self, self.recipe, options)
        if parallel is not None and self.is_initializing() and is_global:
            parallel = dataclasses.replace(parallel, axis=None, tokens=None)
        y, stats = apply_mixture(
            inputs, x, router, (w_in, w_out), k=self.k, recipe=self.recipe,
            states=(state_in, state_out), parallel=parallel, scores=self.scores,
            normalized=self.normalized, clamp=self.clamp, **keys,
        )  # fmt: skip
        if self.shared:
            dense = functools.partial(
                FP8Dense, use_bias=False, dtype=x.dtype, param_dtype=self.param_dtype,
                recipe=self.recipe, **options,
            )  # fmt: skip
            h = dense(2 * self.shared, name="shared_in")(x)
            parts = split_gate(h, self.clamp)
            y += dense(features, name="shared_out", prologue=SwiGLU())(parts)
        return y, stats


# `FP8GroupedLinear`: a dense layer with a kernel for each group of rows, for experts.


@documented
class FP8GroupedLinear(ExpertsModule):
    """A dense layer of experts in FP8: the rows of group e are x_e @ kernel[e] + bias[e].

    x_e are the rows of group e. The layer is called with rows x [T, K] that are sorted by group,
    and with the number of rows of each group, i32[E], from which `init` takes E. Rows of no group,
    behind the others, give 0. See `fp8.ragged_dot`, which explains the last arguments. Inside
    `jax.shard_map` E is the number of experts on this device.

    Attributes:
      features: N, the size of the last axis of the result.
      kernel_init: initializer of the kernel [E, K, N]. Default: LeCun normal of each [K, N].
      bias_init: initializer of the bias [E, N]. Default: zeros.

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
        options: Any = matmul_options(self, self.recipe, options_of(self, UnshardedOptions))
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
