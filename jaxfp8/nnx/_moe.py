"""`FP8MoE` and `FP8GroupedLinear`, layers of experts in flax.nnx."""

import functools
from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jaxfp8._call import check_options, option_names
from jaxfp8._layer_arguments import documented
from jaxfp8._typing import Array, DType
from jaxfp8.matmul._options import UnshardedOptions, as_array, check_high_precision
from jaxfp8.moe._experts import ExpertParallel, split_gate
from jaxfp8.moe._mixture import MoEStats, apply_mixture, check_mixture, check_tokens
from jaxfp8.moe._router import Scores
from jaxfp8.nnx._dot_general import LATER, AbstractFP8Matmul
from jaxfp8.nnx._layers import FP8Linear
from jaxfp8.nnx._state import FP8State
from jaxfp8.ops._dispatch_matmul import CombineOptions
from jaxfp8.ops._ragged_dot import RaggedDotOptions, ragged_dot
from jaxfp8.prologues._prologue import SwiGLU
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._init import unset_state

# `FP8MoE`: a layer of experts with its router.


class _GroupedMatmul(AbstractFP8Matmul):
    """A matmul of groups. `stacked` is (E,) for a state of each of E groups, else ()."""

    def __init__(
        self, recipe: Recipe | None, stacked: tuple[int, ...], **options: Unpack[UnshardedOptions]
    ) -> None:
        super().__init__(recipe, rngs=LATER, **options)
        if self.recipe.rows:
            self.state = FP8State(unset_state(self.recipe.rows, stacked))

    def options_of_groups(self, known: type) -> Any:
        """The options of the matmul at this call that a TypedDict lists. It has no shards."""
        options = self.matmul_options()
        return {name: each for name, each in options.items() if name in option_names(known)}


class ExpertKernels(_GroupedMatmul):
    """The matrices of all experts of one matmul, with its state. `FP8MoE` multiplies."""

    argument: ClassVar[str] = "kernels"
    kernel: nnx.Param[Array]


@documented
class FP8MoE(nnx.Module):
    """A layer of experts in FP8: a router sends each token to k of E experts, which are SwiGLUs.

    The result is `sum_j gate_j * (silu(a) * b) @ w_out[e_j]`, with `[a, b] = x @ w_in[e_j]`, over
    the experts e_j that the router chose for token x. The router is in float32, and computes
    `x @ router` (`fp8.moe.top_k`). The experts are `fp8.moe.swiglu_experts`, which explains the
    last arguments.

    `parallel` splits experts over a mesh axis. For `jax.shard_map` make the layer outside, and
    split its Variables.

    Args:
      features: K, the features of a token.
      param_dtype: dtype in which kernels are stored. The router is stored in float32.
      kernel_init: initializer of the kernels [E, K, 2 F] and [E, F, K]. Default: LeCun normal of
        each matrix.
      save_original: see `fp8.moe.swiglu_experts`.

    Raises:
      TypeError, ValueError: for an argument that cannot be, or if `rngs` lacks a stream for
        stochastic rounding.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxfp8.nnx import FP8MoE
      >>> layer = FP8MoE(experts=4, features=8, hidden=16, k=2, rngs=nnx.Rngs(0))
      >>> y, stats = layer(jnp.ones((2, 3, 8)))
      >>> y.shape, layer.w_in.kernel.shape
      ((2, 3, 8), (4, 8, 32))

    References:
      Shazeer et al., arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    def __init__(
        self,
        experts: int,
        features: int,
        hidden: int,
        k: int,
        *,
        rngs: nnx.Rngs,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        recipe: Recipe | None = None,
        parallel: ExpertParallel | None = None,
        scores: Scores = "softmax",
        normalized: bool = True,
        clamp: tuple[float, float] | None = None,
        shared: int = 0,
        router_init: Any = None,
        kernel_init: Any = None,
        state_per_expert: bool = True,
        **options: Unpack[UnshardedOptions],
    ) -> None:
        check_options("fp8.nnx.FP8MoE", UnshardedOptions, options)
        check_mixture(experts, hidden, k, shared, parallel, scores, clamp)
        router_init = router_init or nnx.initializers.lecun_normal()
        kernel_init = kernel_init or nnx.initializers.lecun_normal(batch_axis=(0,))
        stacked = (experts,) if state_per_expert else ()

        def matrices(k: int, n: int) -> ExpertKernels:
            kernel = kernel_init(rngs.params(), (experts, k, n), param_dtype)
            matmul = ExpertKernels(recipe, stacked, **options)
            matmul.kernel = nnx.Param(kernel)
            return matmul

        self.router = nnx.Param(router_init(rngs.params(), (features, experts), jnp.float32))
        self.w_in, self.w_out = matrices(features, 2 * hidden), matrices(hidden, features)
        self.shared_in: Any = nnx.data(None)
        self.shared_out: Any = nnx.data(None)
        if shared:
            dense = functools.partial(
                FP8Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, recipe=recipe,
                rngs=rngs, **options,
            )  # fmt: skip
            self.shared_in = dense(features, 2 * shared)
            self.shared_out = dense(shared, features, prologue=SwiGLU())
        self.w_in.start_keys(rngs)  # one key for both matmuls, after all parameters are drawn
        self.dtype, self.k, self.parallel = dtype, k, parallel
        self.scores: Scores = scores
        self.normalized, self.clamp = normalized, clamp

    def __call__(self, inputs: Array) -> tuple[Array, MoEStats]:
        """Apply the layer to tokens [..., K]. The result has their shape and order."""
        inputs = check_tokens(inputs)
        w_in, w_out = self.w_in.kernel[...], self.w_out.kernel[...]
        check_high_precision("FP8MoE", w_in=w_in, w_out=w_out)
        x, w_in, w_out = promote_dtype((inputs, w_in, w_out), dtype=self.dtype)
        options = self.w_in.options_of_groups(CombineOptions)
        if options["name"] is not None:  # the path of w_in
            options["name"] = options["name"].rpartition("/")[0]
        y, stats = apply_mixture(
            inputs, x, self.router[...], (w_in, w_out), k=self.k, recipe=self.w_in.recipe,
            states=(self.w_in.matmul_state, self.w_out.matmul_state), parallel=self.parallel,
            scores=self.scores, normalized=self.normalized, clamp=self.clamp, **options,
        )  # fmt: skip
        if self.shared_in is not None:
            y += self.shared_out(split_gate(self.shared_in(x), self.clamp))
        return y, stats


# `FP8GroupedLinear`: a dense layer with a kernel for each group of rows, for experts.


class FP8RaggedDot(_GroupedMatmul):
    """The grouped matmul of an `FP8GroupedLinear`, with its state."""

    argument: ClassVar[str] = "ragged_dot"

    def __call__(
        self, x: Array, w: Array, group_sizes: Array, precision: Any, bias: Array | None
    ) -> Array:
        """Multiply rows x [T, K] by the matrices w [E, K, N] of their groups."""
        return ragged_dot(
            x, w, group_sizes, recipe=self.recipe, state=self.matmul_state, precision=precision,
            bias=bias, **self.options_of_groups(RaggedDotOptions),
        )  # fmt: skip


@documented
class FP8GroupedLinear(nnx.Module):
    """A dense layer of experts in FP8: the rows of group e are x_e @ kernel[e] + bias[e].

    x_e are the rows of group e. The layer is called with rows x [T, K] that are sorted by group,
    and with the number of rows of each group, i32[E]. Rows of no group,
    behind the others, give 0. See `fp8.ragged_dot`, which explains the last arguments. Inside
    `jax.shard_map` E is the number of experts on this device.

    Args:
      groups: E, the number of groups (experts).
      in_features: K, the size of the contracted axis.
      out_features: N, the size of the last axis of the result.
      kernel_init: initializer of the kernel [E, K, N]. Default: LeCun normal of each [K, N].
      bias_init: initializer of the bias [E, N]. Default: zeros.

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
        **options: Unpack[UnshardedOptions],
    ) -> None:
        check_options("fp8.nnx.FP8GroupedLinear", UnshardedOptions, options)
        kernel_init = kernel_init or nnx.initializers.lecun_normal(batch_axis=(0,))
        bias_init = bias_init or nnx.initializers.zeros_init()
        shape = groups, in_features, out_features
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias: Any = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (groups, out_features), param_dtype))
        self.dtype, self.precision = dtype, precision
        self.ragged_dot = FP8RaggedDot(recipe, (groups,) if state_per_group else (), **options)
        self.ragged_dot.start_keys(rngs)

    def __call__(self, inputs: Array, group_sizes: Array) -> Array:
        """Apply the layer to rows [T, K] in groups of these sizes, i32[E]. The result is [T, N]."""
        bias = None if self.bias is None else self.bias[...]
        arrays = as_array("inputs", inputs), self.kernel[...], bias
        x, kernel, bias = promote_dtype(arrays, dtype=self.dtype)
        return self.ragged_dot(x, kernel, group_sizes, self.precision, bias)
