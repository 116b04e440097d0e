"""FP8 for haliax and levanter: a `DotGeneralOp` with quantizer state, and its place in a model.

haliax calls `layer.dot_general(lhs, rhs, dimension_numbers, ...)`. The operation is a part of the
model, so it is differentiated with it. haliax's `partition_for_grad_overwrite` finds every
`OverwriteWithGradient`, and `apply_updates` overwrites it with its gradient.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import jax
import jax.numpy as jnp

from jaxfp8._call import check_options
from jaxfp8._typing import Array, DotDimensionNumbers, DType, FP8StateError
from jaxfp8.matmul._options import LayerOptions, UnshardedOptions
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._ragged_dot import ragged_dot
from jaxfp8.plan._roofline import check_groups
from jaxfp8.plugs._policy import Policy, import_guest, is_called_by
from jaxfp8.plugs._state_bytes import StateBytes, from_bytes, split
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._init import init_state, unset_state
from jaxfp8.state._state import MatmulState

T = TypeVar("T")


def dot_general_op(recipe: Recipe, **options: Unpack[LayerOptions]) -> Any:
    """A `DotGeneralOp` of haliax, for `Linear.init(..., dot_general=)`.

    Args:
      recipe: which quantizer for which operand.
      **options: `reduce_axes`, `x_shard`, `w_shard`, `y_shard`, `kernels`; see `fp8.dot_general`.
        `state_channel` is "gradient" by default. With None, `fp8.value_and_grad` must collect the
        state.

    Returns:
      An `equinox.Module` with the state of one matmul, its attribute `state`. It is an
      `OverwriteWithGradient`, also if the recipe has no state. A cast of the model to bfloat16 or
      float16, as by levanter's policy, does not change the state.

    Raises:
      FP8StateError: when it is called in levanter's microbatches, if the recipe has state.
      ImportError: if haliax is not installed.
      TypeError: if `recipe` is not a Recipe, or if an option is unknown.
      ValueError: if the recipe needs keys.

    Example:
      .. code-block:: python

        op = fp8_haliax.dot_general_op(fp8.recipes.blockwise())
        layer = haliax.nn.Linear.init(In, Out, key=key, dot_general=op)
    """
    options.setdefault("state_channel", "gradient")
    policy = Policy.of("jaxfp8.plugs.haliax.dot_general_op", recipe, options)
    dot_op, _ = _operations()
    return dot_op(_held(init_state(policy.recipe), policy), policy)


def ragged_dot_op(
    recipe: Recipe, *, groups: int | None = None, **options: Unpack[UnshardedOptions]
) -> Any:
    """A `RaggedDotOp`, for mixtures of experts that take an operation `(lhs, rhs, group_sizes)`.

    Those of levanter do (`MoeRaggedDotOps`), and `haliax.nn.ragged_dot(..., fp8_dot=)`. lhs is
    [T, K], rhs [E, K, N], and the result [T, N]; see `fp8.ragged_dot`.

    Args:
      recipe: which quantizer for which operand.
      groups: the number of experts, for a state of each. None: one state for all of them.
      **options: `reduce_axes`, `kernels`, `save_original`; see `fp8.ragged_dot`. `state_channel` is
        "gradient" by default; see `dot_general_op`.

    Returns:
      An `equinox.Module` with the state of one grouped matmul, see `fp8.ragged_dot`. It is an
      `OverwriteWithGradient`.

    Raises:
      ImportError, TypeError, ValueError: see `dot_general_op`. Also TypeError for a shard, which
        grouped matmuls do not take, and ValueError for `groups` below 1.

    Example:
      .. code-block:: python

        op = fp8_haliax.ragged_dot_op(fp8.recipes.blockwise())
        y = op(lhs, rhs, group_sizes)
    """
    options.setdefault("state_channel", "gradient")
    name = "jaxfp8.plugs.haliax.ragged_dot_op"
    check_options(name, UnshardedOptions, options)
    policy = Policy.of(name, recipe, LayerOptions(**options))
    stacked = () if groups is None else (check_groups(groups),)
    state = unset_state(policy.recipe.rows, stacked) if policy.recipe.rows else ()
    _, grouped_op = _operations()
    return grouped_op(_held(state, policy), policy)


def quantize_linear_layers(
    tree: T,
    recipe: Recipe,
    *,
    targets: str | Sequence[str] | None = None,
    **options: Unpack[LayerOptions],
) -> T:
    """A model whose `Linear` and `MoELinear` layers of haliax multiply in FP8.

    Layers inside of `Stacked` get a state for each block. A `MoELinear`, the matrices of experts,
    gets a state for each expert, too.

    Args:
      tree: a model of haliax or levanter.
      recipe: which quantizer for which operand.
      targets: which layers. A string is a regular expression for the whole path
        ("transformer.layers.stacked.mlp.up_proj"). A sequence has the last names of paths. None:
        all layers but routers, which are `Linear` layers to the experts.
      **options: see `dot_general_op`. `MoELinear` takes those of `ragged_dot_op` only.

    Returns:
      A model that shares all arrays with `tree`.

    Raises:
      ImportError: if haliax is not installed.
      TypeError, ValueError: see `dot_general_op`.
      ValueError: if no layer matches, or if a `MoELinear` has `use_gmm`.

    Example:
      .. code-block:: python

        model = fp8_haliax.quantize_linear_layers(model, fp8.recipes.delayed(), targets=".*mlp.*")

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        overwrites, grads = haliax.quantization.partition_for_grad_overwrite(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        model = haliax.quantization.apply_updates(model, updates, overwrites)
    """
    haliax, nn = import_guest("haliax", "haliax"), import_guest("haliax.nn", "haliax")
    tree_at = import_guest("equinox", "equinox").tree_at
    make = functools.partial(dot_general_op, recipe, **options)
    make()  # raises the errors of bad arguments
    layers = (nn.Linear, nn.MoELinear)
    experts = {
        module.Experts
        for module in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nn.MoELinear))
        if isinstance(module, nn.MoELinear)
    }
    seen: list[str] = []
    changed = 0

    def special(module: object) -> bool:
        return isinstance(module, (*layers, nn.Stacked))

    def replace(prefix: str, blocks: tuple[Any, ...], path: Any, module: Any) -> Any:
        nonlocal changed
        name = ".".join(
            filter(None, [prefix, jax.tree_util.keystr(path, simple=True, separator=".")])
        )
        if isinstance(module, nn.Stacked):
            within = functools.partial(
                replace, f"{name}.stacked".lstrip("."), (*blocks, module.Block)
            )
            inner = jax.tree_util.tree_map_with_path(within, module.stacked, is_leaf=special)
            return tree_at(lambda stacked: stacked.stacked, module, inner)
        if not isinstance(module, layers):
            return module
        seen.append(name)
        router = isinstance(module, nn.Linear) and module.Out in experts
        if not _matches(name, targets) or (router and targets is None):
            return module
        changed += 1
        op: Callable[[], Any] = make
        if isinstance(module, nn.MoELinear):
            op = functools.partial(_op_of_experts, name, module, recipe, options)
        for block in reversed(blocks):
            op = haliax.vmap(op, block)
        if isinstance(module, nn.MoELinear):
            return _experts_with(module, op())
        return tree_at(lambda linear: linear.dot_general, module, op())

    tree = jax.tree_util.tree_map_with_path(
        functools.partial(replace, "", ()), tree, is_leaf=special
    )
    if not changed:
        raise ValueError(
            f"targets={targets!r} matches no Linear or MoELinear of haliax in the model. Its "
            f"layers are {seen}."
        )
    return tree


def _op_of_experts(name: str, module: Any, recipe: Recipe, options: LayerOptions) -> Any:
    """The operation of a `MoELinear`, with a state for each expert."""
    if module.use_gmm:
        raise ValueError(
            f"{name} is a MoELinear with use_gmm=True, which sorts and multiplies the tokens of "
            "each device by themselves. FP8 runs with use_gmm=False only. Set that, or leave the "
            "layer out of targets=."
        )
    groups = import_guest("haliax", "haliax").axis_size(module.Experts)
    given: Any = options
    return ragged_dot_op(recipe, groups=groups, **given)


def _experts_with(module: Any, op: Any) -> Any:
    """The layer of experts `module` that multiplies by `op`."""
    fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    return _layer_of_experts()(**fields | {"op": op})


def _matches(name: str, targets: str | Sequence[str] | None) -> bool:
    if targets is None:
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return name.rsplit(".", 1)[-1] in targets


def _held(state: Any, policy: Policy) -> Any:
    """The state as an operation holds it.

    levanter casts the whole model to its compute dtype, so the state is kept as bytes.
    `fp8.value_and_grad` collects only a `MatmulState`.
    """
    in_bytes = isinstance(state, MatmulState) and policy.options["state_channel"] == "gradient"
    return StateBytes(split(state)) if in_bytes else state


def _check_one_backward_pass(policy: Policy) -> None:
    """Raise FP8StateError inside of levanter's loop over microbatches, if the recipe has state.

    That loop keeps the state of the last microbatch only, and divides it by their number.
    """
    if policy.passes_state_as_gradient and is_called_by("levanter.grad_accum"):
        raise FP8StateError(
            f"levanter splits the batch into microbatches, but recipe {policy.recipe.name!r} "
            "has quantizer state, and levanter would divide the state of the last microbatch "
            "by their number. Set per_device_parallelism to -1 in TrainerConfig, or take a "
            "recipe without state, such as fp8.recipes.current()."
        )


@functools.cache
def _operations() -> tuple[type, type]:
    """The classes of operations for `Linear` and for experts.

    haliax defines their base, so they are made by their first use.
    """
    eqx = import_guest("equinox", "equinox")
    overwrite = import_guest("haliax.quantization", "haliax").OverwriteWithGradient

    class FP8Op(overwrite):  # type: ignore[misc, valid-type]
        held: Any
        policy: Policy = eqx.field(static=True)

        @property
        def state(self) -> Any:
            """The `MatmulState` of the matmul; () if the recipe has none."""
            return from_bytes(self.held)

        def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
            """Nothing: files of weights (torch, Hugging Face) have no quantizer state."""
            del prefix
            return {}

        def from_state_dict(self, state_dict: dict[str, Any], prefix: str | None = None) -> Any:
            """The operation with an unset state, because the old one is of other weights."""
            del state_dict, prefix
            unset = jax.tree.map(jnp.zeros_like, self.held)
            return dataclasses.replace(self, held=unset)

    class FP8DotGeneralOp(FP8Op):
        def __call__(
            self,
            lhs: Array,
            rhs: Array,
            dimension_numbers: DotDimensionNumbers,
            precision: Any = None,
            preferred_element_type: DType | None = None,
            **_: Any,
        ) -> Array:
            _check_one_backward_pass(self.policy)
            return dot_general(
                lhs, rhs, dimension_numbers, precision, preferred_element_type,
                recipe=self.policy.recipe, state=self.state, **self.policy.options,
            )  # fmt: skip

    class FP8RaggedDotOp(FP8Op):
        def __call__(self, lhs: Array, rhs: Array, group_sizes: Array) -> Array:
            _check_one_backward_pass(self.policy)
            return ragged_dot(
                lhs, rhs, group_sizes, recipe=self.policy.recipe, state=self.state,
                **self.policy.options,
            )  # fmt: skip

    return FP8DotGeneralOp, FP8RaggedDotOp


@functools.cache
def _layer_of_experts() -> type:
    """The `MoELinear` with an operation. haliax's own calls `jax.lax.ragged_dot_general`."""
    haliax, nn = import_guest("haliax", "haliax"), import_guest("haliax.nn", "haliax")

    class FP8MoELinear(nn.MoELinear):  # type: ignore[name-defined]
        op: Any

        def __call__(self, inputs: Any, group_sizes: Any, *, key: Any = None) -> Any:
            del key
            rows = inputs.rearrange((..., self.In))
            weight = self.weight.rearrange((self.Experts, self.In, self.Out))
            y = self.op(rows.array, weight.array, group_sizes.array)
            result = haliax.named(y, (*rows.axes[:-1], self.Out))
            return haliax.auto_sharded(result if self.bias is None else result + self.bias)

    return FP8MoELinear
