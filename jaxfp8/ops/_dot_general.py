"""`dot_general` and `dot`."""

from typing import Any, Unpack

import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import TrainingGeometry, check_dimension_numbers
from jaxfp8._quantized_tensor import QuantizedTensor, check_scale, validate_types
from jaxfp8._typing import Array, Axes, DotDimensionNumbers, DType
from jaxfp8.matmul._arrays import Arrays, Copy, HeldCopies
from jaxfp8.matmul._call import Places
from jaxfp8.matmul._given import Given, add_bias, check_bias, check_whole_axis, prepare
from jaxfp8.matmul._options import (
    MatmulOptions,
    Options,
    check_operands,
    read_options,
)
from jaxfp8.matmul._three_matmuls import three_matmuls
from jaxfp8.matmul._tile_view import View, view_for, view_of_weight
from jaxfp8.numerics._formats import VALUE_FORMATS, check_out_dtype
from jaxfp8.plan._backends import XLA
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.prologues._prologue import produce
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import place_operand, place_result
from jaxfp8.state._identity import match_state
from jaxfp8.state._state import MatmulState
from jaxfp8.state._value_and_grad import recipe_in_context
from jaxfp8.weights._quantized_weight import QuantizedWeight, WeightAxes, handle, weight_copies

# `dot_general` in FP8, with its gradient. `dot` and `einsum` call it.


class DotOptions(MatmulOptions, total=False):
    """The options of `dot_general` and `dot`; see `fp8.dot_general`."""

    bias: Array | None


def dot_general(
    lhs: Array | tuple[Array, ...],
    rhs: Array | QuantizedWeight,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    **options: Unpack[DotOptions],
) -> Array:
    """`jax.lax.dot_general` with FP8 operands, forward and backward, as the recipe says.

    Args:
      lhs: activations x, [..., M, K] or as `dimension_numbers` say. They are bfloat16, float16 or
        float32; float64 is computed in float32. With `prologue=`, the tuple of its arrays.
      rhs: weights w, [K, N] or as `dimension_numbers` say. Or a weight that the model holds in FP8,
        from `fp8.quantize_params`.
      dimension_numbers: `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`.
      precision: of fprop, the forward matmul y = x w. None or DEFAULT lets Hopper accumulate fast;
        HIGH and HIGHEST do not. The matmuls of the gradients, dgrad and wgrad, never accumulate
        fast. Matmuls in high precision use the argument as JAX does.
      preferred_element_type: dtype of the result. The default is that of `jax.lax.dot_general`,
        with every recipe: the dtype of the operands. Of two dtypes it is the one with the larger
        range, so bfloat16 times float16 is bfloat16.
      recipe: the quantizer of each operand, for instance `fp8.recipes.current()`.
      state: the quantizer state of this matmul, for recipes with state (`fp8.init_state`).
      **options: any of the options below, by name. The default of each is None.

    Options:
      out_sharding: as in `jax.lax.dot_general`, for Explicit meshes.
      reduce_axes: inside `jax.shard_map`, names of the mesh axes that an amax is reduced over. With
        `check_vma=True` JAX's types give nearly all of them. Types do not decide an axis over which
        x and w both vary. Name it if it splits the contraction of this matmul. Leave it out if it
        splits pipeline stages, experts or anything else that has its own amaxes. By default a
        per-tensor amax is reduced over such an axis, and a per-row amax is not. An amax that a
        state records follows the type of the state. With `check_vma=False` types give nothing.
        Recipes with per-tensor amaxes then need all axes, except those of pipeline stages. Name
        them here, or in `fp8.value_and_grad(reduce_axes=)` for recipes with state. Recipes with
        per-row amaxes raise an error for them, because a per-row amax stays on its device.
        Recipes with both need `check_vma=True`. Tiles ignore the axes, because a tile never spans
        two devices.
      x_shard: `Shard(axis, mesh axis)` says how lhs is split over the mesh (sequence parallelism).
        Inside `jax.shard_map` lhs is then this device's shard. Each device quantizes its shard with
        global scales. The FP8 shards are gathered. The gradient is reduce-scattered. If no mesh is
        set, the mesh is that of lhs. If lhs is on no mesh, it is whole; see `Shard`.
      w_shard: the same for rhs (fully sharded data parallelism).
      y_shard: `Shard(axis, mesh axis)` says how the result is split (sequence parallelism, when the
        mesh axis splits what the matmul contracts). The result is reduce-scattered. Its gradient is
        quantized with global scales. The FP8 shards are gathered, once if both matmuls of the
        gradients read one copy. An Explicit mesh needs `out_sharding` with the same split.
      kernels: the kernels that cast and multiply. `fp8.Kernels("h200")` selects kernels that are
        written for that chip. By default XLA does both, on every chip. See `fp8.Kernels`.
      state_channel: how the state leaves the backward pass. None: `fp8.value_and_grad` collects it.
        "gradient": the gradient of the state is the state of the next step. It is for loops that
        take `jax.value_and_grad` of all variables, and overwrite the state with its gradient. Such
        a loop takes one backward pass per optimizer step, and each state has one use in it. Recipes
        without state ignore the option.
      save_original: which operands the backward pass casts again, ("x",), ("w",) or both. x or w
        itself is then saved in place of an FP8 copy. Use it where x or w is in memory in any case:
        for the output of attention, which attention saves for its own gradient, or for the weights
        of layers under `jax.lax.scan`. It costs one more cast, and no gather. With `prologue=` the
        arrays of the prologue are saved. Under `jax.checkpoint` the policy decides what is saved
        of the rest, see `fp8.save_fp8_residuals`.
      key: a jax PRNG key, for recipes that round stochastically. Pass a new key at each step. The
        cast uses it. Gradients are cast in the backward pass. In Auto and Explicit meshes the
        result does not depend on the mesh.
      prologue: `fp8.prologues.SwiGLU()` for lhs (gate, up), or `fp8.prologues.RMSNorm()` for lhs
        (x, gain). The left operand is then `prologue(*lhs)`. Results and gradients have the bits of
        the two separate steps. A cast in Pallas computes it tile by tile, and never writes or saves
        it in high precision.
      bias: [batch, rhs kept], added in the dtype of the result. Its gradient is summed in float32;
        with `identity()` JAX sums it. If rhs keeps one axis, a cast in Pallas computes the sum
        while it reads the gradient of the result. Otherwise that gradient is read again.
      name: what `fp8.diagnostics` calls this matmul. By default it is the file and the line of the
        call. Layers pass their path. The program does not depend on it.

    Returns:
      [batch, lhs kept, rhs kept].

    Raises:
      TypeError: for an operand that is no float array, or an unknown option.
      ValueError: for shapes, axes or shards that do not fit.
      FP8StateError: if the state is missing, belongs to another recipe, or would be lost. Also if
        `reduce_axes` is missing, or if per-row amaxes would ignore it.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, w = jnp.full((2, 4), 7.0), jnp.full((4, 3), 3.5)
      >>> fp8.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=fp8.recipes.current())
      Array([[98., 98., 98.],
             [98., 98., 98.]], dtype=float32)

    References:
      Micikevicius et al., arXiv:2209.05433; TransformerEngine user guide, FP8 primer.
    """
    how = read_options("fp8.dot_general", DotOptions, options, precision, preferred_element_type)
    array, weight = _array_of(rhs, recipe, dimension_numbers)
    recipe, state = recipe_in_context(recipe, state)
    given = _read_operands(lhs, array, dimension_numbers, recipe, how)
    kernels = check_kernels(how.kernels)
    if recipe.is_identity:
        match_state(state, recipe)
        check_result_dtype(preferred_element_type)
        return add_bias(given.high_precision(how), given.arrays.bias, given.geometry)
    view = view_for(recipe.tile, given.geometry, given.shapes, given.places.g)
    # Without a chip no shape matters, and none takes time to compute.
    backends = kernels.backends(recipe, given.size if kernels.chip else (0, 0, 0))
    call, quantizers = prepare(
        how, recipe, state, (given.arrays.x.dtype, given.arrays.w.dtype), view.geometry,
        backends if weight is None else backends._replace(w=XLA),
        places=view.places(given.places),
        out_sharding=view.out_sharding(how.out_sharding),
    )  # fmt: skip
    held = None if weight is None else _held_copies(weight, view, given.shapes[1])
    arrays = view.arrays(given.arrays._replace(quantizers=quantizers, held=held))
    y = three_matmuls(call, arrays)
    return view.result(y, how.out_sharding, lambda: given.high_precision(how))


def check_result_dtype(preferred_element_type: DType | None) -> None:
    """Raise TypeError unless the argument is a dtype or None; `lax.dot_general` checks the rest."""
    if preferred_element_type is not None:
        try:
            jnp.dtype(preferred_element_type)
        except TypeError:
            check_out_dtype(preferred_element_type)


# A weight that the model holds in FP8, as the right operand of a matmul.


def _array_of(
    weight: Any, recipe: Recipe, numbers: DotDimensionNumbers
) -> tuple[Any, QuantizedWeight | None]:
    """The right operand as an array, and the weight if it is a `QuantizedWeight`, checked."""
    if not isinstance(weight, QuantizedWeight):
        return weight, None
    if weight.recipe.uses("w") != recipe.uses("w"):
        names = [f"{each.name!r}" for each in (weight.recipe, recipe)]
        if weight.recipe.name == recipe.name:  # recipes of one function with other arguments
            names = [
                f"{each.name!r} with {each.uses('w')[0][1]}" for each in (weight.recipe, recipe)
            ]
        raise ValueError(
            f"rhs was quantized for recipe {names[0]}, but this matmul has recipe {names[1]}, "
            "which casts weights in another way. Quantize each weight with the recipe of its "
            "matmul: fp8.quantize_params(params, recipe)."
        )
    (_, contracted), (_, batch) = numbers
    given = WeightAxes(
        contracted=_positive(contracted, weight.ndim), batch=_positive(batch, weight.ndim)
    )
    mine = weight.axes
    if (set(given.contracted), given.batch) != (set(mine.contracted), mine.batch):
        raise ValueError(
            f"this matmul contracts axes {given.contracted} of rhs {list(weight.shape)}, with "
            f"batch axes {given.batch}. But rhs was quantized for {mine}. Pass "
            f"WeightAxes(contracted={given.contracted}, batch={given.batch}) to quantize_params."
        )
    return handle(weight), weight


def _positive(axes: Any, ndim: int) -> Axes:
    return tuple(axis % ndim for axis in axes)


def _held_copies(weight: QuantizedWeight, view: View, shape: Axes) -> HeldCopies:
    """The FP8 copies of a weight, as operands of the view. ValueError if they do not fit it."""
    if view_of_weight(weight.recipe, weight.axes, shape).of_w != view.of_w:
        raise ValueError(
            f"rhs was quantized for {weight.axes}, but this matmul contracts its axes in another "
            "order, so its tiles run along other axes. Give contracted= in the order of the axes "
            "of lhs."
        )
    copies: list[Copy] = []
    for i, (granularity, exact, readers) in enumerate(weight_copies(weight.recipe, view.geometry)):
        values = view.of_w(weight.values[i])
        tensor = QuantizedTensor(values, weight.scales[i], granularity, weight.dtype, exact)
        _check_held(tensor, weight)
        copies.append(Copy(tensor, readers))
    return HeldCopies(tuple(copies), weight.amaxes)


def _check_held(tensor: QuantizedTensor, weight: QuantizedWeight) -> None:
    name, cure = f"rhs, a {weight},", "fp8.quantize_params(params, recipe)"
    if (dtype := tensor.values.dtype) not in [format.dtype for format in VALUE_FORMATS]:
        raise ValueError(
            f"{name} has values of dtype {dtype}, and they must be FP8. jax.tree.map has cast or "
            f"replaced its arrays. Do so before the cast, and quantize the result: {cure}."
        )
    try:
        validate_types(tensor, "rhs")
    except ValueError as error:
        raise ValueError(
            f"rhs was quantized for {weight.axes}, and its scales do not fit this matmul: {error} "
            "If its layers are stacked, for instance for a scan, quantize with "
            "WeightAxes(stacked=1). Then scan or map over the stacked weights, or index them: "
            "jax.tree.map(lambda leaf: leaf[i], weight)."
        ) from None
    check_scale(tensor, name, cure)


# The operands of a call, checked: the arrays, their places in the mesh, and their axes.


def _read_operands(
    lhs: Any, rhs: Any, dimension_numbers: DotDimensionNumbers, recipe: Recipe, how: Options
) -> Given:
    """Check the operands that the user passed to a matmul."""
    arrays, w = check_operands(lhs, rhs, recipe, how.prologue)
    made = None if how.prologue is None else produce(how.prologue, *arrays)
    x = arrays[0] if made is None else made.value
    places = Places(place_operand("x", x, how.x_shard), place_operand("w", w, how.w_shard))
    check_whole_axis(x, places.x, how)
    shapes = places.x.whole_shape(x.shape), places.w.whole_shape(w.shape)
    geometry = TrainingGeometry.of(_axes(shapes, dimension_numbers, how), x.ndim, w.ndim)
    if how.y_shard is not None:
        y_shape = geometry.fprop.out_shape(*shapes)
        places = places._replace(g=place_result(y_shape, (x, w), how.y_shard))
    bias = how.bias
    if bias is not None:
        batch, kept, _ = geometry.fprop.rhs.shape(shapes[1])
        bias = check_bias(bias, batch + kept)
    # The gradient flows to `made.value`. `three_matmuls` returns no cotangent for these arrays.
    parts = None if made is None else lax.stop_gradient(made.operands)
    return Given(Arrays(x, w, bias, parts), places, shapes, geometry)


def _axes(
    shapes: tuple[Axes, Axes], dimension_numbers: DotDimensionNumbers, how: Options
) -> DotDimensionNumbers:
    try:
        return check_dimension_numbers(*shapes, dimension_numbers)
    except ValueError as error:
        if how.x_shard is None and how.w_shard is None:
            raise
        raise ValueError(
            f"{error} (These are the shapes of whole operands: x_shard={how.x_shard!r}, "
            f"w_shard={how.w_shard!r}.)"
        ) from None


# `dot`: the matmul of a dense layer.


def dot(
    lhs: Array | tuple[Array, ...],
    rhs: Array | QuantizedWeight,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    **options: Unpack[DotOptions],
) -> Array:
    """`lhs @ rhs + bias` in FP8: [..., K] times [K, N].

    Args:
      lhs: activations [..., K]; with `prologue=` the tuple of its arrays.
      rhs: weights [K, N].
      recipe: the quantizer of each operand, for instance `fp8.recipes.current()`.
      state: the quantizer state of this matmul, for recipes with state (`fp8.init_state`).
      precision: see `dot_general`.
      preferred_element_type: see `dot_general`.
      **options: those of `dot_general`: `out_sharding`, `reduce_axes`, `x_shard`, `w_shard`,
        `y_shard`, `kernels`, `state_channel`, `key`, `prologue`, `name`, and `bias` [N].

    Returns:
      [..., N].

    Raises:
      ValueError: if rhs has other than two axes, or lhs has none.
      TypeError, ValueError, FP8StateError: see `dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.dot(jnp.ones((2, 4)), jnp.ones((4, 1)), recipe=fp8.recipes.rowwise())
      Array([[4.],
             [4.]], dtype=float32)
      >>> x, gain = 3 * jnp.ones((2, 4)), jnp.ones(4)
      >>> norm = fp8.prologues.RMSNorm()
      >>> fp8.dot((x, gain), jnp.ones((4, 1)), recipe=fp8.recipes.current(), prologue=norm)
      Array([[4.],
             [4.]], dtype=float32)
    """
    prologue = read_options("fp8.dot", DotOptions, options).prologue
    arrays, rhs = check_operands(lhs, rhs, recipe, prologue)
    ndim = arrays[0].ndim
    if ndim < 1 or rhs.ndim != 2:
        raise ValueError(
            f"lhs has shape {list(arrays[0].shape)}, rhs has shape {list(rhs.shape)}. fp8.dot "
            "takes lhs [..., K] and rhs [K, N]. For other axes use fp8.dot_general."
        )
    return dot_general(
        arrays if prologue else arrays[0], rhs, (((ndim - 1,), (0,)), ((), ())),
        precision, preferred_element_type, recipe=recipe, state=state, **options,
    )  # fmt: skip
