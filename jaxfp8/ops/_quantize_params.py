"""`quantize_params`: the weights of a model in FP8."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType, FP8StateError, PyTree
from jaxfp8.matmul._arrays import QuantizerArrays
from jaxfp8.matmul._call import AmaxAxes, Call, Places, Varying, amax_axes
from jaxfp8.matmul._operands import quantize_operand
from jaxfp8.matmul._options import check_float
from jaxfp8.matmul._tile_view import view_of_weight
from jaxfp8.numerics._formats import check_out_dtype
from jaxfp8.numerics._rounding import undifferentiable
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._amax import varying_axes
from jaxfp8.sharding._place import Place
from jaxfp8.sharding._shard import place_operand
from jaxfp8.state._identity import known_scales, match_state
from jaxfp8.state._ledger import zero_ledgers
from jaxfp8.state._state import OF_READ_MATMULS, MatmulState, is_state
from jaxfp8.state._value_and_grad import in_high_precision
from jaxfp8.weights._quantized_weight import (
    QuantizedWeight,
    WeightAxes,
    is_weight,
    plan_weight_casts,
)

# The quantizer states of weights: found by the paths of both in their trees.


def states_by_path(state: PyTree) -> dict[str, MatmulState]:
    """The states of a tree by their paths."""
    return {
        path_name(path): node
        for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state)
        if is_state(node)
    }


def path_name(path: Any) -> str:
    """The keys of a path, without the field of an nnx Variable that holds its value."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and "value" in path[-1].name:
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def find_state(name: str, states: dict[str, MatmulState]) -> MatmulState:
    """The state of the matmul that reads the weight of this path."""
    for path in (name, f"{OF_READ_MATMULS}/{name}/state"):  # that of own code of an nnx model
        if path in states:
            return states[path]
    if not states:
        raise FP8StateError(
            f"{name} has a recipe with state, but state= holds no quantizer state. Pass "
            "state=variables[fp8.linen.COLLECTION] (linen), state=model (nnx), or the state of the "
            "last step."
        )
    layer = name.rpartition("/")[0]
    below = [path for path in states if not layer or path.startswith(f"{layer}/")]
    if len(below) == 1:
        return states[below[0]]
    raise FP8StateError(
        f"{name}: the state of its matmul must be at the same path, or the only one below "
        f"{layer!r}. There are {below[:6]}. Pass state=, the states of init or of the last step, "
        f"with the structure of params. All paths are {list(states)[:20]}."
    )


# The cast of one weight that the model will hold in FP8.


def _of_primary(arrays: PyTree) -> Exception:
    (w,) = arrays
    return TypeError(
        f"quantize_params of a weight {list(w.shape)} is being differentiated, but primary=True "
        "drops the weight that its gradient would flow to. Call it outside of the loss, and take "
        "gradients with fp8.value_and_grad. Or leave primary=True out."
    )


_dropped = undifferentiable(_of_primary)  # for a weight of which only the FP8 copies are left


def _quantize_weight(
    w: Array,
    recipe: Recipe,
    axes: WeightAxes,
    *,
    stacked: int | None = None,
    state: MatmulState | None = None,
    primary: bool = False,
    name: str = "w",
) -> QuantizedWeight:
    """One weight [...] in FP8, for all matmuls of the recipe; see `fp8.quantize_params`."""
    w = check_float(name, w)
    stacked = axes.stacked if stacked is None else stacked
    if w.ndim <= stacked:
        raise ValueError(
            f"{name} {list(w.shape)} has no axes besides the {stacked} stacked ones. Lower "
            "WeightAxes.stacked."
        )
    cast: Callable[..., QuantizedWeight] = functools.partial(
        _cast, recipe=recipe, axes=axes, name=name
    )
    for _ in range(stacked):
        cast = jax.vmap(cast)
    if primary:
        w = _dropped(w)
    # The gradient flows to the original, and not through the cast.
    weight = cast(*lax.stop_gradient((w, state)))
    return weight if primary else dataclasses.replace(weight, original=w)


def requantize(
    weight: QuantizedWeight, w: Array, *, state: MatmulState | None = None, name: str = "w"
) -> QuantizedWeight:
    """The weight, or a layer of a stack, with new values w [...] of any float dtype."""
    return _quantize_weight(  # rounded first, as the layers would do
        w.astype(weight.dtype), weight.recipe, weight.axes, stacked=weight.stacked, state=state,
        primary=weight.original is None, name=name,
    )  # fmt: skip


def _cast(
    w: Array, state: MatmulState | None, *, recipe: Recipe, axes: WeightAxes, name: str
) -> QuantizedWeight:
    """One weight [...] that is not stacked, without its original."""
    if isinstance(state, MatmulState) and state.scale.ndim > 1:
        raise FP8StateError(
            f"{name} has stacked states, state.scale {list(state.scale.shape)}. If they are those "
            "of the layers of a scan, raise WeightAxes.stacked, the number of their axes. If they "
            "are those of experts, leave the kernel out by rules=: experts take it in high "
            "precision."
        )
    own = match_state(state, recipe)
    where = place_operand("w", w, axes.shard)
    view = view_of_weight(recipe, axes, where.whole_shape(w.shape))
    # It raises an error for recipes that need the weight itself.
    plan_weight_casts(recipe, view.geometry)
    across = amax_axes(recipe, axes.reduce_axes, None)
    call = Call(
        recipe=recipe, geometry=view.geometry, out_dtype=w.dtype, collected=own is not None,
        settled=own is not None and own.settled, amax_axes=across,
        places=view.places(Places(w=where)), varying=_varying(w, where, across, recipe, name),
    )  # fmt: skip
    arrays = QuantizerArrays()
    if own is not None:
        known = known_scales(own) if own.probe is None else own.probe.known
        arrays = QuantizerArrays(known, zero_ledgers(own))
    cast = quantize_operand(call, "w", view.of_w(w), arrays)
    copies: dict[int, QuantizedTensor] = {}  # two matmuls may read one copy
    for operand in cast.now.values():
        assert isinstance(operand, QuantizedTensor)
        copies[id(operand)] = operand
    seen = [cast.seen[key] for key in sorted(cast.seen)]
    return QuantizedWeight(
        values=tuple(view.of_w.undo(each.values, w) for each in copies.values()),
        scales=tuple(each.scale for each in copies.values()),
        amaxes=jnp.stack(seen) if seen else None,
        original=None,
        recipe=recipe,
        axes=axes,
        dtype=w.dtype,
        scale_axes=tuple(_scale_axes(each, view.of_w.first_axes) for each in copies.values()),
    )


def _scale_axes(copy: QuantizedTensor, axes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The axis of the weight for each axis of a scale, from those of the values."""
    if not copy.scale.ndim:
        return ()
    cells = (copy.granularity.has_cells_along(i, copy.ndim) for i in range(copy.ndim))
    return tuple(axis if many else None for axis, many in zip(axes, cells, strict=True))


def _varying(w: Array, where: Place, across: AmaxAxes, recipe: Recipe, name: str) -> Varying:
    """The mesh axes over which the weight varies inside `jax.shard_map`."""
    if not across.manual:
        return Varying()
    axes = varying_axes(w) - where.manual_axes
    if axes and "w" in recipe.tensors_in_rows:
        raise ValueError(
            f"{name} varies over {sorted(axes)} inside jax.shard_map, and recipe {recipe.name!r} "
            "has a scale for each row of it. Types do not say whether these mesh axes split its "
            "rows. Call quantize_params outside of shard_map, or name the split in "
            "WeightAxes(shard=...)."
        )
    # Axes that are not named hold apart stages or experts, as where x varies over them, too.
    return Varying(frozenset() if across.named is None else axes, axes)


# `quantize_params`: the weights of a model in FP8, cast once for all matmuls that read them.

WeightRules: TypeAlias = Sequence[tuple[str, WeightAxes | None]]
"""Pairs (match, axes). A match is a regular expression that the whole path of a weight must match.
The first match decides. None in the place of axes leaves the weight as it is."""

_KERNELS: WeightRules = ((r"(.*/)?kernel", WeightAxes()),)
"""The rules for flax's layers without attention: kernels [K, N]."""


def quantize_params(
    params: PyTree,
    recipe: Recipe,
    *,
    rules: WeightRules = _KERNELS,
    state: PyTree = (),
    primary: bool = False,
    dtype: DType | None = None,
) -> PyTree:
    """The parameters with their weights in FP8, as `QuantizedWeight`s.

    Matmuls and layers of jaxfp8 take them in the place of the weights, with the same results and
    gradients, bit for bit, and cast nothing. There are two uses.

    *Cast once a step.* Call it before the loop over microbatches. All microbatches then read the
    same FP8 weights, and the amax of delayed scaling is found once. The original weights stay: the
    gradient is theirs.

    *FP8 primary weights.* With `primary=True` the originals are dropped, so the model has 1 byte a
    weight, or 2 where two directions need two copies. The optimizer holds master weights
    (`fp8.optim.with_master_weights`), and casts them after each update.

    Take gradients with `fp8.value_and_grad`. It returns that of each weight as one array, in the
    dtype of the weight, in the place of the `QuantizedWeight`. Sum gradients of microbatches in
    float32, because `dtype` may be bfloat16. The optimizer gets the original parameters.

    The cast is XLA's on every chip. In Auto and Explicit meshes it gives the same FP8 values on
    every mesh. Tiles must not be cut by shards. Inside `jax.shard_map` each device casts its shard
    with the amax of the whole weight.

    Args:
      params: a pytree, for instance `variables["params"]` of linen or a model of nnx. The path of a
        leaf is its keys, joined by "/".
      recipe: the recipe of the matmuls that read the weights.
      rules: which leaves are weights, and what their matmul does with their axes: pairs of a
        regular expression for the whole path and a `WeightAxes`, or None for no weight. The first
        match decides. The default takes every `kernel` [K, N]. A name of your own, with stacked
        layers: `rules=[("blocks/.*", fp8.weights.WeightAxes(stacked=1))]`.
      state: the quantizer state of the matmuls, for recipes with state, for instance
        `variables[COLLECTION]` of linen or a model of nnx. The state of a weight is at the path of
        the weight, or the only one below the path of its layer.
      primary: whether to drop the original weights.
      dtype: the dtype in which the layers compute. Weights are rounded to it before the cast, as
        the layers would do. By default it is the dtype of each weight.

    Returns:
      The same tree, with `QuantizedWeight`s in the place of weights.

    Raises:
      TypeError: if a weight is no float array, if rules are no pairs, or if a loss calls it with
        `primary=True` and is differentiated with respect to the weights.
      ValueError: if a rule matches nothing, if axes do not fit, if a weight is in FP8 already, or
        if the recipe reads weights in high precision.
      FP8StateError: if the state of a weight is missing, or not the only one.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.blockwise()
      >>> def loss_fn(params, state, x):
      ...     return jnp.sum(fp8.dot(x, params["kernel"], recipe=recipe))
      >>> params, x = {"kernel": jnp.ones((256, 128))}, jnp.ones((8, 256))
      >>> in_fp8 = fp8.quantize_params(params, recipe)
      >>> in_fp8["kernel"]
      QuantizedWeight(blockwise, [256, 128] of float32, with its original)
      >>> loss, grads, _ = fp8.value_and_grad(loss_fn)(in_fp8, (), x)
      >>> grads["kernel"].shape, grads["kernel"].dtype.name
      ((256, 128), 'float32')

    References:
      TransformerEngine user guide, `quantized_model_init` and `is_first_microbatch`.
    """
    check_recipe(recipe)
    rules = _checked(rules)
    if dtype is not None:
        dtype = check_out_dtype(dtype)
    in_fp8 = not in_high_precision()  # of the twin of `fp8.memory_report`
    used: set[int] = set()

    def one(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        for i, (match, axes) in enumerate(rules):
            if re.fullmatch(match, name):
                used.add(i)
                if axes is None:
                    return leaf
                if is_weight(leaf):
                    raise ValueError(
                        f"{name} is {leaf} already. Pass the tree of original weights. To leave "
                        f"this weight as it is, put ({name!r}, None) before the other rules."
                    )
                if dtype is not None:
                    leaf = check_float(name, leaf).astype(dtype)
                return leaf if not in_fp8 else _quantize_weight(
                    leaf, recipe, axes, state=find_state(name, states) if recipe.rows else None,
                    primary=primary, name=name,
                )  # fmt: skip
        return leaf

    states = states_by_path(state)
    found = jax.tree_util.tree_map_with_path(one, params, is_leaf=is_weight)
    if unused := [match for i, (match, _) in enumerate(rules) if i not in used]:
        paths = [
            path_name(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
        ]
        raise ValueError(
            f"rules {unused} match no path of params that earlier rules leave. A rule must match "
            f"a whole path, and the first match decides. The paths are {paths[:20]}."
        )
    return found


def _checked(rules: Any) -> WeightRules:
    pairs = rules if isinstance(rules, Sequence) and not isinstance(rules, str) else [rules]
    for pair in pairs:
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or not isinstance(pair[0], str)
            or not isinstance(pair[1], WeightAxes | None)
        ):
            raise TypeError(
                f"rules has {pair!r}, but each rule must be a pair (match, axes). Write "
                'rules=[("blocks/.*kernel", fp8.weights.WeightAxes())], or None in the place of '
                "the axes, to leave a weight as it is."
            )
    return pairs
